"""The loop of a sweep: it starts trials in free slots, records their results, and asks which trial comes next.

    chosen -- start --> running -- done --> result of a rung -- promoted --> running to the next rung
                          |  ^                     or whole
                          |  | next start, from its checkpoint
                          |- stopped or killed
                          `- failed, or killed too often

All that counts is in the sweep's folder. After any kill the same command goes on: it finds the trials that still run,
and trials that do not run go on from their checkpoints.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from hfdist.atomic_write import write_atomically
from hfdist.config.override_text import as_overrides
from hfdist.config.sweep import Sampler
from hfdist.errors import CheckpointError, ConfigError
from hfdist.records import RunRecord, read_run
from hfdist.records.trials import Result, Trial, TrialLog
from hfdist.tools.sweep.halving import next_promotion, rungs_of, tokens_of_rungs
from hfdist.tools.sweep.launchers.base import LOG, LaunchedTrial, Launcher
from hfdist.tools.sweep.population import generation_of, next_member
from hfdist.tools.sweep.sampling import choose_values
from hfdist.tools.sweep.sweep import Sweep, total_tokens
from hfdist.tools.sweep.trial_end import End, how_ended, last_value

_AIM = "aim.json"
"""File in the folder of a trial with the aim of its last start."""
_MOST_KILLS = 3
"""Number of kills on the way to one rung after which a trial has failed."""


class _Aim(NamedTuple):
    """What a trial was started for."""

    rung: int
    """The rung to whose end the trial was to train, from 0."""
    start: int
    """Number of the run's starts before this one: a record with a higher number is of this start."""


