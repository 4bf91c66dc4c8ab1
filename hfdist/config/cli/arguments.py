"""Command lines of words and `key=value`, for commands that are no run and have no config."""

from __future__ import annotations

import functools
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from hfdist.config.cli.process_end import stop_everywhere, told_in_one_message, tolerating_broken_pipe
from hfdist.config.cli.recipe_names import RECIPES
from hfdist.config.override_text import COMMAND_LINE
from hfdist.config.paths import expand_user
from hfdist.errors import UNREAD, ConfigError, nearest
from hfdist.records.trials import TRIALS

FLAG = "true|false"
"""Values of a key that may also stand as a flag: `--json` is `json=true`."""
_MOST_DIGITS = 18
"""Digits of the longest number that is read: Python refuses to read some thousands."""


def as_command(help_text: str, main: Callable[[list[str]], None]) -> Callable[[], None]:
    """Make `main(arguments)` a command that prints its help, and ends with a documented exit code."""

    @functools.wraps(main)
    def command() -> None:
        is_help = not {"-h", "--help"}.isdisjoint(sys.argv[1:])
        with told_in_one_message(stop_everywhere), tolerating_broken_pipe(0 if is_help else UNREAD):
            if is_help:
                sys.stdout.write(help_text)
            else:
                main(sys.argv[1:])

    return command


def read_arguments(arguments: Sequence[str], keys: Mapping[str, str], *, first: str | None = None) -> dict[str, str]:
    """Read a command line.

    Args:
        arguments: the words after the command.
        keys: what may be set, with its values for a message; with the value `FLAG` also as a flag.
        first: the key whose value may stand alone.

    Raises:
        ConfigError: an unknown key, one without a value, or one with two values.
    """
    values: dict[str, str] = {}
    for argument, following in zip_longest(arguments, arguments[1:], fillvalue=""):
        name, equals, value = argument.partition("=")
        if argument.startswith("--") and keys.get(argument[2:]) == FLAG:
            name, value = argument[2:], "true"
        elif first is not None and not equals and not argument.startswith("-") and first not in values:
            name, value = first, argument
        if name not in keys or not value:
            raise _misread(argument, following, keys)
        if values.setdefault(name, value) != value:
            found = f"{name}={values[name]} and {name}={value}"
            raise ConfigError("this is given twice", where=COMMAND_LINE, found=found, allowed="one value")
    return values


def _misread(argument: str, following: str, keys: Mapping[str, str]) -> ConfigError:
    """Say what is wrong with an argument, and which key may be meant."""
    name, equals, value = argument.partition("=")
    near = nearest(name.lstrip("-").partition(".")[0], keys, cutoff=0.65)
    if near is None:
        hint = "--help"
    elif keys[near] == FLAG:
        hint = f"--{near}"
    else:
        hint = f"{near}={value or value_after(following) or '...'}"
    what = f"there is no key `{name}`" if equals and name not in keys else "this cannot be read"
    allowed = ", ".join(f"{key}={values_of}" for key, values_of in keys.items())
    return ConfigError(what, where=COMMAND_LINE, found=argument, allowed=allowed, hint=hint)


def value_after(following: str) -> str | None:
    """Give the argument after a flag, where it may be its value."""
    return following if following and not following.startswith("-") and "=" not in following else None


def read_flag(values: Mapping[str, str], name: str) -> bool:
    """Give a value that is true or false, which is the default; ConfigError: it is neither."""
    value = values.get(name, "false")
    if value not in ("true", "false"):
        where, hint = f"{name} ({COMMAND_LINE})", nearest(value, ("true", "false"), f"{name}={{}}", cutoff=0.0)
        raise ConfigError("no such value", where=where, found=value, allowed="true, false", hint=hint)
    return value == "true"


