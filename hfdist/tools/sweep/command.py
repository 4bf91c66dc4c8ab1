"""The command line of `hfdist sweep`: the run, what varies, and how trials are chosen."""

from __future__ import annotations

import importlib.util
import shlex
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import FrameType

from hfdist.config.checks.offline import go_offline
from hfdist.config.checks.preflight import check_run
from hfdist.config.cli.about_run import MEANINGS, LineAboutRun, read_line
from hfdist.config.cli.arguments import as_command
from hfdist.config.cli.process_end import print_at_once
from hfdist.config.override_text import COMMAND_LINE, as_overrides
from hfdist.config.paths import expand_user
from hfdist.config.run import AUTO
from hfdist.config.sweep import GROUP, SECTION, LauncherName, Sampler, SweepConfig, compose_sweep
from hfdist.errors import ConfigError, HfdistError, PreemptedError, ResourceError
from hfdist.failures import is_full_disk
from hfdist.processes.child_python import module
from hfdist.processes.stop_signals import heard_signals
from hfdist.records import RunFolder
from hfdist.records.run_lock import RunLock
from hfdist.records.trials import Trial
from hfdist.tools.jobs.cluster import GROUP as CLUSTER
from hfdist.tools.jobs.cluster import ClusterConfig
from hfdist.tools.jobs.command import check_job
from hfdist.tools.jobs.job import Job
from hfdist.tools.sweep.checks import check_apart, check_lengths, check_population, find_cluster, refuse_words_of_others
from hfdist.tools.sweep.controller import Controller
from hfdist.tools.sweep.end_screen import describe_end, find_notes
from hfdist.tools.sweep.folder import keep_notes, keep_settings, write_best
from hfdist.tools.sweep.launchers.base import LOG, Launcher
from hfdist.tools.sweep.launchers.local import LocalLauncher
from hfdist.tools.sweep.launchers.ray import RayLauncher
from hfdist.tools.sweep.launchers.slurm import SlurmLauncher
from hfdist.tools.sweep.ranking import find_best, format_table, with_parents
from hfdist.tools.sweep.sampling import importances, write_study
from hfdist.tools.sweep.space import Dimension, Space, is_sweep, parse_dimension
from hfdist.tools.sweep.sweep import Sweep
from hfdist.topology import read_launcher

STUDY = "study.journal"
"""File in the sweep's folder: all trials for Optuna's own tools."""
_PRESET = "tpe"
_MOST_SHOWN = 4
_HELP = """\
Train many runs that differ in some keys, and find the best. Each trial is a run of its own, in any layout.

hfdist sweep run.name=lr model=tiny 'optimizer.lr=tag(log, interval(1e-4, 1e-1))'
hfdist sweep sweep=grid run.name=grid model=tiny optimizer.lr=1e-3,3e-3 strategy=choice(ddp,zero1) launch.processes=2
hfdist sweep sweep=pbt run.name=pbt optimizer.schedule=constant 'optimizer.lr=tag(log, interval(1e-4, 1e-2))'
hfdist sweep sweep=asha run.name=asha optimizer=adamw optimizer.schedule=constant 'optimizer.lr=interval(1e-4, 1e-2)'

sweep=NAME          {presets}; default: grid where all values are listed, else {preset}
{keys}

cluster=NAME        sweep.launcher=slurm or ray: the machines of a trial, and cluster.KEY=VALUE, as for `hfdist job`
{meanings}
All other arguments are overrides of the runs' config, as `hfdist pretrain` takes them; those with several values vary.
The same command goes on with a sweep that was stopped or killed. Its folder is run.dir.

Exit codes: 0 it has ended, 1 all trials have failed, 75 it was told to stop, 2 a mistake in the config,
7 the disk is full.
"""


