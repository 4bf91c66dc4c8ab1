"""The command line of a recipe, and the one place where errors end a process."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path

import hydra
from hydra._internal.utils import get_args_parser

from hfdist.config.compose import compose_config, conf_dir, register_schema
from hfdist.config.run import RunConfig
from hfdist.errors import ConfigError, HfdistError
from hfdist.topology import read_launcher

# Long enough for rank 0 to print before the launcher, seeing another rank end, kills it.
_SECONDS_FOR_RANK_0 = 5


def recipe(primary: str) -> Callable[[Callable[[RunConfig], None]], Callable[[], None]]:
    """Make `main(config)` a command with Hydra's overrides and flags.

    A mistake of the user ends the process with one message on standard error, printed by rank 0 alone, and the
    error's exit code.

    Args:
        primary: name of the primary config in `conf/`.
    """

    def decorate(main: Callable[[RunConfig], None]) -> Callable[[], None]:
        @wraps(main)
        def command() -> None:
            try:
                config = _read_command_line(primary)
                if config is not None:
                    main(config)
            except HfdistError as error:
                _end(error)
            except KeyboardInterrupt:
                sys.exit(130)

        return command

    return decorate


def _read_command_line(primary: str) -> RunConfig | None:
    """Give the config, or None where Hydra itself has answered (`--help`, `--cfg`, `--info` ...)."""
    # Private, but the only way to read Hydra's flags as Hydra does; tests/unit/config checks its shape.
    arguments = get_args_parser().parse_args()
    if arguments.multirun:
        raise ConfigError("a launcher starts one run", where="--multirun", hint="one run a value: loop in the shell")
    if arguments.config_path is not None:
        raise ConfigError(
            "the shipped configs are needed too",
            where="--config-path",
            found=arguments.config_path,
            hint="--config-dir, which adds a folder to the search path",
        )
    is_question = arguments.help or arguments.hydra_help or arguments.shell_completion
    config = None if is_question else _compose(arguments, primary)
    if is_question or arguments.cfg or arguments.info:
        _let_hydra_answer(primary)
        return None
    return config


def _compose(arguments: argparse.Namespace, primary: str) -> RunConfig:
    folder = Path(arguments.config_dir) if arguments.config_dir else None
    return compose_config(arguments.overrides, name=arguments.config_name or primary, extra_dir=folder)


def _let_hydra_answer(primary: str) -> None:
    register_schema()
    hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=primary)(lambda config: None)()


def _end(error: HfdistError) -> None:
    """Print the message once, and leave with the error's code."""
    rank = _rank_or_0()
    torch = sys.modules.get("torch")
    has_group = torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()
    if has_group:
        # Each rank has its own errors now.
        sys.stderr.write(f"[rank {rank}] {error}\n")
    elif rank == 0:
        sys.stderr.write(f"{error}\n")
    else:
        time.sleep(_SECONDS_FOR_RANK_0)
    sys.stderr.flush()
    sys.exit(error.exit_code)


def _rank_or_0() -> int:
    """The environment itself may be what is wrong."""
    try:
        return read_launcher().rank
    except ConfigError:
        return 0
