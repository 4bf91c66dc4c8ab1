"""A live table of a sweep in the terminal: the trials that run, their newest figures, and the time that is left."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hfdist.config.override_text import as_overrides
from hfdist.records import RunRecord, read_run
from hfdist.records.trials import Trial
from hfdist.tools.sweep.controller import Controller
from hfdist.tools.sweep.ranking import find_best

_SECONDS = 1.0
"""Seconds between two drawings."""


class _Begin(NamedTuple):
    """A point from which the speed is measured."""

    seconds: float
    """Time of a clock that never goes back."""
    done: int
    """Steps of a trial, or tokens of all trials, that were done by then."""


class LiveTable:
    """A table in the terminal that is drawn again and again, below the lines that a sweep says.

    Args:
        console: the terminal.
        metric: the metric of the sweep.
    """

    def __init__(self, console: Console, metric: str) -> None:
        self._console, self._metric = console, metric
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._first_seen: dict[tuple[int, int], _Begin] = {}
        """When a trial was first seen in a rung, and at which step, by the numbers of the trial and the rung."""
        self._begun: _Begin | None = None
        """When this table was first drawn, and the tokens that all trials had read by then; None: it was not drawn."""
        self._drawn_at = 0.0

    def __enter__(self) -> LiveTable:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def say(self, line: str) -> None:
        """Print a line above the table."""
        self._console.print(Text(line), soft_wrap=True)

    def look(self, controller: Controller) -> None:
        """Draw the table, if a second has passed since the last drawing."""
        if time.monotonic() - self._drawn_at >= _SECONDS:
            self._drawn_at = time.monotonic()
            self._live.update(self.render(controller), refresh=True)

    def render(self, controller: Controller) -> RenderableType:
        """Give the table of the trials that run, and a line about all."""
        table = Table(box=None, pad_edge=False)
        for name in ("trial", "rung", "step", self._metric, "left", "values"):
            table.add_column(name, justify="left" if name == "values" else "right", no_wrap=True, overflow="ellipsis")
        trials = controller.log.trials
        read = {trial.number: trial.tokens for trial in trials}
        for trial in controller.running():
            record = read_run(controller.sweep.folder_of(trial)) or RunRecord(start=0)
            step, last_step = record.step, record.max_steps or 0
            read[trial.number] = max(record.tokens, trial.tokens)
            value = "" if trial.value is None else f"{trial.value:.4f}"
            values = " ".join(as_overrides(trial.values))
            left = self._time_left(trial, step, last_step)
            cells = (str(trial.number), str(len(trial.results)), f"{step}/{last_step or '?'}", value, left, values)
            # `Text` shows what a trial has written as it is; of a str, rich would take `[...]` for markup.
            table.add_row(*map(Text, cells))
        # A trial that begins at a checkpoint of its parent has not read the parent's tokens.
        before = {trial.number: 0 if trial.parent is None else trials[trial.parent].tokens for trial in trials}
        tokens = sum(max(end - before[number], 0) for number, end in read.items())
        return Group(table, Text(self._about_all(controller, tokens)))

    def _time_left(self, trial: Trial, step: int, last_step: int) -> str:
        """Estimate the time to the end of a trial's rung, by its speed since it was first seen; empty: not known."""
        now, in_rung = time.monotonic(), (trial.number, len(trial.results))
        begin = self._first_seen.setdefault(in_rung, _Begin(now, step))
        steps = step - begin.done
        if steps <= 0 or last_step < step:
            return ""
        return _as_time((now - begin.seconds) / steps * (last_step - step))

    def _about_all(self, controller: Controller, tokens: int) -> str:
        """Give a line about all trials: results, the best one, and an estimate of the time that is left."""
        trials, most = controller.log.trials, controller.most
        ended = sum(bool(trial.results) or trial.failure is not None for trial in trials)
        words = [f"{ended} of {most} trials have a result"]
        best = find_best(controller.sweep, trials)
        if best is not None:
            words.append(f"best: trial {best.number}, {self._metric} {best.value:.4f}")
        now, planned = time.monotonic(), controller.planned_tokens
        begin = self._begun = self._begun or _Begin(now, tokens)
        if planned is not None and tokens > begin.done:
            left = (now - begin.seconds) * max(planned - tokens, 0) / (tokens - begin.done)
            words.append(f"about {_as_time(left)} left")
        return "; ".join(words)


def _as_time(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
