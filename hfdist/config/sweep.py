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
        """Factor after which lower values are better."""
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
    """Lengths of trials (successive halving, ASHA): 1: all train to their end; 3: 1/9, 1/3 and all of the tokens."""
    factor: int = limited(3, at_least=2)
    """Factor by which the next rung is longer, and takes fewer trials; with 3 it takes the best third."""
    brackets: int = limited(1, at_least=1)
    """With rungs: groups of trials that begin each at another rung, and are compared within the group (Hyperband)."""
    generations: int = limited(1, at_least=1)
    """pbt: rounds of training; after each but the last, the worst members go on as changed copies of the best."""
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
        name: the name of the preset.
        overrides: the overrides of the command line.
        own: a folder of the user's, laid out as `conf/`.

    Raises:
        ConfigError: the first mistake.
    """
    path = SECTION.find(name, own, key=f"{GROUP} (command line)", hint=f"{GROUP}=tpe")
    config: SweepConfig = SECTION.compose(path, overrides)
    _check_devices(config)
    _check_rungs(config)
    return config


def _check_devices(config: SweepConfig) -> None:
    if config.devices and config.launcher is not LauncherName.local:
        what, found = "the cluster gives a trial its devices", f"{config.devices}, with {config.launcher.value}"
        hint = "sweep.devices=[] cluster.gpus=true"
        raise ConfigError(what, where="sweep.devices", found=found, allowed="[]", hint=hint)
    if config.devices and len(config.devices) != config.slots:
        what, found = "each slot needs its devices", f"{len(config.devices)} for {config.slots} slots"
        raise ConfigError(what, where="sweep.devices", found=found, hint=f"sweep.slots={len(config.devices)}")


def _check_rungs(config: SweepConfig) -> None:
    if config.brackets > config.rungs:
        what, hint = "there are more brackets than rungs to begin at", f"sweep.brackets={config.rungs}"
        allowed = f"1 to {config.rungs}, which is sweep.rungs"
        raise ConfigError(what, where="sweep.brackets", found=config.brackets, allowed=allowed, hint=hint)
    if config.sampler is not Sampler.pbt and config.generations > 1:
        what = "only population based training has generations"
        raise ConfigError(what, where="sweep.generations", found=config.generations, hint="sweep=pbt")
    if config.sampler is Sampler.pbt and config.rungs > 1:
        what = "a population has generations in place of rungs"
        raise ConfigError(what, where="sweep.rungs", found=config.rungs, allowed="1", hint="sweep.rungs=1")
