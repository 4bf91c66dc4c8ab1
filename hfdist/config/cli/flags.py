"""Flags and overrides of a recipe's command line: Hydra's own, but for those that have no meaning here."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import NoReturn

# Private, and the one thing taken from there: Hydra's flags must mean here what they mean everywhere.
from hydra._internal.utils import get_args_parser

from hfdist.config.checks.offline import OFFLINE_FLAG
from hfdist.config.cli.arguments import as_config_flags, value_after
from hfdist.config.composition.aliases import override_for, reason_against
from hfdist.config.likely_keys import nearest_key
from hfdist.config.schema import find_key
from hfdist.errors import ConfigError, nearest

PRINTING_FLAGS = ("help", "hydra_help", "cfg", "info", "shell_completion")
"""Flags of a command that prints something and runs nothing."""
_NO_FLAG = "this flag of Hydra is not available"
_REFUSED = {
    "multirun": (
        "one command is one run: under a launcher several runs in one process would share its process group",
        "hfdist sweep sweep=grid optimizer.lr=1e-3,3e-4",
    ),
    "config_path": (_NO_FLAG, "--config-dir DIR adds a folder whose files win over the shipped ones"),
    "experimental_rerun": (_NO_FLAG, "hfdist run <run.dir> starts from a run's config"),
}
"""Flags of Hydra that are refused: why, and what to do."""


def parse_flags(arguments: Sequence[str]) -> argparse.Namespace:
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
    given = [name for name in PRINTING_FLAGS if getattr(flags, name)]
    if len(given) > 1:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError("only one of these flags at a time", where="command line", found=names)
    for name, (what, hint) in _REFUSED.items():
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