def read_number(values: Mapping[str, str], name: str, default: str) -> int:
    """Read a whole number from 1; ConfigError: the value is none."""
    text = values.get(name, default)
    if not text.isdecimal() or len(text) > _MOST_DIGITS or int(text) < 1:
        where, allowed = f"{name} ({COMMAND_LINE})", f"a whole number >= 1, as in {name}=2"
        raise ConfigError("no such value", where=where, found=text, allowed=allowed)
    return int(text)


def find_run(value: str, marks: Sequence[str | Path], key: str | None = None) -> Path:
    """Give the folder of a run.

    Args:
        value: the folder, as it was given.
        marks: names of files; a folder that holds one of them is that of a run.
        key: the key that has this value; None: the value stands alone.

    Raises:
        ConfigError: it is no run's folder; the message names those beside it.
    """
    folder = expand_user(value)
    where = COMMAND_LINE if key is None else f"{key} ({COMMAND_LINE})"
    given = "" if key is None else f"{key}="
    try:
        if any((folder / mark).exists() for mark in marks):
            return folder
    except OSError as error:
        raise ConfigError("this folder cannot be read", where=where, found=f"{value}: {error.strerror}") from error
    others = sorted({path.parent.name for mark in marks for path in folder.parent.glob(f"*/{mark}")})
    beside = f": {', '.join(others[:20])} in {folder.parent}" if others else ""
    trials = sorted(folder.glob("trial-*/run.json"))
    if (folder / TRIALS).is_file() and trials:
        what = "this is the folder of a sweep, whose trials are runs"
        raise ConfigError(what, where=where, found=value, hint=shlex.quote(f"{given}{trials[0].parent}"))
    nearby = _run_nearby(folder, marks, others)
    hint = None if nearby is None else shlex.quote(f"{given}{nearby}")
    allowed = f"a folder with {' or '.join(map(str, marks))}{beside}"
    raise ConfigError("there is no such run", where=where, found=value, allowed=allowed, hint=hint)


def _run_nearby(folder: Path, marks: Sequence[str | Path], others: Sequence[str]) -> str | None:
    """Give the folder of a run that may be meant: in `runs`, one of the `others` beside it, or the one it lies in."""
    in_runs = "runs" / folder
    if any((in_runs / mark).exists() for mark in marks):
        return str(in_runs)
    beside = nearest(folder.name, others, str(folder.parent / "{}"), cutoff=0.75)
    if beside is None and folder.exists() and any((folder.parent / mark).exists() for mark in marks):
        # The model in a run's folder is no run: the run is meant.
        return str(folder.parent)
    return beside


def as_config_flags(arguments: Sequence[str]) -> list[str]:
    """Write `--config FILE.yaml` out as its folder and its name.

    Raises:
        ConfigError: there is no such file, its name is that of a shipped recipe, or the config is given twice.
    """
    written: list[str] = []
    rest = iter(arguments)
    others = [one for one in arguments if one.startswith(("--config-dir", "--config-name"))]
    for argument in rest:
        flag, equals, value = argument.partition("=")
        if flag != "--config":
            written.append(argument)
            continue
        given = value if equals else next(rest, "")
        path, where = expand_user(given), f"{flag} ({COMMAND_LINE})"
        if path.suffix != ".yaml" or not os.path.isfile(path):
            what, allowed = "there is no such config", "a .yaml file, such as the config.yaml of a run"
            is_yml = path.suffix == ".yml" and os.path.isfile(path)
            hint = f"rename {path.name} to {path.stem}.yaml" if is_yml else None
            raise ConfigError(what, where=where, found=str(path) if given else None, allowed=allowed, hint=hint)
        config_flags = ["--config-dir", str(path.parent), "--config-name", path.stem]
        if others:
            what, found = "the config is given twice", f"{flag}, and {others[0]}"
            raise ConfigError(what, where=where, found=found, hint=shlex.join(config_flags))
        if path.stem in RECIPES:
            what, hint = "a file of this name hides the shipped one that it begins with", "another name for the file"
            raise ConfigError(what, where=where, found=path.name, hint=hint)
        written += config_flags
        others.append(argument)
    return written
