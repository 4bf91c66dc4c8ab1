"""Try a type on rows with images: one process against plain transformers, then layouts against one process.

type -> a folder with a small model and its processor -> plain transformers: its own batches, loss and gradients
                                                      -> hfdist, one process                compared with that
                                                      -> hfdist, ranks of a layout          compared with one process

Each trains for one step by a large rate of plain gradient descent. So the folder that it saves says the gradient of
each weight: what the step has changed, divided by the rate.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES  # type: ignore[attr-defined]  # no __all__

from hfdist.apart import Limits, confine
from hfdist.config.batch import IGNORED
from hfdist.config.model import ModelConfig
from hfdist.config.task import Head
from hfdist.data.packing.packed_images import make_trial
from hfdist.data.tokenization.image_tokens import ImageTokens
from hfdist.errors import ConfigError, HfdistError, first_line
from hfdist.models.flops import num_parameters
from hfdist.models.image_text import feature_token
from hfdist.models.image_trials import find_positions, why_rows_mix
from hfdist.models.processor import load_processor
from hfdist.models.tokenizer import train_bpe
from hfdist.testing import RankFailed, run_ranks
from tests.distributed.image_runs import finetune
from tests.distributed.runs import losses
from tests.image_models import draw
from tests.zoo.image_models import NoProcessor, make_model_and_processor, save
from tests.zoo.splitting import TOLERANCE, compare_gradients
from tests.zoo.tasks import MOST_PARAMETERS, ask, short

LAYOUTS = ("ddp", "zero3", "fsdp2", "pipeline")
NUM_RANKS = 2
RATE = 2.0**14
"""Of the step: weights change by so much more than they are that a gradient keeps its digits."""
_STEP = (
    "data.packing=none",
    "data.eval_fraction=0",
    "train.max_steps=1",
    "train.eval_every=null",
    "train.max_grad_norm=1e9",
    "optimizer.name=sgd",
    f"optimizer.lr={RATE}",
    "optimizer.weight_decay=0",
)
ROW_IMAGES = (1, 0, 2, 1)
"""Images of each row; all rows are one step."""
_SAID = "a cat and a square"
_LIMITS = Limits(cpu_seconds=120, memory_bytes=8 * 2**30)
_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class TriedImages:
    """What came of a type on rows with images."""

    refused: str = ""
    """What a run says of it before it trains."""
    missing: str = ""
    """Why it could not be tried."""
    failed: str = ""
    """What hfdist raises where the class itself computes a loss."""
    loss_difference: float = 0.0
    gradient_difference: float = 0.0
    """Of one process from plain transformers: of the loss, and the largest of all weights."""
    worst_parameter: str = ""
    packs: bool = False
    """Whether packed rows with images are computed as each by itself."""
    layouts: Mapping[str, str] = field(default_factory=dict)
    """By layout: `exact`, `refused: ` or `not yet: ` and why, or `wrong: ` and what."""
    layout_differences: Mapping[str, float] = field(default_factory=dict)
    """By layout that trains: the largest difference of a gradient or the loss from one process."""

    @property
    def reason(self) -> str:
        """Why there is nothing to compare; empty: there is."""
        return self.refused or self.missing or self.failed

    @property
    def verdict(self) -> str:
        """`exact`, `refused`, `not yet`, or `wrong`; a layout may be refused where others are exact."""
        if self.refused or self.missing:
            return "refused" if self.refused else "not yet"
        # Also where one is no number.
        is_exact = all(one <= TOLERANCE for one in (self.loss_difference, self.gradient_difference))
        if self.failed or not is_exact or any(one.startswith("wrong") for one in self.layouts.values()):
            return "wrong"
        return "exact"


def try_images(model_type: str, layouts: Sequence[str] = LAYOUTS) -> TriedImages:
    """Try a type in processes of its own, with limits of time and memory."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            (found,) = run_ranks(_try_plain, 1, model_type, folder, timeout_seconds=_SECONDS, group=False)
        except RankFailed as error:
            return TriedImages(missing=short(f"its process ends: {_told(error)}"))
        if found.reason:
            return found
        try:
            _train(folder, "single", 1)
        except RankFailed as error:
            if isinstance(error.__cause__, ConfigError):
                return TriedImages(refused=short(f"{error.__cause__.what}: {error.__cause__.found}"))
            return replace(found, failed=short(_told(error)))
        loss, gradient, worst = _compare(folder, "single", "plain")
        found = replace(found, loss_difference=loss, gradient_difference=gradient, worst_parameter=worst)
        verdicts, differences = {}, {}
        for layout in layouts:
            verdicts[layout], difference = _try_layout(folder, layout)
            if difference is not None:
                differences[layout] = difference
        return replace(found, layouts=verdicts, layout_differences=differences)