def parse_sweep(arguments: Sequence[str]) -> tuple[LineAboutRun, Sweep, Launcher]:
    """Read the command line, and check all that a trial will be; ConfigError: the first mistake."""
    line, of_cluster = _read_words(arguments)
    own = None if line.config_dir is None else expand_user(line.config_dir)
    fixed = [text for text in line.overrides if not is_sweep(text)]
    config, space = _read_search(line, fixed, own)
    trial_line = replace(line, overrides=fixed)
    folder = trial_line.compose().run.folder.path
    if RunFolder(folder).record.exists():
        what, hint = "the folder of the sweep holds a run already", f"run.name={folder.name}-sweep"
        raise ConfigError(what, where="run.name", found=str(folder), hint=hint)
    sweep = Sweep(
        folder=folder,
        config=config,
        space=space,
        base=[line.recipe, *trial_line.recipe_arguments],
        compose=lambda own: replace(line, overrides=[*fixed, *own]).compose(),
    )
    cluster = find_cluster(config, line, of_cluster, own)
    _check_trials(sweep, cluster, is_offline=line.is_offline)
    return line, sweep, _make_launcher(sweep, cluster, arguments)


def _read_words(arguments: Sequence[str]) -> tuple[LineAboutRun, list[str]]:
    """Give the line about the run, and the overrides of `cluster.*`, which it has no more."""
    line = read_line(arguments, GROUP, SECTION.keys, (GROUP, CLUSTER))
    of_cluster = [text for text in line.overrides if text.startswith(f"{CLUSTER}.")]
    if (launched := read_launcher().world_size) > 1:
        what, hint = "a sweep starts the processes of its trials itself", "launch.processes=2, without a launcher"
        raise ConfigError(what, where="the launcher", found=f"{launched} processes", hint=hint)
    refuse_words_of_others(arguments)
    return replace(line, overrides=[text for text in line.overrides if text not in of_cluster]), of_cluster


def _read_search(line: LineAboutRun, fixed: Sequence[str], own: Path | None) -> tuple[SweepConfig, Space]:
    """Give what varies, and how it is searched: where all values are listed, each combination is tried once."""
    config = compose_sweep(line.own.get(GROUP, _PRESET), line.of_group, own)
    dimensions = _read_dimensions(line.overrides, fixed, config)
    is_own = GROUP in line.own or any(text.startswith("sweep.sampler=") for text in line.of_group)
    if not is_own and all(one.choices for one in dimensions):
        config = compose_sweep("grid", line.of_group, own)
    return config, Space(dimensions)


def _read_dimensions(overrides: Sequence[str], fixed: Sequence[str], config: SweepConfig) -> list[Dimension]:
    """Read what varies, from `sweep.space` and the command line: this wins, also with one value."""
    given = {text.partition("=")[0] for text in overrides}
    dimensions = [
        parse_dimension(key, values, "sweep.space") for key, values in config.space.items() if key not in given
    ]
    for text in overrides:
        if text not in fixed:
            key, _, values = text.partition("=")
            dimensions.append(parse_dimension(key, values, COMMAND_LINE))
    return dimensions


def _check_trials(sweep: Sweep, cluster: ClusterConfig | None, *, is_offline: bool) -> None:
    """Check all that a trial may be, and whether the sampler can choose its values; ConfigError: the first mistake."""
    sampler = sweep.config.sampler
    for example in sweep.space.examples():
        run = sweep.compose(as_overrides(example))
        check_apart(run)
        if cluster is None:
            check_run(run, world_size=None if run.launch.processes == AUTO else int(run.launch.processes))
        else:
            check_job(run, cluster, is_offline=is_offline)
        if sweep.has_lengths:
            check_lengths(run, sweep.config)
            # The shortest trial, for which a warm-up may be too long.
            sweep.compose(sweep.overrides_of(Trial(number=0, values=example), 0))
    if sampler is Sampler.pbt:
        check_population(sweep.space, sweep.compose([]))
    if sampler is Sampler.grid:
        sweep.space.grid(1)
    elif importlib.util.find_spec("optuna") is None:
        what, hint = "this sampler needs a package that is not installed", "pip install 'optuna>=5', or sweep=grid"
        raise ConfigError(what, where="sweep.sampler", found=sampler.value, hint=hint)


