"""What a sweep says at its end: the best trial, what was used, whether better values may lie outside, what is next."""

from __future__ import annotations

from collections.abc import Iterator

from hfdist.records import RunFolder, read_run
from hfdist.records.run_file import SUMMED
from hfdist.records.trials import Trial
from hfdist.sweep.controller import Controller, Sweep
from hfdist.sweep.launchers.base import LOG
from hfdist.sweep.space import as_overrides
from hfdist.units import duration, energy, money


def describe_end(sweep: Sweep, controller: Controller, best: Trial, again: str) -> str:
    """Give the screen after the table of trials; `again` is the command that trains the best one anew."""
    folder = sweep.folder_of(best)
    lines = [f"best: {folder}: {' '.join(as_overrides(best.values))}"]
    for one in controller.history(best)[:-1]:
        lines.append(f"  up to step {one.results[-1].step}, trial {one.number}: {' '.join(as_overrides(one.values))}")
    lines += [f"  {words}" for words in _warnings(sweep, controller.log.trials, best)]
    run = RunFolder(folder)
    delivered = [one for one in (run.model, run.adapter) if one.is_dir()]
    lines += [f"its {one.name}: {one}" for one in delivered]
    if delivered and (folder / LOG).is_file():
        lines.append(f"how to use it: the last lines of {folder / LOG}")
    lines += _used(sweep, controller.log.trials)
    steps = [(f"hfdist report {sweep.folder}", "makes a page of all trials"), (again, "trains the best one again")]
    width = max(len(command) for command, _ in steps)
    return "\n".join([*lines, "what comes next:", *(f"  {command:<{width}}  # {why}" for command, why in steps)])


def _warnings(sweep: Sweep, trials: list[Trial], best: Trial) -> Iterator[str]:
    for one in sweep.space.dimensions:
        tried, value = [choice for choice in one.choices if isinstance(choice, int | float)], best.values.get(one.key)
        if len({*tried}) > 1 and value in (min(tried), max(tried)):
            end, further = ("largest", "larger") if value == max(tried) else ("smallest", "smaller")
            yield f"{one.key}={value} is the {end} that was tried: a {further} one may be better"
    tokens = [trial.tokens for trial in trials if trial.value is not None]
    if not sweep.has_lengths and min(tokens) != max(tokens):
        yield f"trials have read {min(tokens):,} to {max(tokens):,} tokens: in as many steps a larger batch reads more"


def _used(sweep: Sweep, trials: list[Trial]) -> list[str]:
    """Say what all trials have used; nothing where no trial's record is there."""
    records = [record for record in (read_run(sweep.folder_of(trial)) for trial in trials) if record is not None]
    totals = [[record.total(name) for record in records] for name in ("seconds", *SUMMED[:2])]
    seconds, kwh, spent = (sum(one for one in total if one is not None) for total in totals)
    currency = sweep.compose([]).cost.currency
    parts = [*([duration(seconds)] if seconds else []), *([energy(kwh)] if kwh else [])]
    parts += [money(spent, currency)] if spent else []
    return [f"used by all trials: {', '.join(parts)}"] if parts else []
