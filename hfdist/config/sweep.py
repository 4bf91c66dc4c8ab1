"""`sweep.*`: how many trials a sweep makes, how their values are chosen, and where they run.

A sweep's keys are no part of a run's config: a trial is an ordinary run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from hfdist.config.composition.section import Section
from hfdist.config.ranges import limited
from hfdist.errors import ConfigError


class Sampler(Enum):
    """How the values of a trial are chosen."""

    grid = "grid"
    random = "random"
    tpe = "tpe"
    pbt = "pbt"
    """Random at first; then those of better trials, changed."""


class Direction(Enum):
    """Which values of the metric are better."""

    minimize = "minimize"
    maximize = "maximize"

    @property
    def sign(self) -> int:
        """What makes lower values the better ones."""
        return 1 if self is Direction.minimize else -1


class LauncherName(Enum):
    """Where trials run."""

    local = "local"
    slurm = "slurm"
    ray = "ray"


@dataclass(kw_only=True)
class SweepConfig:
    """`sweep.*`."""

    sampler: Sampler = Sampler.tpe
    """How values are chosen: grid | random | tpe | pbt."""
    trials: int = limited(20, at_least=1)
    """Number of trials; of a grid at most; pbt: members."""
    metric: str = "eval_loss"
    """Figure of metrics.jsonl whose last value counts."""
    direction: Direction = Direction.minimize
    """Which values are better: minimize | maximize."""
    seed: int = limited(0, at_least=0)
    """Seed of the values."""
    space: dict[str, str] = field(default_factory=dict)
    """Values by key, as after the = on the command line: {optimizer.lr: 'tag(log, interval(1e-4, 1e-2))'}."""
    rungs: int = limited(1, at_least=1)
    """Lengths of trials: 1: all train to their end; 3: a ninth, a third and all of the tokens."""
    factor: int = limited(3, at_least=2)
    """How many times longer the next rung is, and which share of the trials it takes."""
    brackets: int = limited(1, at_least=1)
    """With rungs: so many begin at later rungs, and are compared with each other alone."""
    generations: int = limited(1, at_least=1)
    """pbt: how often bad members go on as changed good ones, and one."""
    launcher: LauncherName = LauncherName.local
    """Where trials run: local | slurm (a job each) | ray (a placement group each); cluster.* says on what."""
    slots: int = limited(1, at_least=1)
    """Trials that run side by side."""
    devices: list[str] = field(default_factory=list)
    """CUDA_VISIBLE_DEVICES of each slot, such as ['0,1', '2,3']; []: all see all."""


GROUP = "sweep"
SECTION = Section(SweepConfig, GROUP)


def compose_sweep(name: str, overrides: Sequence[str], own: Path | None) -> SweepConfig:
    """Merge overrides such as `sweep.trials=50` over a preset, and check them.

    Args:
        name: of the preset.
        overrides: of the command line.
        own: a folder of the user's, laid out as `conf/`.

    Raises:
        ConfigError: the first mistake.
    """
    path = SECTION.find(name, own, key=f"{GROUP} (command line)", hint=f"{GROUP}=tpe")
    config: SweepConfig = SECTION.compose(path, overrides)
    if config.devices and config.launcher is not LauncherName.local:
        what, found = "the cluster gives a trial its devices", f"{config.devices}, with {config.launcher.value}"
        raise ConfigError(
            what, where="sweep.devices", found=found, allowed="[]", hint="sweep.devices=[] cluster.gpus=true"
        )
    if config.devices and len(config.devices) != config.slots:
        what, found = "each slot needs its devices", f"{len(config.devices)} for {config.slots} slots"
        raise ConfigError(what, where="sweep.devices", found=found, hint='sweep.devices=\'["0,1","2,3"]\'')
    if config.brackets > config.rungs:
        what, allowed = "a bracket begins at each rung", f"1 to {config.rungs}, which is sweep.rungs"
        raise ConfigError(what, where="sweep.brackets", found=config.brackets, allowed=allowed)
    if config.sampler is not Sampler.pbt and config.generations > 1:
        what = "only population based training has generations"
        raise ConfigError(what, where="sweep.generations", found=config.generations, hint="sweep=pbt")
    if config.sampler is Sampler.pbt and config.rungs > 1:
        what = "the generations of a population are its rungs"
        raise ConfigError(what, where="sweep.rungs", found=config.rungs, hint="sweep.rungs=1")
    return config