def _make_launcher(sweep: Sweep, cluster: ClusterConfig | None, arguments: Sequence[str]) -> Launcher:
    if cluster is None:
        return LocalLauncher(module("hfdist", *sweep.base), sweep.config.slots, sweep.config.devices)
    recipe, *fixed = sweep.base

    def make_job(overrides: Sequence[str], path: Path) -> Job:
        return Job(
            recipe=recipe,
            arguments=[*fixed, *overrides],
            config=sweep.compose(overrides),
            cluster=cluster,
            command=["hfdist", GROUP, *arguments],
            path=path,
        )

    return SlurmLauncher(make_job) if sweep.config.launcher is LauncherName.slurm else RayLauncher(make_job)


def _sweep(arguments: list[str]) -> None:
    """Run the sweep; exit code 75 where it was told to stop."""
    line, sweep, launcher = parse_sweep(arguments)
    if line.is_offline:
        go_offline()
    try:
        sweep.folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as held:
            held.callback(RunLock(sweep.folder).release)
            keep_settings(sweep)
            controller, has_ended = _run(sweep, launcher)
            _tell_results(sweep, controller.log.trials)
    except OSError as error:
        if not is_full_disk(error):
            raise
        what, hint = "a file of the sweep cannot be written", "free space; then the same command goes on"
        raise ResourceError(what, where=str(sweep.folder), found=error.strerror, hint=hint) from error
    if not has_ended:
        raise PreemptedError("the sweep was told to stop", where=str(sweep.folder), hint="the same command goes on")
    check_some_have_ended(sweep.folder, controller.log.trials)


def _tell_results(sweep: Sweep, trials: Sequence[Trial]) -> None:
    """Print the table, what mattered and the best trial, and write them into the sweep's folder."""
    config = sweep.config
    print_at_once(format_table(sweep, trials))
    if config.sampler is not Sampler.grid:
        write_study(config, sweep.space, trials, sweep.folder / STUDY)
        shares = importances(config, sweep.space, trials)
        if shares:
            print_at_once(f"importance: {', '.join(f'{key} {share:.2f}' for key, share in shares.items())}")
    best = find_best(sweep, trials)
    if best is not None:
        line_of_best = with_parents(best, trials)
        path = write_best(sweep, line_of_best)
        again = f"hfdist run {shlex.quote(str(path))}"
        notes = [*find_notes(sweep, trials, best)]
        keep_notes(sweep, notes)
        print_at_once(describe_end(sweep, trials, line_of_best, again, notes))


def check_some_have_ended(folder: Path, trials: Sequence[Trial]) -> None:
    """Raise an HfdistError where each of the trials has failed."""
    failures = [f"trial {trial.number}: {trial.failure}" for trial in trials if trial.failure is not None]
    if failures and len(failures) == len(trials):
        more = [f"and {len(failures) - _MOST_SHOWN} more"] if len(failures) > _MOST_SHOWN else []
        raise HfdistError(
            "all trials have failed",
            where=str(folder),
            found=(*failures[:_MOST_SHOWN], *more),
            hint=f"{folder}/trial-0000/{LOG} has what the first one said; run.name=... begins another sweep",
        )


def _run(sweep: Sweep, launcher: Launcher) -> tuple[Controller, bool]:
    """Run the sweep, with a live table in a terminal; give also whether it has ended."""
    with ExitStack() as opened:
        say, look = print_at_once, lambda _: None
        if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
            # Imported here: rich is optional, and slow to import.
            from rich.console import Console

            from hfdist.tools.sweep.live import LiveTable

            table = opened.enter_context(LiveTable(Console(), sweep.config.metric))
            say, look = table.say, table.look
        controller = Controller(sweep, launcher, say)

        def stop(number: int, frame: FrameType | None) -> None:
            say("told to stop: the trials save and stop")
            controller.stop()

        for number in heard_signals():
            signal.signal(number, stop)
        return controller, controller.run(look)


main = as_command(
    _HELP.format(
        keys=SECTION.describe(),
        meanings=MEANINGS,
        presets=" | ".join(SECTION.options()),
        preset=_PRESET,
    ),
    _sweep,
)
