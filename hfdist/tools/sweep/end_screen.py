"""The words at the end of a sweep: the best trial, notes on the space, what trials have used, and the next commands."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from hfdist.config.override_text import as_overrides
from hfdist.config.schema import find_key
from hfdist.records import RunFolder, read_run
from hfdist.records.trials import Trial
from hfdist.tools.sweep.launchers.base import LOG
from hfdist.tools.sweep.space import Dimension
from hfdist.tools.sweep.sweep import Sweep
from hfdist.units import duration, energy, money


def describe_end(
    sweep: Sweep, trials: Sequence[Trial], best_and_parents: Sequence[Trial], again: str, notes: Sequence[str]
) -> str:
    """Give the words that follow the table of trials, in some lines.

    Args:
        sweep: the sweep.
        trials: all of its trials.
        best_and_parents: the parents of the best trial, the earliest first, and the best trial as the last.
        again: the command that trains the best trial anew.
        notes: the result of `find_notes`.
    """
    *parents, best = best_and_parents
    folder = sweep.folder_of(best)
    lines = [f"best: {folder}: {' '.join(as_overrides(best.values))}"]
    for trial in parents:
        values = " ".join(as_overrides(trial.values))
        lines.append(f"  up to step {trial.results[-1].step}, trial {trial.number}: {values}")
    lines += [f"  {words}" for words in notes]
    run = RunFolder(folder)
    delivered = [path for path in (run.model, run.adapter) if path.is_dir()]
    lines += [f"its {path.name}: {path}" for path in delivered]
    if delivered and (folder / LOG).is_file():
        lines.append(f"how to use it: the last lines of {folder / LOG}")
    lines += _used(sweep, trials)
    report = f"hfdist report {shlex.quote(str(sweep.folder))}"
    comments = {report: "makes a page of all trials", again: "trains the best one again"}
    if not sweep.has_lengths:
        longer = f"run.name=longer train.max_steps={2 * best.results[-1].step}"
        comments[f"{again} {longer}"] = "trains it for twice as long"
    width = max(map(len, comments))
    lines.append("what comes next:")
    lines += [f"  {command:<{width}}  # {comment}" for command, comment in comments.items()]
    return "\n".join(lines)


def find_notes(sweep: Sweep, trials: Sequence[Trial], best: Trial) -> Iterator[str]:
    """Say where better values may lie outside of the space, and whether trials have read unlike numbers of tokens."""
    for dimension in sweep.space.dimensions:
        note = _note_on_end(dimension, best)
        if note is not None:
            yield note
    tokens = [trial.tokens for trial in trials if trial.value is not None]
    if not sweep.has_lengths and min(tokens) != max(tokens):
        yield f"trials have read {min(tokens):,} to {max(tokens):,} tokens: in as many steps a larger batch reads more"


def _note_on_end(dimension: Dimension, best: Trial) -> str | None:
    """Say that the best value is the largest or the smallest choice, if the key may have a value beyond it."""
    key, value = dimension.key, best.values.get(dimension.key)
    tried = [choice for choice in dimension.choices if isinstance(choice, int | float) and not isinstance(choice, bool)]
    # A larger seed is not better.
    if key.endswith("seed") or len(set(tried)) < 2:
        return None
    if value == max(tried):
        end, further, beyond = "largest", "larger", 2 * max(tried)
    elif value == min(tried):
        end, further, beyond = "smallest", "smaller", min(tried) / 2 or -1
    else:
        return None
    limit = getattr(find_key(key), "limit", None)
    # At the limit of the key itself there is nothing further to try.
    if limit is not None and not limit.accepts(beyond):
        return None
    (shown,) = as_overrides({key: value})
    return f"{shown} is the {end} that was tried: a {further} one may be better"


def _used(sweep: Sweep, trials: Sequence[Trial]) -> list[str]:
    """Give a line about what all trials have used: time, energy and cost; empty: nothing is known."""
    found = (read_run(sweep.folder_of(trial)) for trial in trials)
    records = [record for record in found if record is not None]
    seconds, kwh, cost = (
        sum(record.total(name) or 0.0 for record in records) for name in ("seconds", "energy_kwh", "cost")
    )
    parts = []
    if seconds:
        parts.append(duration(seconds))
    if kwh:
        parts.append(energy(kwh))
    if cost:
        parts.append(money(cost, sweep.compose([]).cost.currency))
    return [f"used by all trials: {', '.join(parts)}"] if parts else []