def _try_layout(folder: Path, layout: str) -> tuple[str, float | None]:
    """Give the verdict of a layout, and how far it is from one process."""
    try:
        _train(folder, layout, NUM_RANKS)
    except RankFailed as error:
        return short(_verdict_of(error)), None
    try:
        loss, gradient, worst = _compare(folder, layout, "single")
    except AssertionError as error:
        return f"wrong: {error}", None
    is_exact = loss <= TOLERANCE and gradient <= TOLERANCE
    return "exact" if is_exact else f"wrong: {worst}", max(loss, gradient)


def _verdict_of(error: RankFailed) -> str:
    """Give the verdict of a layout whose run has ended with an error, and why, by the key that the error names."""
    cause = error.__cause__
    if isinstance(cause, HfdistError) and cause.where is not None:
        if cause.where.startswith("strategy."):
            return f"refused: {_told(error)}"
        if cause.where == "model.name":
            # One process has read the same folder: transformers does not read it into this layout.
            return f"not yet: {cause.what}"
    return f"wrong: {_told(error)}"


def _train(folder: Path, layout: str, num_ranks: int) -> None:
    """Train a step, and keep its loss and gradients as a file."""
    run = folder / f"run-{layout}"
    strategy = () if layout == "single" else (f"strategy={layout}",)
    words = (*_STEP, f"data.cache_dir={folder / 'cache'}", *strategy)
    finetune(run, folder / "model", folder / "rows.jsonl", num_ranks, *words, timeout_seconds=_SECONDS)
    _keep(folder, layout, losses(run)[0], run / "model")


def _keep(folder: Path, name: str, loss: float, saved: Path) -> None:
    """Keep the loss of a run and the gradients that its folder says."""
    before, after = load_file(folder / "model" / "model.safetensors"), load_file(saved / "model.safetensors")
    assert before.keys() == after.keys(), f"other tensors are saved: {sorted(before.keys() ^ after.keys())[:3]}"
    save_file({key: (value - after[key]) / RATE for key, value in before.items()}, folder / f"{name}.safetensors")
    (folder / f"{name}.json").write_text(json.dumps(loss))


def _compare(folder: Path, name: str, reference: str) -> tuple[float, float, str]:
    """Give how far the loss and the gradients are from those of a reference, relatively, and the worst weight."""
    loss, expected = (json.loads((folder / f"{one}.json").read_text()) for one in (name, reference))
    gradient, worst = compare_gradients(*(load_file(folder / f"{one}.safetensors") for one in (name, reference)))
    return abs(loss - expected) / abs(expected), gradient, worst


def _try_plain(model_type: str, folder: Path) -> TriedImages:
    """Write the model, its processor and rows, and what plain transformers makes of them, into a folder."""
    confine(_LIMITS)
    try:
        architecture = AutoConfig.for_model(model_type)
        ask(architecture, Head.tokens)
        if model_type not in PROCESSOR_MAPPING_NAMES:
            load_processor(ModelConfig(type=model_type), architecture, train_bpe(["a text"], 257))
    except ConfigError as error:
        return TriedImages(refused=short(error.what))
    try:
        model, processor = make_model_and_processor(model_type)
        if (size := num_parameters(model)) > MOST_PARAMETERS:
            return TriedImages(missing=f"its small model has {size:,} parameters")
        save(model, processor, folder / "model")
        rows = _write_rows(folder)
        loss = _run_plain(folder, rows)
    except NoProcessor as error:
        return TriedImages(missing=short(str(error)))
    except Exception as error:  # whatever a type raises that needs other parts than these
        reason = _why_refused(folder / "model")
        if reason:
            return TriedImages(refused=short(reason))
        return TriedImages(missing=short(f"{type(error).__name__}: {first_line(error)}"))
    _keep(folder, "plain", loss, folder / "plain")
    return TriedImages(packs=_packs(folder / "model"))


