"""What a recipe's command prints in place of a run: its help, its composed config, or what Hydra says of itself."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable

import hydra
from omegaconf import DictConfig

from hfdist.config.cli.flags import PRINTING_FLAGS
from hfdist.config.cli.process_end import tolerating_broken_pipe
from hfdist.config.composition.compose import compose_request, compose_untyped
from hfdist.config.composition.folders import searching
from hfdist.config.composition.help import describe
from hfdist.config.composition.request import Request
from hfdist.topology import read_launcher


def only_prints(flags: argparse.Namespace) -> bool:
    """Whether these flags ask for no run."""
    return any(getattr(flags, name) for name in PRINTING_FLAGS)


def print_only(command: Callable[[], None], flags: argparse.Namespace, request: Request) -> None:
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
