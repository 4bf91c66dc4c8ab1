"""A recipe as a command: it composes and checks a config, and does the run here or in processes that it starts."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass

from hfdist.config.checks.offline import check_offline, go_offline
from hfdist.config.checks.preflight import check_run
from hfdist.config.cli.finished import describe_finished
from hfdist.config.cli.flags import parse_flags
from hfdist.config.cli.printing import only_prints, print_only
from hfdist.config.cli.process_end import ending, stop_everywhere, stop_here, told_in_one_message
from hfdist.config.cli.unnamed import check_named, choose_run_name
from hfdist.config.composition.compose import compose_request, make_request
from hfdist.config.composition.request import Request
from hfdist.config.run import AUTO, RunConfig
from hfdist.errors import ConfigError
from hfdist.processes.startup import reporting, switch_reports
from hfdist.records import record_ranks, recording_end
from hfdist.topology import read_launcher

_IMPORTED_BY_A_RANK = "__mp_main__"
"""Name under which multiprocessing imports the script that has started a process: the script must not start again."""


@dataclass(frozen=True)
class _Recipe:
    """What is known of a recipe; see `recipe`."""

    command: Callable[[], None]
    primary: str
    takes_ranks: bool
    trains: bool
    before_ranks: Callable[[RunConfig, int], None] | None


def recipe(
    primary: str = "pretrain",
    *,
    takes_ranks: bool = True,
    trains: bool = True,
    before_ranks: Callable[[RunConfig, int], None] | None = None,
) -> Callable[[Callable[[RunConfig], None]], Callable[[], None]]:
    """Make `main(config)` a command that is configured from the command line.

    Where `launch.processes` asks for several processes, `main` runs in each of them. They import the module of `main`
    anew, and get the config from this process.

    Args:
        primary: name of the primary config.
        takes_ranks: whether several processes can do it together.
        trains: whether its run has a folder of its own, and goes on in it.
        before_ranks: a further check of the config and the number of processes, before several are started.

    Returns:
        A decorator. The decorated function takes no arguments, and ends the process with a documented exit code
        when the run fails, and with 0 when ranks have ended well: what is to follow a run belongs into `main`. Its
        `__wrapped__` is `main` itself, for a config that is composed already.
    """

    def decorate(main: Callable[[RunConfig], None]) -> Callable[[], None]:
        @functools.wraps(main)
        def command() -> None:
            if main.__module__ != _IMPORTED_BY_A_RANK:
                _run_command(_Recipe(command, primary, takes_ranks, trains, before_ranks), sys.argv[1:])

        return command

    return decorate


def _run_command(own: _Recipe, arguments: list[str]) -> None:
    with told_in_one_message(stop_everywhere):
        flags = parse_flags(arguments)
        if flags.offline:
            go_offline()
        request = make_request(flags.config_name or own.primary, flags.overrides, flags.config_dir)
        if only_prints(flags):
            print_only(own.command, flags, request)
            return
        config, processes = check_request(request, flags, takes_ranks=own.takes_ranks, trains=own.trains)
        if own.trains and _says_finished(config):
            return
        if processes > 1:
            if own.before_ranks is not None:
                own.before_ranks(config, processes)
            sys.exit(_start_ranks(own.command, config, processes))
    run_composed(own.command, config)


def check_request(
    request: Request, flags: argparse.Namespace, *, takes_ranks: bool = True, trains: bool = True
) -> tuple[RunConfig, int]:
    """Compose, and check all that is checked before a process is started.

    Args:
        request: what the command line asks for.
        flags: the flags of the command line.
        takes_ranks: see `recipe`.
        trains: see `recipe`.

    Returns:
        The config, and how many processes are to be started; 1: this one does it.

    Raises:
        ConfigError: the first mistake.
    """
    config = compose_request(request)
    is_own_config, given = flags.config_name or flags.config_dir, [override.key for override in request.overrides]
    if trains and not is_own_config:
        check_named(config, given)
    # Ranks of a launcher might not see the same folders, and choose other names.
    if trains and not (read_launcher().is_given or is_own_config):
        name = choose_run_name(config, given)
        if name is not None:
            # Composed again, so that what refers to the name follows.
            config = compose_request(make_request(request.config_name, [*flags.overrides, f"run.name={name}"], None))
    if flags.offline:
        check_offline(config)
    if not takes_ranks:
        _check_one_process(config)
        return config, 1
    processes = _processes_to_start(config)
    check_run(config, world_size=processes if processes > 1 else None)
    return config, processes


def _says_finished(config: RunConfig) -> bool:
    """Whether the run has nothing left to do, and rank 0 has said so; all ranks of one machine find the same."""
    launcher = read_launcher()
    # Other machines might not see the same files.
    is_one_machine = launcher.world_size == 1 or (launcher.says_machine and not launcher.has_other_machines)
    said = describe_finished(config) if is_one_machine else None
    if said is not None and launcher.rank == 0:
        sys.stderr.write(said)
    return said is not None


def run_composed(command: Callable[[], None], config: RunConfig) -> None:
    """Run a recipe with a config that is composed already, and end with a documented exit code when it fails."""
    main: Callable[[RunConfig], None] = command.__wrapped__  # type: ignore[attr-defined]  # of functools.wraps
    switch_reports(config.report.progress and read_launcher().rank == 0)
    with ending(), told_in_one_message(stop_here), recording_end():
        main(config)


def _processes_to_start(config: RunConfig) -> int:
    """Give the number of processes to start; 1: this one does the run. ConfigError: the launcher started others."""
    launcher, asked = read_launcher(), config.launch.processes
    if launcher.is_given and asked not in (AUTO, "1", str(launcher.world_size)):
        what = "the launcher has started another number of processes"
        found = f"{asked}, and {launcher.world_size} of the launcher"
        hint = "launch.processes=1 leaves it to the launcher; without one, hfdist starts them"
        raise ConfigError(what, where="launch.processes", found=found, hint=hint)
    if launcher.is_given:
        return 1
    if asked == AUTO:
        from hfdist.launch.launch import count_gpus

        return max(1, count_gpus())
    return int(asked)


def _check_one_process(config: RunConfig) -> None:
    launched, asked = read_launcher().world_size, config.launch.processes
    if launched > 1 or asked not in (AUTO, "1"):
        where, rest = "launch.processes", "and launch.processes=1"
        if launched > 1:
            where, rest, asked = "accelerate launch", "without a launcher", str(launched)
        what, hint = "this takes one process, which starts its own workers", f"data.workers={asked}, {rest}"
        raise ConfigError(what, where=where, found=f"{asked} processes", hint=hint)


def _start_ranks(command: Callable[[], None], config: RunConfig, processes: int) -> int:
    if config.report.progress:
        sys.stderr.write(f"starting {processes} processes\n")
    switch_reports(config.report.progress)
    # Imported here, so that a mistake needs no torch.
    with reporting("importing torch, to start them"):
        from hfdist.launch.launch import start_ranks

    limits = {"processes": processes, "max_restarts": config.launch.max_restarts}
    return record_ranks(config.run.folder.path, lambda: start_ranks(run_composed, command, config, **limits))
