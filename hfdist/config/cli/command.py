"""The command line of a recipe: flags, composing, and the one place where errors become a message and an exit code."""

from __future__ import annotations

import argparse
import functools
import gc
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import NoReturn

import hydra

# Private, and the one thing taken from there: Hydra's flags must mean here what they mean everywhere.
from hydra._internal.utils import get_args_parser
from omegaconf import DictConfig

from hfdist.config.checks.offline import OFFLINE_FLAG, check_offline
from hfdist.config.checks.preflight import check_run
from hfdist.config.cli.arguments import as_config_flags, value_after
from hfdist.config.cli.finished import describe_finished
from hfdist.config.cli.process_end import (
    ending,
    stop_everywhere,
    stop_here,
    told_in_one_message,
    tolerating_broken_pipe,
)
from hfdist.config.cli.unnamed import check_named, choose_run_name
from hfdist.config.composition.aliases import override_for, reason_against
from hfdist.config.composition.compose import compose_request, compose_untyped, make_request
from hfdist.config.composition.files import searching
from hfdist.config.composition.help import describe
from hfdist.config.composition.request import Request
from hfdist.config.likely_keys import nearest_key
from hfdist.config.run import AUTO, RunConfig
from hfdist.config.schema import find_key
from hfdist.errors import ConfigError, nearest
from hfdist.garbage_collector import collector_paused
from hfdist.processes.startup import reporting, switch_reports
from hfdist.records import record_ranks, recording_end
from hfdist.topology import read_launcher

# Read by huggingface_hub, transformers and datasets while they are imported; and by the trackers.
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "WANDB_MODE": "offline"}
_IMPORTED_BY_A_RANK = "__mp_main__"
"""Name under which multiprocessing imports the script that has started a process: the script must not start again."""
_NO_FLAG = "this flag of Hydra is not available"
_PRINTING_FLAGS = ("help", "hydra_help", "cfg", "info", "shell_completion")


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
                _run_command(command, primary, sys.argv[1:], takes_ranks, trains, before_ranks)

        return command

    return decorate


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import at four fifths of the cost: the garbage collector does not run meanwhile, nor look at these objects later.

    They stay as long as the process, and torch and transformers make millions of them.
    """
    is_first = "transformers" not in sys.modules
    with collector_paused():
        try:
            yield
        finally:
            # Later there may be garbage that was not collected yet, such as a model, and it would stay.
            if is_first:
                gc.freeze()


def go_offline() -> None:
    """Switch the Hub off for this process and its children. Call before any of its libraries is imported."""
    os.environ.update(_OFFLINE)


def _run_command(
    command: Callable[[], None],
    primary: str,
    arguments: Sequence[str],
    takes_ranks: bool,
    trains: bool,
    before_ranks: Callable[[RunConfig, int], None] | None,
) -> None:
    with told_in_one_message(stop_everywhere):
        flags = _parse_flags(arguments)
        if flags.offline:
            go_offline()
        request = make_request(flags.config_name or primary, flags.overrides, flags.config_dir)
        if any(getattr(flags, name) for name in _PRINTING_FLAGS):
            _print_only(command, flags, request)
            return
        config, processes = check_request(request, flags, takes_ranks=takes_ranks, trains=trains)
        if trains and _says_finished(config):
            return
        if processes > 1:
            if before_ranks is not None:
                before_ranks(config, processes)
            sys.exit(_start_ranks(command, config, processes))
    run_composed(command, config)


def check_request(
    request: Request, flags: argparse.Namespace, *, takes_ranks: bool = True, trains: bool = True
) -> tuple[RunConfig, int]:
    """Compose, and check all that is checked before a process is started.

    Args:
        request: what the command line asks for.
        flags: of the command line.
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
    # A launcher's ranks might not see the same.
    if trains and not (read_launcher().is_given or is_own_config):
        name = choose_run_name(config, given)
        if name is not None:
            # What refers to it follows.
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


