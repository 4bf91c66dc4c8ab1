"""A sweep: the config of its runs, what varies, and with which overrides each of its trials is run."""

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
    config: SweepConfig
    space: Space
    base: Sequence[str]
    """The recipe and its arguments, without the overrides of a trial."""
    compose: Callable[[Sequence[str]], RunConfig]
    """Composes the config of a run with further overrides."""

    @property
    def has_lengths(self) -> bool:
        """Whether trials train for several lengths, and go on from checkpoints."""
        return self.config.sampler is Sampler.pbt or self.config.rungs > 1

    def folder_of(self, trial: Trial) -> Path:
        """The run folder of a trial."""
        return self.folder / f"trial-{trial.number:04d}"

    def overrides_of(self, trial: Trial, rung: int) -> list[str]:
        """Give the trial's own overrides on the way to the end of a rung.

        Raises:
            CheckpointError: the checkpoint at which it begins is gone.
        """
        own = [*as_overrides(trial.values), as_override("run.dir", str(self.folder_of(trial)))]
        if not self.has_lengths:
            return own
        own += [*self.length_of(trial, rung), "checkpoint.allow_changes=true"]
        if trial.parent is None:
            return own
        # Names of steps are as long as each other, and one that is not complete has another ending.
        steps_of_parent = RunFolder(self.folder / f"trial-{trial.parent:04d}").checkpoints.glob("step-????????")
        newest = max(steps_of_parent, default=None)
        if newest is None:
            what = f"trial {trial.parent}, at whose checkpoint it begins, has none any more"
            raise CheckpointError(what, where=str(self.folder))
        return [*own, as_override("checkpoint.resume", str(newest))]

    def length_of(self, trial: Trial, rung: int) -> list[str]:
        """Give the overrides that end the trial at the end of a rung."""
        config = self.compose(as_overrides(trial.values))
        if self.config.sampler is Sampler.pbt:
            whole = total_tokens(config)
            ends = [round(share / self.config.generations * whole) for share in range(1, self.config.generations + 1)]
            place = generation_of(self.config, trial.number)
        else:
            place = rung
            ends = tokens_of_rungs(self.config, trial.number, total_tokens(config))
        steps = max(1, math.ceil(ends[place] / _tokens_per_step(config)))
        own = [f"train.max_steps={steps}"]
        if config.optimizer.schedule is Schedule.wsd and place < len(ends) - 1:
            # So the decay would begin after the last step: that of the whole run is still to come.
            own += ["optimizer.decay_fraction=1e-9"]
        return own


def _tokens_per_step(config: RunConfig) -> int:
    """Give the most tokens of an optimizer step."""
    return config.train.global_batch_size * config.data.sequence_length


def total_tokens(config: RunConfig) -> int:
    """Give the most tokens of a whole run, whose number of steps is given."""
    assert config.train.max_steps is not None
    return config.train.max_steps * _tokens_per_step(config)
