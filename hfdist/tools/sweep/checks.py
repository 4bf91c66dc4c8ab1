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


def refuse_words_of_others(arguments: Sequence[str]) -> None:
    """Raise a ConfigError on distributions as Optuna, Ray and wandb name them."""
    for text in arguments:
        names = r"(?:q?log_?)?uniform|q?randint|log"
        found = re.fullmatch(rf"([\w.]+)=({names})(?:_values)?\(\s*([^,()]+),\s*([^,()]+)\)", text)
        if found is not None:
            key, name, low, high = found.groups()
            values = f"tag(log, interval({low}, {high}))" if "log" in name else f"interval({low}, {high})"
            values = f"int({values})" if "int" in name else values
            what, hint = "these are no values of a sweep", shlex.quote(f"{key}={values}")
            # A grid takes choices.
            hint += " sweep=random" if f"{GROUP}=grid" in arguments else ""
            raise ConfigError(what, where=f"{key} ({COMMAND_LINE})", found=text, hint=hint)


def find_cluster(
    config: SweepConfig, line: LineAboutRun, overrides: Sequence[str], own: Path | None
) -> ClusterConfig | None:
    """Give the machines of a trial; None: it runs on this one.

    Args:
        config: `sweep.*`.
        line: the command line.
        overrides: overrides of `cluster.*`.
        own: the user's own folder of configs.

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
    if launcher is LauncherName.slurm and shutil.which("sbatch") is None:
        what, hint = "SLURM's commands are not on this machine", "the cluster's login node"
        raise ConfigError(what, where="sweep.launcher", found="no sbatch in PATH", hint=hint)
    if launcher is LauncherName.ray and importlib.util.find_spec("ray") is None:
        what, hint = "this launcher needs a package that is not installed", "pip install 'ray[default]'"
        raise ConfigError(what, where="sweep.launcher", found="ray", hint=hint)


def check_apart(run: RunConfig) -> None:
    """Raise a ConfigError where all trials would write to one place."""
    if run.checkpoint.mirror is not None:
        what, key = "all trials of a sweep would have one mirror", "checkpoint.mirror"
        raise ConfigError(what, where=key, found=redact(run.checkpoint.mirror), hint=f"{key}=null")


def check_population(space: Space, run: RunConfig) -> None:
    """Raise a ConfigError on keys of a population that must not change while a model is trained."""
    keys = [f"optimizer.{name}" for name in CHANGEABLE]
    for one in space.dimensions:
        if one.choices or one.is_whole or one.condition is not None or one.key not in keys:
            what, allowed = "a member's value changes while it is trained", f"intervals of {', '.join(keys)}"
            hint = "'optimizer.lr=tag(log, interval(1e-4, 1e-2))'"
            raise ConfigError(what, where=one.key, found="another key or values", allowed=allowed, hint=hint)
    if run.optimizer.changes:
        what, found = "a population changes the optimizer's values itself", f"{len(run.optimizer.changes)} changes"
        raise ConfigError(what, where="optimizer.changes", found=found, allowed="none", hint="optimizer.changes=[]")


def check_lengths(run: RunConfig, config: SweepConfig) -> None:
    """Raise a ConfigError on runs whose steps depend on their length, or that cannot go on to a later rung."""
    optimizer = run.optimizer
    instead = "" if config.sampler is Sampler.pbt else ", or sweep.rungs=1"
    fraction = optimizer.warmup_fraction
    if optimizer.schedule not in (Schedule.constant, Schedule.wsd) or fraction is not None:
        raise ConfigError(
            "a trial that goes on to a later rung would have had another learning rate before",
            where="optimizer.schedule, optimizer.warmup_fraction",
            found=f"{optimizer.schedule.value}, {'null' if fraction is None else fraction}",
            allowed="constant or wsd; null, with optimizer.warmup_steps or warmup_tokens",
            hint="optimizer.schedule=constant optimizer.warmup_fraction=null" + instead,
        )
    last_share = 1 / config.generations if config.sampler is Sampler.pbt else 1 - 1 / config.factor
    if optimizer.schedule is Schedule.wsd and optimizer.decay_fraction > last_share:
        what = "the rate would fall before the last rung begins"
        where, found, allowed = "optimizer.decay_fraction", optimizer.decay_fraction, f"<= {last_share:.3g}"
        raise ConfigError(what, where=where, found=found, allowed=allowed)
    if run.train.max_steps is None:
        raise ConfigError("rungs are shares of all tokens", where="train.max_steps", found=None, hint="a number")
    least = config.generations if config.sampler is Sampler.pbt else config.factor ** (config.rungs - 1)
    if run.train.max_steps < least:
        what, where, allowed = "there are more rungs than steps", "train.max_steps", f">= {least}"
        raise ConfigError(what, where=where, found=run.train.max_steps, allowed=allowed)
    if run.checkpoint.every is None:
        what = "a trial goes on to a later rung from its checkpoint, and there is none"
        raise ConfigError(what, where="checkpoint.every", found=None, hint=f"checkpoint=default{instead}")
