"""What a run says at its end, on one screen: what was trained, how good it is, where the model lies, what is next."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hfdist.config.model import Init
from hfdist.config.run import RunConfig
from hfdist.config.task import Head
from hfdist.data import PoolReport
from hfdist.models.image_text import is_of_images_alone
from hfdist.planning.grade import PEAK, STEP
from hfdist.records import RunRecord
from hfdist.run.usage import describe_usage
from hfdist.trainer.evaluation.loop import perplexity
from hfdist.tune.pair_losses import LOSSES
from hfdist.units import count, duration, energy, money, share, size

_FEW_STEPS = 500
_SHOWN_POOLS = 4
_LEAST_FILLED = 0.95
_PROMPT = "Once upon a time"
_LONGEST_PROMPT = 120


@dataclass(frozen=True, kw_only=True)
class Ending:
    """What a run has come to; None: not known, or not measured."""

    config: RunConfig
    record: RunRecord
    layout: str
    """The processes and the axes of the mesh."""
    model_type: str
    num_parameters: int
    num_trained: int
    folder: Path
    """What a user opens."""
    adapter_folder: Path | None = None
    step: int
    """Step of the weights in the folder."""
    stopped_by: str | None = None
    """The budget that has stopped the run before its end."""
    loss: float | None = None
    """Loss on held-out data of the weights in the folder."""
    loss_before: float | None = None
    """The same at step 0."""
    without_context: float | None = None
    """Loss of a unigram model on the same data, where it means something."""
    recall: float | None = None
    """Share of held-out queries that find their text first among all held-out ones."""
    reciprocal_rank: float | None = None
    """Mean of one over the place of that text."""
    accuracy: float | None = None
    """Share of the held-out pairs whose chosen answer is preferred."""
    margin: float | None = None
    """Mean difference of the rewards of chosen and rejected answers."""
    num_held_out: int | None = None
    """Held-out pairs."""
    rewards: tuple[float, float] | None = None
    """Mean reward of the first and of the last logged step."""
    each_reward: Mapping[str, float] = field(default_factory=dict)
    """Mean of each reward in the last logged step, where there are several."""
    learns_nothing: bool = False
    """Whether answers to one prompt have always had the same reward."""
    cut_off: float | None = None
    """Share of the last answers that were cut at `task.max_new_tokens`."""
    failed_episodes: float | None = None
    """Share of the last episodes whose environment has failed."""
    pools: Sequence[PoolReport] = ()
    num_documents: int | None = None
    """Documents that were trained on."""
    left_out: str | None = None
    """How many documents were cut or left out, in words."""
    peak_bytes: Sequence[Mapping[str, float]] = ()
    """The most memory that each rank has used, by kind."""
    graded: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """What was planned, and what was measured, by the names of `planning.grade`."""
    is_chat: bool = False
    """Whether it has learned turns of a chat, so that it is asked in its chat template."""
    sample_prompt: str | None = None
    """A prompt of the held-out examples."""


def describe_end(end: Ending) -> str:
    """Give the screen."""
    rows = [row for row in _rows(end) if row[1]]
    lines = [_title(end), *(f"  {label:<9} {text}" for label, text in rows)]
    lines += ["to use it:", *_usage(end), "what comes next:"]
    steps = list(_next(end))
    width = max(len(command) for command, _ in steps)
    return "\n".join([*lines, *(f"  {command:<{width}}  # {why}" for command, why in steps)])


def _title(end: Ending) -> str:
    name, record = end.config.run.name, end.record
    if end.stopped_by is not None:
        of = "" if record.max_steps is None else f" of {record.max_steps:,}"
        why = "has come" if end.stopped_by == "deadline" else "is used up"
        return f"{name} has stopped at step {record.step:,}{of}: train.{end.stopped_by} {why}"
    task = end.config.task.name
    how = "" if task.traits.is_of_next_tokens else f" of {task.value}"
    return f"{name} has ended: {count(record.step, 'step')}{how}"


def _rows(end: Ending) -> Iterator[tuple[str, str]]:
    yield "trained", _trained(end)
    yield "on", _data(end)
    yield "layout", f"{end.layout}; sharding {end.config.strategy.sharding.value}"
    yield "quality", _quality(end)
    yield "plan", _plan(end)
    yield "peak", _memory(end.peak_bytes)
    yield "used", describe_usage(end.record, end.config.cost)
    later = "" if end.step == end.record.step else f", of step {end.step:,}, whose held-out loss was the lowest"
    yield "model", f"{end.folder}{later}"
    if end.adapter_folder not in (None, end.folder):
        yield "adapter", f"{end.adapter_folder}, which is merged into the model"


def _trained(end: Ending) -> str:
    config = end.config
    start = "from random weights" if config.model.init is Init.random else f"from {config.model.name}"
    adapter = config.adapter.type or f"the adapter of {config.adapter.path}"
    what = f"{adapter}, {end.num_trained:,} parameters beside " if config.adapter.is_used else ""
    others = end.num_parameters - (end.num_trained if config.adapter.is_used else 0)
    return f"{what}a {end.model_type} of {others:,} parameters, {start}"


def _data(end: Ending) -> str:
    task = end.config.task

    def words(pool: PoolReport) -> str:
        part = f"{share(pool.share)} " if len(end.pools) > 1 else ""
        filled = f", sequences filled to {share(pool.filled)}" if pool.filled < _LEAST_FILLED else ""
        # The one pool of all sources has no name of its own.
        name = pool.name if len(end.pools) > 1 else ", ".join(end.config.data.sources)
        there = count(pool.num_documents, task.name.traits.unit)
        read = f"{pool.epochs:.2f} epochs of {there}"
        if pool.epochs < 1 and end.num_documents is not None and len(end.pools) == 1:
            read = f"from {end.num_documents:,} of {there}"
        if task.name.traits.is_reinforcement:
            return f"{part}{name}: {pool.sequences:,} of {there}"
        return f"{part}{name}: {pool.tokens:,} tokens, {read}{filled}"

    shown = [words(pool) for pool in end.pools[:_SHOWN_POOLS]] or [f"{end.record.tokens:,} tokens"]
    more = len(end.pools) - _SHOWN_POOLS
    parts = [*shown, *([f"{more} more"] if more > 0 else []), *([end.left_out] if end.left_out else [])]
    if task.name.traits.is_reinforcement:
        limits = "task.max_new_tokens" if task.environment is None else "task.max_turns or task.max_new_tokens"
        cut = f", {share(end.cut_off)} of those of the last step cut off at {limits}" if end.cut_off else ""
        failed = f", {share(end.failed_episodes)} failed by the environment" if end.failed_episodes else ""
        parts.append(f"{task.num_generations} answers to each{cut}{failed}")
    return "; ".join(parts)


def _quality(end: Ending) -> str:
    task, loss, before = end.config.task, end.loss, end.loss_before
    if task.name.traits.is_reinforcement:
        return ", ".join(_rewards(end)) or "not measured"
    if loss is None:
        return "not measured: the run has no held-out data"
    if before is None and task.name.traits.has_reference and task.loss in LOSSES and not task.nll_weight:
        # Of a model that is its reference.
        before = float(LOSSES[task.loss].of(torch.zeros(()), torch.zeros(()), task))
    words = f"held-out loss {loss:.4f}" + ("" if before is None else f" ({before:.4f} before training)")
    if task.name.traits.is_of_next_tokens:
        words += f", perplexity {perplexity(loss):,.1f}"
        return words if end.without_context is None else f"{words}; {_beside(loss, end.without_context, end.step)}"
    if end.recall is not None:
        words += f", recall@1 {share(end.recall)}, MRR {end.reciprocal_rank:.4f}"
    if end.accuracy is not None:
        pairs = "" if end.num_held_out is None else f" of {count(end.num_held_out, 'pair')}"
        words += f", accuracy {share(end.accuracy)}{pairs} (50 % by chance)"
    return words if end.margin is None else f"{words}, margin {end.margin:.3f}"


def _rewards(end: Ending) -> Iterator[str]:
    if end.rewards is not None:
        first, last = end.rewards
        each = "".join(f", {name} {value:.4f}" for name, value in end.each_reward.items())
        yield f"reward {last:.4f} in the last step{each} ({first:.4f} in the first)"
    if end.loss is not None:
        at_first = "" if end.loss_before is None else f" ({0.0 - end.loss_before:.4f} before training)"
        yield f"held-out reward {0.0 - end.loss:.4f}{at_first}, of greedy answers"
    if end.learns_nothing:
        yield "nothing learned: all answers to a prompt always had the same reward"


def _beside(loss: float, without_context: float, steps: int) -> str:
    baseline = f"a model without context (unigram) has {without_context:.4f}"
    if loss < without_context:
        return baseline
    few = f"{count(steps, 'step')} are few" if steps > 1 else "1 step is few"
    return f"{baseline}, which is better: {few if steps < _FEW_STEPS else 'look at the curves and the learning rate'}"


def _plan(end: Ending) -> str:
    currency = end.config.cost.currency
    forms = {PEAK: size, STEP: duration, "energy": energy, "cost": lambda value: money(value, currency)}
    names = {PEAK: "memory of a rank", STEP: "a step", "energy": "energy", "cost": "cost"}
    parts = [
        f"{names.get(name, name)} {form(end.graded[name][1])} (planned: {form(end.graded[name][0])})"
        for name, form in forms.items()
        if name in end.graded
    ]
    return f"in training: {', '.join(parts)}" if parts else ""


def _memory(peaks: Sequence[Mapping[str, float]]) -> str:
    parts = []
    for kind in peaks[0] if peaks else ():
        values = [peak[kind] for peak in peaks]
        low, high = size(min(values)), size(max(values))
        ranks = "" if len(values) == 1 else " on each rank" if low == high else ", by rank"
        parts.append(f"{kind} {low if low == high else f'{low} to {high}'}{ranks}")
    return f"{'; '.join(parts)}, with evaluations and exports" if parts else ""


def _usage(end: Ending) -> list[str]:
    """Give lines of Python to copy, at the margin so that a prompt takes them."""
    folder = json.dumps(str(end.folder), ensure_ascii=False)
    head = end.config.task.name.traits.head
    if head is Head.none:
        lines = ["from sentence_transformers import SentenceTransformer", f"model = SentenceTransformer({folder})"]
        asked, found = 'model.encode_query(["A query."])', 'model.encode_document(["A text.", "Another one."])'
        return [*lines, f"print(model.similarity({asked}, {found}))"]
    if end.config.data.images.used:
        return _usage_with_image(folder)
    name, package = "AutoModelForCausalLM", "transformers"
    if is_of_images_alone(end.model_type):
        name = "AutoModelForImageTextToText"
    if head is Head.score:
        name = "AutoModelForSequenceClassification"
    if end.config.adapter.is_used and not (end.folder / "config.json").is_file():
        name, package = name.replace("AutoModel", "AutoPeftModel"), "peft"
    alone = package == "transformers"
    lines = [f"from transformers import {f'{name}, ' if alone else ''}AutoTokenizer"]
    lines += [] if alone else [f"from {package} import {name}"]
    lines.append(f"model, tokenizer = (auto.from_pretrained({folder}) for auto in ({name}, AutoTokenizer))")
    if head is Head.score:
        return [*lines, 'print(model(**tokenizer("A good answer.", return_tensors="pt")).logits)']
    of_data = end.sample_prompt if len(end.sample_prompt or "") <= _LONGEST_PROMPT else None
    prompt = json.dumps(end.config.report.sample_prompt or of_data or _PROMPT, ensure_ascii=False)
    inputs = f'tokenizer({prompt}, return_tensors="pt")'
    if end.is_chat:
        lines.append('chat = [{"role": "user", "content": "Who are you?"}]')
        inputs = 'tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")'
    # As the sample above: an answer is greedy, and what a model continues freely would repeat itself.
    choice = "do_sample=False" if of_data and not end.config.report.sample_prompt else "do_sample=True, top_k=40"
    return [*lines, f"print(tokenizer.decode(model.generate(**{inputs}, max_new_tokens=50, {choice})[0]))"]


def _usage_with_image(folder: str) -> list[str]:
    """Give lines of Python that ask a model about an image."""
    chat = (
        '[{"role": "user", "content": [{"type": "image", "path": "IMAGE"}, {"type": "text", "text": "What is it?"}]}]'
    )
    how = 'add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"'
    classes = "AutoModelForImageTextToText, AutoProcessor"
    return [
        f"from transformers import {classes}",
        f"model, processor = (auto.from_pretrained({folder}) for auto in ({classes}))",
        f"inputs = processor.apply_chat_template({chat}, {how})",
        "print(processor.decode(model.generate(**inputs, max_new_tokens=50, do_sample=False)[0]))",
    ]


def _next(end: Ending) -> Iterator[tuple[str, str]]:
    run_dir, folder = shlex.quote(end.config.run.dir), shlex.quote(str(end.folder))
    yield f"hfdist report {run_dir}", "makes a page with its curves"
    if end.config.task.name.traits.is_reinforcement:
        yield f"head {shlex.quote(str(end.config.run.folder.rollouts))}", "shows answers with their rewards"
    yield f"hfdist audit run={run_dir}", "proves that it read the data as planned"
    if end.record.processes == 1:
        yield "hfdist prove strategy=zero2 launch.processes=2", "shows that two processes train as one does"
    if end.config.export.push_to is None:
        yield f"hf upload OWNER/NAME {folder}", "brings the model to the Hub"
