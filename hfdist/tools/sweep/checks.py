"""Checks of a sweep before a trial starts: its words, its machines, and whether trials can go on to later rungs."""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from hfdist.config.checks.urls import redact
from hfdist.config.cli.about_run import LineAboutRun
from hfdist.config.optimizer import CHANGEABLE, Schedule
from hfdist.config.override_text import COMMAND_LINE
from hfdist.config.run import RunConfig
from hfdist.config.sweep import GROUP, LauncherName, Sampler, SweepConfig
from hfdist.errors import ConfigError
from hfdist.tools.jobs.cluster import GROUP as CLUSTER
from hfdist.tools.jobs.cluster import ClusterConfig, compose_cluster
from hfdist.tools.sweep.space import Space

_FOREIGN = re.compile(
    r"(?P<key>[\w.]+)=(?P<name>(?:q?log_?)?uniform|q?randint|log)(?:_values)?"
    r"\(\s*(?P<low>[^,()]+),\s*(?P<high>[^,()]+)\)"
)
"""An argument with a distribution as Optuna, Ray and wandb name it, such as `optimizer.lr=loguniform(1e-5, 1e-2)`."""


def refuse_words_of_others(arguments: Sequence[str]) -> None:
    """Raise a ConfigError on distributions as Optuna, Ray and wandb name them; its hint has the words of a sweep."""
    for text in arguments:
        found = _FOREIGN.fullmatch(text)
        if found is None:
            continue
        values = f"interval({found['low']}, {found['high']})"
        if "log" in found["name"]:
            values = f"tag(log, {values})"
        if "int" in found["name"]:
            values = f"int({values})"
        hint = shlex.quote(f"{found['key']}={values}")
        if f"{GROUP}=grid" in arguments:  # A grid takes choices only.
            hint += " sweep=random"
        where = f"{found['key']} ({COMMAND_LINE})"
        raise ConfigError("these are no values of a sweep", where=where, found=text, hint=hint)


def find_cluster(
    config: SweepConfig, line: LineAboutRun, overrides: Sequence[str], own: Path | None
) -> ClusterConfig | None:
    """Give the machines of a trial; None: trials run on this machine.

    Args:
        config: `sweep.*`.
        line: the command line.
        overrides: overrides of `cluster.*`.
        own: the user's own folder of configs; None: there is none.

    Raises:
        ConfigError: the launcher does not go with the machines, or is not on this machine.
    """
    if config.launcher is LauncherName.local:
        if CLUSTER in line.own or overrides:
            what, found = "trials run on this machine", overrides[0] if overrides else f"cluster={line.own[CLUSTER]}"
            raise ConfigError(what, where=COMMAND_LINE, found=found, hint="sweep.launcher=slurm")
        return None
    _check_launcher(config.launcher)
    cluster = compose_cluster(line.own.get(CLUSTER, "default"), overrides, own)
    if not cluster.same_files or cluster.folder is not None:
        what, allowed = "a sweep reads what its trials write, in the folder where it is started", "true, and no folder"
        found = f"cluster.same_files={str(cluster.same_files).lower()}, cluster.folder={cluster.folder}"
        raise ConfigError(what, where="cluster.same_files, cluster.folder", found=found, allowed=allowed)
    return cluster


def _check_launcher(launcher: LauncherName) -> None:
    """Raise a ConfigError if what the launcher needs is not on this machine."""
    if launcher is LauncherName.slurm and shutil.which("sbatch") is None:
        what, hint = "SLURM's commands are not on this machine", "the cluster's login node"
        raise ConfigError(what, where="sweep.launcher", found="no sbatch in PATH", hint=hint)
    if launcher is LauncherName.ray and importlib.util.find_spec("ray") is None:
        what, hint = "this launcher needs a package that is not installed", "pip install 'ray[default]'"
        raise ConfigError(what, where="sweep.launcher", found="ray", hint=hint)


def check_apart(run: RunConfig) -> None:
    """Raise a ConfigError if all trials would write to one mirror."""
    if run.checkpoint.mirror is not None:
        what, key = "all trials of a sweep would have one mirror", "checkpoint.mirror"
        raise ConfigError(what, where=key, found=redact(run.checkpoint.mirror), hint=f"{key}=null")


def check_population(space: Space, run: RunConfig) -> None:
    """Raise a ConfigError on a space that a population cannot have: its values change while models are trained."""
    changeable = [f"optimizer.{name}" for name in CHANGEABLE]
    for dimension in space.dimensions:
        is_interval = not dimension.choices and not dimension.is_whole
        if not is_interval or dimension.condition is not None or dimension.key not in changeable:
            what, allowed = "a member's value changes while it is trained", f"intervals of {', '.join(changeable)}"
            hint = "'optimizer.lr=tag(log, interval(1e-4, 1e-2))'"
            raise ConfigError(what, where=dimension.key, found="another key or values", allowed=allowed, hint=hint)
    if run.optimizer.changes:
        what, found = "a population changes the optimizer's values itself", f"{len(run.optimizer.changes)} changes"
        raise ConfigError(what, where="optimizer.changes", found=found, allowed="none", hint="optimizer.changes=[]")


def check_lengths(run: RunConfig, config: SweepConfig) -> None:
    """Raise a ConfigError on runs whose steps depend on their length, or that cannot go on to a later rung.

    A generation of a population is meant, too, where this says rung.
    """
    is_population = config.sampler is Sampler.pbt
    _check_schedule(run, config)
    if run.train.max_steps is None:
        raise ConfigError("rungs are shares of all tokens", where="train.max_steps", found=None, hint="a number")
    # The shortest rung has at least a step.
    least = config.generations if is_population else config.factor ** (config.rungs - 1)
    if run.train.max_steps < least:
        what, where, allowed = "there are more rungs than steps", "train.max_steps", f">= {least}"
        raise ConfigError(what, where=where, found=run.train.max_steps, allowed=allowed)
    if run.checkpoint.every is None:
        what = "a trial goes on to a later rung from its checkpoint, and there is none"
        hint = "checkpoint=default" if is_population else "checkpoint=default, or sweep.rungs=1"
        raise ConfigError(what, where="checkpoint.every", found=None, hint=hint)


def _check_schedule(run: RunConfig, config: SweepConfig) -> None:
    """Raise a ConfigError if the learning rate of a step depends on the length of the run."""
    is_population, optimizer = config.sampler is Sampler.pbt, run.optimizer
    fraction = optimizer.warmup_fraction
    if optimizer.schedule not in (Schedule.constant, Schedule.wsd) or fraction is not None:
        hint = "optimizer.schedule=constant optimizer.warmup_fraction=null"
        raise ConfigError(
            "a trial that goes on to a later rung would have had another learning rate before",
            where="optimizer.schedule, optimizer.warmup_fraction",
            found=f"{optimizer.schedule.value}, {'null' if fraction is None else fraction}",
            allowed="constant or wsd; null, with optimizer.warmup_steps or warmup_tokens",
            hint=hint if is_population else f"{hint}, or sweep.rungs=1",
        )
    # The share of all tokens that the last rung trains on.
    last_share = 1 / config.generations if is_population else 1 - 1 / config.factor
    if optimizer.schedule is Schedule.wsd and optimizer.decay_fraction > last_share:
        what = "the rate would fall before the last rung begins"
        where, found, allowed = "optimizer.decay_fraction", optimizer.decay_fraction, f"<= {last_share:.3g}"
        raise ConfigError(what, where=where, found=found, allowed=allowed)
