"""A sweep: the config of its runs, what varies, and the overrides with which each trial is started."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hfdist.config.optimizer import Schedule
from hfdist.config.override_text import as_override, as_overrides
from hfdist.config.run import RunConfig
from hfdist.config.sweep import Sampler, SweepConfig
from hfdist.errors import CheckpointError
from hfdist.records import RunFolder
from hfdist.records.trials import Trial
from hfdist.tools.sweep.halving import tokens_of_rungs
from hfdist.tools.sweep.population import generation_of
from hfdist.tools.sweep.space import Space


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A sweep: the config of its runs, and what varies."""

    folder: Path
    """Folder of the sweep, in which each trial has its run folder."""
    config: SweepConfig
    space: Space
    """Keys that vary, with their values."""
    base: Sequence[str]
    """Name of the recipe and its arguments, without the overrides of a trial."""
    compose: Callable[[Sequence[str]], RunConfig]
    """Function that composes a run's config from `base` and further overrides."""

    @property
    def has_lengths(self) -> bool:
        """Whether trials train for several lengths, and go on from checkpoints."""
        return self.config.sampler is Sampler.pbt or self.config.rungs > 1

    def folder_of(self, trial: Trial) -> Path:
        """Give the run folder of a trial."""
        return self._folder_of_number(trial.number)

    def _folder_of_number(self, number: int) -> Path:
        return self.folder / f"trial-{number:04d}"

    def overrides_of(self, trial: Trial, rung: int) -> list[str]:
        """Give the overrides with which a trial is started on the way to the end of a rung.

        Raises:
            CheckpointError: the parent's checkpoint, at which the trial begins, is gone.
        """
        overrides = [*as_overrides(trial.values), as_override("run.dir", str(self.folder_of(trial)))]
        if self.has_lengths:
            overrides += [*self.length_of(trial, rung), "checkpoint.allow_changes=true"]
            if trial.parent is not None:
                overrides.append(as_override("checkpoint.resume", str(self._newest_checkpoint(trial.parent))))
        return overrides

    def _newest_checkpoint(self, number: int) -> Path:
        """Give the folder of the newest checkpoint of the trial of a number, which is another one's parent."""
        # Names of steps are as long as each other, and one that is not complete has another ending.
        steps = RunFolder(self._folder_of_number(number)).checkpoints.glob("step-????????")
        newest = max(steps, default=None)
        if newest is None:
            what = f"trial {number}, at whose checkpoint it begins, has none any more"
            raise CheckpointError(what, where=str(self.folder))
        return newest

    def length_of(self, trial: Trial, rung: int) -> list[str]:
        """Give the overrides that let a trial end at the end of a rung, or of its generation in a population."""
        config, search = self.compose(as_overrides(trial.values)), self.config
        tokens = total_tokens(config)
        if search.sampler is Sampler.pbt:
            # Each generation trains for an equal share of the tokens.
            ends = [round(number / search.generations * tokens) for number in range(1, search.generations + 1)]
            place = generation_of(search, trial.number)
        else:
            ends = tokens_of_rungs(search, trial.number, tokens)
            place = rung
        steps = max(1, math.ceil(ends[place] / _tokens_per_step(config)))
        overrides = [f"train.max_steps={steps}"]
        if config.optimizer.schedule is Schedule.wsd and place < len(ends) - 1:
            # No decay now: it belongs to the end of the whole run, which is still to come.
            overrides.append("optimizer.decay_fraction=1e-9")
        return overrides


def _tokens_per_step(config: RunConfig) -> int:
    """Give the most tokens of an optimizer step."""
    return config.train.global_batch_size * config.data.sequence_length


def total_tokens(config: RunConfig) -> int:
    """Give the most tokens of a whole run. ValueError: its config has no `train.max_steps`."""
    steps = config.train.max_steps
    if steps is None:
        # The checks of a sweep refuse such a config before.
        raise ValueError("the length of a trial is a share of train.max_steps, which is null")
    return steps * _tokens_per_step(config)
