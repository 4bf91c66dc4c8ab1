"""Rows with and without images, fine-tuning on forked ranks, and what came of it."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from hfdist.config.composition.compose import compose_config
from hfdist.testing import run_ranks
from recipes.finetune import main
from tests.image_models import draw

STEPS = 5
_COMMON = (
    "model.init=pretrained",
    "data=files",
    "data.sequence_length=256",
    "data.lanes=4",
    "data.workers=0",
    "data.eval_fraction=0.1",
    "data.eval_sequences=4",
    "train.epochs=null",
    f"train.max_steps={STEPS}",
    "train.global_batch_size=4",
    "train.micro_batch_size=1",
    f"train.eval_every={STEPS}",
    "evaluate.at_start=false",
    "optimizer.lr=2e-3",
    "optimizer.schedule=constant",
    # Decay tells a gradient of zeros from none; gradients of nearly nothing do not become whole steps.
    "optimizer.weight_decay=0.5",
    "optimizer.eps=1e-4",
    "checkpoint=none",
    "report=quiet",
)


def write_rows(folder: Path, *, num_rows: int = 40, most_images: int = 2, first_image: int = 0) -> Path:
    """Write rows of which each has from none to so many images, in files beside them; give their file.

    `first_image`: number of the first drawing; with another one, the same rows show other images of the same sizes.
    """
    generator = torch.Generator().manual_seed(0)
    (folder / "seen").mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(num_rows):
        count = int(torch.randint(most_images + 2, (), generator=generator)) - 1
        names = [f"seen/{number}-{place}.png" for place in range(count)]
        for place, name in enumerate(names):
            draw(3 * number + place + 15 * first_image).save(folder / name)
        parts = [*({"type": "image"} for _ in names), {"type": "text", "text": f"what is in picture {number}?"}]
        messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": f"a cat and {number * 7}"}]
        rows.append({"messages": messages, "images": names})
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def make_config(folder: Path, model: Path, rows: Path, *overrides: str):
    """Compose a fine-tuning of a model on rows."""
    own = (f"model.name={model}", f"model.tokenizer.name={model}", f"data.sources.files.path={rows}")
    return compose_config([*_COMMON, *own, f"run.dir={folder}", *overrides], name="finetune")


def finetune(
    folder: Path, model: Path, rows: Path, num_ranks: int, *overrides: str, timeout_seconds: float = 240
) -> Path:
    """Fine-tune on forked ranks; gives the run's folder."""
    config = make_config(folder, model, rows, *overrides)
    run_ranks(main.__wrapped__, num_ranks, config, group=num_ranks > 1, timeout_seconds=timeout_seconds)
    return folder
