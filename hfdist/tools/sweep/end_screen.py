"""The screen at the end of a sweep: the best trial, notes on the space, what all trials have used, what comes next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from hfdist.config.override_text import as_overrides
from hfdist.config.schema import find_key
from hfdist.records import RunFolder, read_run
from hfdist.records.trials import Trial
from hfdist.tools.sweep.launchers.base import LOG
from hfdist.tools.sweep.sweep import Sweep
from hfdist.units import duration, energy, money


def describe_end(
    sweep: Sweep, trials: Sequence[Trial], line_of_best: Sequence[Trial], again: str, notes: Sequence[str]
) -> str:
    """Give the screen after the table of trials.

    Args:
        sweep: the sweep.
        trials: all of its trials.
        line_of_best: the best trial, after its parents, the earliest first.
        again: the command that trains the best one anew.
        notes: see `find_notes`.
    """
    *parents, best = line_of_best
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
    steps = [(report, "makes a page of all trials"), (again, "trains the best one again")]
    if not sweep.has_lengths:
        longer = f"run.name=longer train.max_steps={2 * best.results[-1].step}"
        steps.append((f"{again} {longer}", "trains it for twice as long"))
    width = max(len(command) for command, _ in steps)
    return "\n".join([*lines, "what comes next:", *(f"  {command:<{width}}  # {why}" for command, why in steps)])


def find_notes(sweep: Sweep, trials: Sequence[Trial], best: Trial) -> Iterator[str]:
    """Say where better values may lie outside of the space, and where trials have read unlike numbers of tokens."""
    for dimension in sweep.space.dimensions:
        key, value = dimension.key, best.values.get(dimension.key)
        tried = [one for one in dimension.choices if isinstance(one, int | float) and not isinstance(one, bool)]
        if key.endswith("seed") or len({*tried}) < 2 or value not in (min(tried), max(tried)):
            continue
        is_largest, limit = value == max(tried), getattr(find_key(key), "limit", None)
        # At the limit of the key itself there is nothing further to try.
        if limit is None or limit.accepts(2 * value if is_largest else value / 2 if value else -1):
            end, further = ("largest", "larger") if is_largest else ("smallest", "smaller")
            (shown,) = as_overrides({key: value})
            yield f"{shown} is the {end} that was tried: a {further} one may be better"
    tokens = [trial.tokens for trial in trials if trial.value is not None]
    if not sweep.has_lengths and min(tokens) != max(tokens):
        yield f"trials have read {min(tokens):,} to {max(tokens):,} tokens: in as many steps a larger batch reads more"


def _used(sweep: Sweep, trials: Sequence[Trial]) -> list[str]:
    """Say what all trials have used: time, energy and cost, where they are known."""
    records = [record for record in (read_run(sweep.folder_of(trial)) for trial in trials) if record is not None]
    totals = [[record.total(name) for record in records] for name in ("seconds", "energy_kwh", "cost")]
    seconds, kwh, spent = (sum(one for one in total if one is not None) for total in totals)
    currency = sweep.compose([]).cost.currency
    parts = [*([duration(seconds)] if seconds else []), *([energy(kwh)] if kwh else [])]
    parts += [money(spent, currency)] if spent else []
    return [f"used by all trials: {', '.join(parts)}"] if parts else []