def _parse_flags(arguments: Sequence[str]) -> argparse.Namespace:
    """Read Hydra's flags and the overrides, in any order; ConfigError: a flag that hfdist does not offer."""
    parser = get_args_parser()
    parser.add_argument(OFFLINE_FLAG, action="store_true", help="No connection to the Hub or to remote data")

    def refuse(message: str) -> NoReturn:
        named = re.search(r"--cfg/-c: invalid choice: '(.*?\.ya?ml)'", message)
        hint = f"--config {named[1]}" if named else "--help"
        raise ConfigError(f"the command line cannot be read: {message}", where="command line", hint=hint)

    parser.error = refuse  # type: ignore[method-assign]
    flags, rest = parser.parse_known_args(as_config_flags(arguments))
    for text in rest:
        if text.startswith("-"):
            # Python 3.13 leaves `-q` of `-hq`, which is no argument.
            following = next((after for one, after in pairwise([*arguments, ""]) if one == text), "")
            raise _unknown_flag(text, value_after(following), parser)
    flags.overrides = [*flags.overrides, *rest]
    given = [name for name in _PRINTING_FLAGS if getattr(flags, name)]
    if len(given) > 1:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError("only one of these flags at a time", where="command line", found=names)
    for name, what, hint in (
        (
            "multirun",
            "one command is one run: under a launcher several runs in one process would share its process group",
            "hfdist sweep sweep=grid optimizer.lr=1e-3,3e-4",
        ),
        ("config_path", _NO_FLAG, "--config-dir DIR adds a folder whose files win over the shipped ones"),
        ("experimental_rerun", _NO_FLAG, "hfdist run <run.dir> starts from a run's config"),
    ):
        if getattr(flags, name):
            raise ConfigError(what, where=f"--{name.replace('_', '-')} (command line)", hint=hint)
    return flags


def _unknown_flag(text: str, following: str | None, parser: argparse.ArgumentParser) -> ConfigError:
    """Say what is meant by the flag `text`; `following`: the argument after it, where it may be its value."""
    name, _, value = text.lstrip("-").partition("=")
    key, value = name.replace("-", "_"), value or following or ""
    known = [option for action in parser._actions for option in action.option_strings]
    hint = override_for(key, value or None) or reason_against(key)
    hint = hint or nearest(text.partition("=")[0], known, cutoff=0.75)
    if hint is None:
        near = key if find_key(key) is not None else nearest_key(key)
        hint = "--help" if near is None else f"{near}={value or '...'}"
    what = "there is no such flag; keys of the config are set without dashes"
    allowed = "section.key=value, or a flag that --help lists"
    return ConfigError(what, where="command line", found=text, allowed=allowed, hint=hint)


def _print_only(command: Callable[[], None], flags: argparse.Namespace, request: Request) -> None:
    """Print the help, or let Hydra print the config, once nothing in the command line is wrong."""
    if read_launcher().rank != 0:
        return
    with tolerating_broken_pipe():
        if flags.help:
            sys.stdout.write(describe(compose_untyped(request), request))
        else:
            if flags.cfg:
                compose_request(request)
            elif not flags.shell_completion:
                compose_untyped(request)
            _ask_hydra(command, flags, request)


def _ask_hydra(command: Callable[[], None], flags: argparse.Namespace, request: Request) -> None:
    @functools.wraps(command)
    def task(config: DictConfig) -> None:
        raise AssertionError("Hydra runs nothing here")

    names = [name for name in ("hydra_help", "shell_completion", "resolve") if getattr(flags, name)]
    arguments = [f"--{name.replace('_', '-')}" for name in names]
    for name in ("cfg", "package", "info"):
        value = getattr(flags, name)
        arguments += [] if value is None else [f"--{name}", value]
    arguments += [override.text if flags.shell_completion else override.for_hydra for override in request.overrides]
    before = sys.argv
    sys.argv = [before[0], *arguments]
    try:
        with searching(request.folders):
            hydra.main(config_path=None, config_name=request.config_name, version_base="1.3")(task)()
    finally:
        sys.argv = before