def _why_refused(folder: Path) -> str:
    """Say why a run refuses the processor of a folder, if its class does not write text for an image by itself."""
    if not (folder / "processor_config.json").is_file():
        return ""
    try:
        if "replace_image_token" in vars(type(_processor_of(folder)).__mro__[1]):
            # It may be that the parts made here are not enough.
            return ""
        tokens_of(folder)
    except ConfigError as error:
        return f"{error.what}: {error.found}"
    return ""


def tokens_of(folder: Path) -> ImageTokens:
    """Make what images become for the model in a folder."""
    config = AutoConfig.from_pretrained(folder)
    return ImageTokens(_processor_of(folder), find_positions(config), feature_token(config))


def _processor_of(folder: Path) -> Any:
    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    return load_processor(ModelConfig(name=str(folder)), config, tokenizer)


def _packs(folder: Path) -> bool:
    try:
        images = tokens_of(folder)
    except ConfigError:
        return False
    return why_rows_mix(AutoConfig.from_pretrained(folder), lambda: make_trial(images)) is None


def _write_rows(folder: Path) -> list[dict[str, Any]]:
    """Write rows with and without images as a file, with the images beside it."""
    rows, number = [], 0
    for row, count in enumerate(ROW_IMAGES):
        names = [f"{number + place}.png" for place in range(count)]
        for name in names:
            draw(number).save(folder / name)
            number += 1
        parts = [*({"type": "image"} for _ in names), {"type": "text", "text": f"what is in picture {row}?"}]
        answer = [{"type": "text", "text": f"{_SAID} {row * 7}"}]
        messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
        rows.append({"messages": messages, "images": names})
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return rows


def _run_plain(folder: Path, rows: Sequence[Mapping[str, Any]]) -> float:
    """Train a step with plain transformers, save the model, and give the mean loss over all answers."""
    model = AutoModelForImageTextToText.from_pretrained(folder / "model").train()
    processor = _processor_of(folder / "model")
    batches = [_plain_batch(processor, row, folder) for row in rows]
    counts = [int((batch["labels"] != IGNORED).sum()) for batch in batches]
    total = 0.0
    for batch, count in zip(batches, counts, strict=True):
        loss = model(**batch).loss * count / sum(counts)
        loss.backward()
        total += loss.item()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=RATE)
    model.save_pretrained(folder / "plain")
    return total


def _plain_batch(processor: Any, row: Mapping[str, Any], folder: Path) -> dict[str, torch.Tensor]:
    """Give what the processor itself makes of a row, with the tokens of its answer as labels."""
    text = processor.apply_chat_template(row["messages"], tokenize=False)
    pictures = [Image.open(folder / name).convert("RGB") for name in row["images"]] or None
    batch = processor(text=[text], images=pictures, add_special_tokens=False, return_tensors="pt")
    said = f"{row['messages'][1]['content'][0]['text']}<|im_end|>"
    answer = processor.tokenizer.encode(said, add_special_tokens=False)
    ids = batch["input_ids"][0].tolist()
    start = next(n for n in range(len(ids)) if ids[n : n + len(answer)] == answer)
    labels = torch.full_like(batch["input_ids"], IGNORED)
    labels[0, start : start + len(answer)] = torch.tensor(answer)
    return {**batch, "labels": labels}


def _told(error: RankFailed) -> str:
    cause = error.__cause__
    if isinstance(cause, HfdistError):
        return f"{cause.what}: {cause.found}"
    return str(error).strip().splitlines()[-1]
