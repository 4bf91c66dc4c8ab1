"""The screen at the end of a run: what was trained, how good it is, where the model lies, which commands are next."""

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
"""Fewer steps than these say little: a loss that is still high may come from that alone."""
_SHOWN_POOLS = 4
"""The most pools of documents that the screen names."""
_LEAST_FILLED = 0.95
"""Share of a sequence that holds tokens, from which on the screen does not mention it."""


def describe_end(end: Ending) -> str:
    """Give the text of the screen, of several lines."""
    lines = [_title(end), *(f"  {label:<9} {text}" for label, text in _rows(end) if text)]
    lines += ["to use it:", *describe_use(end), "what comes next:"]
    commands = list(_next_commands(end))
    width = max(len(command) for command, _ in commands)
    lines += [f"  {command:<{width}}  # {why}" for command, why in commands]
    return "\n".join(lines)


def _title(end: Ending) -> str:
    name, record = end.config.run.name, end.record
    if end.stopped_by is not None:
        of_all = "" if record.max_steps is None else f" of {record.max_steps:,}"
        why = "has come" if end.stopped_by == "deadline" else "is used up"
        return f"{name} has stopped at step {record.step:,}{of_all}: train.{end.stopped_by} {why}"
    task = end.config.task.name
    of_task = "" if task.traits.is_of_next_tokens else f" of {task.value}"
    return f"{name} has ended: {count(record.step, 'step')}{of_task}"


def _rows(end: Ending) -> Iterator[tuple[str, str]]:
    """Give label and text of each row; a row with an empty text is left out."""
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
    if not config.adapter.is_used:
        return f"a {end.model_type} of {end.num_parameters:,} parameters, {start}"
    adapter = config.adapter.type or f"the adapter of {config.adapter.path}"
    others = end.num_parameters - end.num_trained
    return f"{adapter}, {end.num_trained:,} parameters beside a {end.model_type} of {others:,} parameters, {start}"


def _data(end: Ending) -> str:
    parts = [_describe_pool(end, pool) for pool in end.pools[:_SHOWN_POOLS]] or [f"{end.record.tokens:,} tokens"]
    num_more = len(end.pools) - _SHOWN_POOLS
    if num_more > 0:
        parts.append(f"{num_more} more")
    if end.left_out:
        parts.append(end.left_out)
    if end.config.task.name.traits.is_reinforcement:
        parts.append(_describe_answers(end))
    return "; ".join(parts)


def _describe_pool(end: Ending, pool: PoolReport) -> str:
    """Say how much was read of one pool of documents."""
    traits = end.config.task.name.traits
    # The one pool of all sources has no name of its own.
    name = ", ".join(end.config.data.sources)
    if len(end.pools) > 1:
        name = f"{share(pool.share)} {pool.name}"
    there = count(pool.num_documents, traits.unit)
    if traits.is_reinforcement:
        return f"{name}: {pool.sequences:,} of {there}"
    read = f"{pool.epochs:.2f} epochs of {there}"
    if pool.epochs < 1 and end.num_documents is not None and len(end.pools) == 1:
        read = f"from {end.num_documents:,} of {there}"
    filled = f", sequences filled to {share(pool.filled)}" if pool.filled < _LEAST_FILLED else ""
    return f"{name}: {pool.tokens:,} tokens, {read}{filled}"


def _describe_answers(end: Ending) -> str:
    """Say how many answers each prompt had, and how many of them were cut off or failed."""
    task = end.config.task
    limits = "task.max_new_tokens" if task.environment is None else "task.max_turns or task.max_new_tokens"
    cut = f", {share(end.cut_off)} of those of the last step cut off at {limits}" if end.cut_off else ""
    failed = f", {share(end.failed_episodes)} failed by the environment" if end.failed_episodes else ""
    return f"{task.num_generations} answers to each{cut}{failed}"


def _quality(end: Ending) -> str:
    task, loss, before = end.config.task, end.loss, end.loss_before
    if task.name.traits.is_reinforcement:
        return ", ".join(_rewards(end)) or "not measured"
    if loss is None:
        return "not measured: the run has no held-out data"
    if before is None and task.name.traits.has_reference and task.loss in LOSSES and not task.nll_weight:
        # Before the first step the model is its own reference.
        before = float(LOSSES[task.loss].function(torch.zeros(()), torch.zeros(()), task))
    text = f"held-out loss {loss:.4f}"
    if before is not None:
        text += f" ({before:.4f} before training)"
    if task.name.traits.is_of_next_tokens:
        text += f", perplexity {perplexity(loss):,.1f}"
        if end.without_context is not None:
            text += f"; {_beside(loss, end.without_context, end.step)}"
        return text
    if end.recall is not None:
        text += f", recall@1 {share(end.recall)}, MRR {end.reciprocal_rank:.4f}"
    if end.accuracy is not None:
        pairs = "" if end.num_held_out is None else f" of {count(end.num_held_out, 'pair')}"
        text += f", accuracy {share(end.accuracy)}{pairs} (50 % by chance)"
    if end.margin is not None:
        text += f", margin {end.margin:.3f}"
    return text


def _rewards(end: Ending) -> Iterator[str]:
    """Give the sentences on rewards. A held-out loss is the reward, negated; from 0, so that 0 is never -0."""
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
    """Compare the held-out loss with that of a model that knows only how often each token occurs."""
    baseline = f"a model without context (unigram) has {without_context:.4f}"
    if loss < without_context:
        return baseline
    if steps >= _FEW_STEPS:
        advice = "look at the curves and the learning rate"
    else:
        advice = f"{count(steps, 'step')} are few" if steps > 1 else "1 step is few"
    return f"{baseline}, which is better: {advice}"


def _plan(end: Ending) -> str:
    """Compare what was measured with what was planned; empty: there was no plan."""
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
    """Give the peaks of each kind of memory; `peaks` has bytes by kind for each rank, and every rank the same kinds."""
    if not peaks:
        return ""
    parts = []
    for kind in peaks[0]:
        values = [peak[kind] for peak in peaks]
        low, high = size(min(values)), size(max(values))
        if len(values) == 1:
            parts.append(f"{kind} {low}")
        elif low == high:
            parts.append(f"{kind} {low} on each rank")
        else:
            parts.append(f"{kind} {low} to {high}, by rank")
    return f"{'; '.join(parts)}, with evaluations and exports"


def _next_commands(end: Ending) -> Iterator[tuple[str, str]]:
    """Give commands that a user may want next, and what each does."""
    run_dir, folder = shlex.quote(end.config.run.dir), shlex.quote(str(end.folder))
    yield f"hfdist report {run_dir}", "makes a page with its curves"
    if end.config.task.name.traits.is_reinforcement:
        yield f"head {shlex.quote(str(end.config.run.folder.rollouts))}", "shows answers with their rewards"
    yield f"hfdist audit run={run_dir}", "proves that it read the data as planned"
    if end.record.processes == 1:
        yield "hfdist prove strategy=zero2 launch.processes=2", "shows that two processes train as one does"
    if end.config.export.push_to is None:
        yield f"hf upload OWNER/NAME {folder}", "brings the model to the Hub"