class Controller:
    """The one that runs a sweep to its end.

    Args:
        sweep: the sweep.
        launcher: what starts the trials.
        say: function that prints a line.
    """

    def __init__(self, sweep: Sweep, launcher: Launcher, say: Callable[[str], None]) -> None:
        self.sweep, self._launcher, self._say = sweep, launcher, say
        self._config = sweep.config
        self.log = TrialLog(sweep.folder)
        for trial in self.log.trials:
            self._check(trial)
        most = self._config.trials
        if self._config.sampler is Sampler.grid:
            most = len(sweep.space.grid(most))
        self.most = most * self._config.generations
        """Number of trials of the whole sweep."""
        self._running: dict[int, LaunchedTrial] = {}
        """Trials that run, by their numbers."""
        self._kills: dict[tuple[int, int], int] = {}
        """How often this controller has seen a trial killed, by trial and rung."""
        self._is_told_to_stop = False
        self._find_begun()

    def _find_begun(self) -> None:
        """Find what an earlier process of the sweep has left: trials that run, and trials that have ended since."""
        still_running = self._launcher.find_all()
        for trial in self.log.trials:
            folder = self.sweep.folder_of(trial).resolve()
            if trial.failure is None and folder in still_running:
                self._running[trial.number] = still_running[folder]
                self._say(f"trial {trial.number} still runs")
            elif self._is_on_its_way(trial) and self._record_of(trial) is not None:
                self._record_end(trial, len(trial.results), exit_code=None)

    def _check(self, trial: Trial) -> None:
        """Raise a ConfigError on a trial that this sweep has not written: others may be able to write the file."""
        where = f"{self.log.path}, line {trial.line}"
        # The values become words of a command line.
        self.sweep.space.check(trial.values, where)
        generation = generation_of(self._config, trial.number) if self._config.sampler is Sampler.pbt else 0
        parent = None if trial.parent is None else generation_of(self._config, trial.parent)
        if parent not in (None, generation - 1):
            what, found = "this sweep has written no such trial", f"parent {trial.parent}"
            raise ConfigError(what, where=where, found=found, allowed="a trial of the generation before")
        if len(trial.results) > rungs_of(self._config, trial.number):
            what, found = "this trial has more results than rungs", f"{len(trial.results)} results"
            allowed = f"{rungs_of(self._config, trial.number)} lines of trial {trial.number} with a value"
            raise ConfigError(what, where=str(self.log.path), found=found, allowed=allowed)

    def stop(self) -> None:
        """Tell each trial that runs to save and to stop, and start no further trials; a second call does nothing."""
        if self._is_told_to_stop:
            return
        self._is_told_to_stop = True
        for number, process in self._running.items():
            process.stop(can_save=self._record_of(self.log.trials[number]) is not None)

    def run(self, look: Callable[[Controller], None] = lambda _: None) -> bool:
        """Run until nothing is left to do, or until `stop` was called and all trials have ended.

        Args:
            look: function that is called in each round of the loop.

        Returns:
            Whether the sweep has come to its end.
        """
        while True:
            for number, process in list(self._running.items()):
                if process.poll():
                    del self._running[number]
                    self._record_end(self.log.trials[number], process.rung, process.exit_code)
            while not self._is_told_to_stop and (slot := self._free_slot()) is not None:
                has_started = self._start_next(slot)
                if not has_started:
                    break
            look(self)
            if not self._running:
                return not self._is_told_to_stop
            time.sleep(self._launcher.poll_seconds)

    def running(self) -> list[Trial]:
        """Give the trials that run, by their numbers."""
        return [self.log.trials[number] for number in sorted(self._running)]

    @cached_property
    def planned_tokens(self) -> float | None:
        """Tokens of the whole sweep, if the best share of each rung goes on; None: runs have no number of steps."""
        config, run = self._config, self.sweep.compose([])
        if run.train.max_steps is None:
            return None
        if config.sampler is Sampler.pbt:
            return float(config.trials * total_tokens(run))
        planned = 0.0
        for number in range(self.most):
            # Of the trials at a rung, one of `factor` goes on: this one does so with that probability.
            share = 1.0
            for begin, end in pairwise([0, *tokens_of_rungs(config, number, total_tokens(run))]):
                planned += share * (end - begin)
                share /= config.factor
        return planned

    def _free_slot(self) -> int | None:
        """Give the first slot in which no trial runs; None: all are taken."""
        # Trials that were found again may run in slots that the sweep does not have any more.
        if len(self._running) >= self._config.slots:
            return None
        taken = {process.slot for process in self._running.values()}
        return next((slot for slot in range(self._config.slots) if slot not in taken), None)

    def _start_next(self, slot: int) -> bool:
        """Start a trial on its way to its next rung.

        Give False if none can start before others have ended. A trial that cannot start has failed, and counts.
        """
        trial = self._choose_next()
        if trial is None:
            return False
        rung, folder = len(trial.results), self.sweep.folder_of(trial)
        try:
            overrides = self.sweep.overrides_of(trial, rung)
        except CheckpointError as error:
            self.log.fail(trial, error.what)
            self._say(f"trial {trial.number} has failed: {error.what}")
            return True
        folder.mkdir(parents=True, exist_ok=True)
        record = read_run(folder)
        aim = _Aim(rung, 0 if record is None else record.start)
        write_atomically(folder / _AIM, json.dumps(aim._asdict()).encode())
        started = self._running[trial.number] = self._launcher.start(overrides, folder, slot=slot, rung=rung)
        if self._is_told_to_stop:
            # A signal came while the trial was started.
            started.stop(can_save=False)
        values = " ".join(as_overrides(trial.values))
        start = "" if trial.parent is None else f" at the checkpoint of trial {trial.parent}"
        self._say(f"trial {trial.number}{self._rung_text(rung)} begins{start}: {values}")
        return True

    def _choose_next(self) -> Trial | None:
        """Give the trial that starts next: one that was ended on its way, one that is promoted, or a new one.

        Give None if there is none before others have ended.
        """
        trials, space = self.log.trials, self.sweep.space
        for trial in trials:
            if self._is_on_its_way(trial):
                return trial
        promoted = next_promotion(self._config, trials, self._running.keys())
        if promoted is not None or len(trials) >= self.most:
            return promoted
        if self._config.sampler is not Sampler.pbt:
            return self.log.begin(choose_values(self._config, space, trials))
        member = next_member(self._config, space, trials)
        return None if member is None else self.log.begin(member.values, member.parent)

    def _is_on_its_way(self, trial: Trial) -> bool:
        """Whether a trial that does not run was started, or chosen, for a rung whose end it has not reached."""
        is_whole = len(trial.results) == rungs_of(self._config, trial.number)
        if trial.failure is not None or trial.number in self._running or is_whole:
            return False
        return self._aim_of(trial).rung == len(trial.results)

    def _aim_of(self, trial: Trial) -> _Aim:
        """Give the aim of a trial's last start."""
        try:
            aim = json.loads((self.sweep.folder_of(trial) / _AIM).read_text(encoding="utf-8"))
            return _Aim(int(aim["rung"]), int(aim["start"]))
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            # The trial was chosen, but not started.
            return _Aim(0, 0)

    def _record_of(self, trial: Trial) -> RunRecord | None:
        """Give the record of the trial's last start; None: that start has not written one yet."""
        record = read_run(self.sweep.folder_of(trial))
        return None if record is None or record.start <= self._aim_of(trial).start else record

    def _record_end(self, trial: Trial, rung: int, exit_code: int | None) -> None:
        """Record how a trial has ended on its way to the end of a rung.

        Args:
            trial: the trial, which does not run any more.
            rung: the rung.
            exit_code: the exit code of the trial's process; None: not known.
        """
        folder, record = self.sweep.folder_of(trial), self._record_of(trial)
        name = f"trial {trial.number}{self._rung_text(rung)}"
        match how_ended(record, exit_code, is_told_to_stop=self._is_told_to_stop):
            case End.done if record is not None:
                self._reach(trial, name, record)
            case End.stopped:
                self._say(f"{name} has stopped")
            case End.failed if record is not None:
                self.log.fail(trial, record.error or f"exit code {record.exit_code}")
                self._say(f"{name} has failed: {record.error}; {folder / LOG}")
            case End.failed_before_it_began:
                self.log.fail(trial, f"exit code {exit_code} before the run had begun")
                self._say(f"{name} has failed before it had begun, with {exit_code}: {folder / LOG}")
            case End.killed:
                self._count_kill(trial, rung, name)

    def _reach(self, trial: Trial, name: str, record: RunRecord) -> None:
        """Record the result of a rung; without a value of the metric the trial has failed."""
        metric = self._config.metric
        value = last_value(self.sweep.folder_of(trial), metric)
        self.log.reach(trial, Result(step=record.step, tokens=record.tokens, value=value))
        shown = "no value" if value is None else f"{metric} {value:.4f}"
        self._say(f"{name}: {shown}, {record.tokens:,} tokens")
        if value is None:
            self.log.fail(trial, f"metrics.jsonl has no {metric}")

    def _count_kill(self, trial: Trial, rung: int, name: str) -> None:
        """Let a killed trial go on, unless it was killed too often on the way to this rung."""
        kills = self._kills.get((trial.number, rung), 0) + 1
        self._kills[trial.number, rung] = kills
        if kills < _MOST_KILLS:
            self._say(f"{name} was killed, and goes on")
            return
        self.log.fail(trial, f"it was killed {kills} times")
        self._say(f"{name} was killed {kills} times: {self.sweep.folder_of(trial) / LOG}")

    def _rung_text(self, rung: int) -> str:
        """Give the words for a rung after a trial's name; empty: trials have one rung."""
        return "" if self._config.rungs == 1 else f" (rung {rung})"
