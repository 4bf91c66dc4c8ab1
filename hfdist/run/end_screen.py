"""What a run says at its end, on one screen: what was trained, how good it is, where the model lies, what is next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence

import torch

from hfdist.config.model import Init
from hfdist.data import PoolReport
from hfdist.planning.grade import PEAK, STEP
from hfdist.run.ending import Ending
from hfdist.run.how_to_use import describe_use
from hfdist.run.usage import describe_usage
from hfdist.trainer.evaluation.loop import perplexity
from hfdist.tune.pair_losses import LOSSES
from hfdist.units import count, duration, energy, money, share, size

_FEW_STEPS = 500
_SHOWN_POOLS = 4
_LEAST_FILLED = 0.95


def describe_end(end: Ending) -> str:
    """Give the screen."""
    rows = [row for row in _rows(end) if row[1]]
    lines = [_title(end), *(f"  {label:<9} {text}" for label, text in rows)]
    lines += ["to use it:", *describe_use(end), "what comes next:"]
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
        # Before the first step the model is its own reference.
        before = float(LOSSES[task.loss].function(torch.zeros(()), torch.zeros(()), task))
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
        f"{names[name]} {form(end.graded[name].measured)} (planned: {form(end.graded[name].planned)})"
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
