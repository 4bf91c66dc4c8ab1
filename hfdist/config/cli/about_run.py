"""The command line of a command about a run that it does not start: its words, keys of its own group, and the run's."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path

from hfdist.config.checks.offline import OFFLINE_FLAG
from hfdist.config.cli.arguments import as_config_flags, find_run, value_after
from hfdist.config.cli.own_config import as_recipe
from hfdist.config.cli.recipe_names import NAMES, RECIPES, RUN, SHARED, names_config, with_task
from hfdist.config.composition.aliases import override_for, reason_against
from hfdist.config.composition.compose import compose_config
from hfdist.config.composition.files import refuse_references
from hfdist.config.override_text import COMMAND_LINE
from hfdist.config.run import RunConfig
from hfdist.errors import ConfigError, nearest
from hfdist.records.run_folder import IN_RUN, is_run_folder

_VALUE_FLAGS = ("--config-dir", "--config-name")
_OF_RECIPE = (OFFLINE_FLAG, *_VALUE_FLAGS)
_OF_RUN = ("recipe", "run")
MEANINGS = f"""\
recipe=NAME         {" | ".join(NAMES)}; default: {RECIPES[0]}; the name alone means the same
run=FOLDER          the run's config is that of this run's folder; default: the recipe's
run FILE.yaml       a config of your own, by the recipe that it names; also a run's folder"""
"""Lines for the help of such a command."""


@dataclass(frozen=True, kw_only=True)
class LineAboutRun:
    """What the command line says, in parts."""

    own: dict[str, str]
    """The command's own words."""
    of_group: list[str]
    """Overrides of the command's own group."""
    recipe: str
    flags: dict[str, str]
    """Flags with their values, the command's own among them; "": it takes none."""
    overrides: list[str]
    """Overrides of the run's config."""

    @property
    def is_offline(self) -> bool:
        """Whether no connection may be opened."""
        return OFFLINE_FLAG in self.flags

    @property
    def config_dir(self) -> str | None:
        """A folder of the user's, laid out as `conf/`."""
        return self.flags.get("--config-dir")

    @property
    def recipe_arguments(self) -> list[str]:
        """What the recipe is called with."""
        flags = [(name, value) for name, value in self.flags.items() if name in _OF_RECIPE]
        return [*(word for flag in flags for word in flag if word), *self.overrides]

    def compose(self) -> RunConfig:
        """Give the run's config; ConfigError: the first mistake in it."""
        name = self.flags.get("--config-name") or (RECIPES[0] if self.recipe in SHARED else self.recipe)
        return compose_config(self.overrides, name=name, extra_dir=self.config_dir)


def read_line(
    arguments: Sequence[str],
    group: str,
    keys: Container[str],
    words: Sequence[str] = (),
    *,
    flags: Sequence[str] = (),
    others: Sequence[str] = (),
) -> LineAboutRun:
    """Divide a command line.

    Args:
        arguments: the words after the command.
        group: the command's group: what its keys begin with.
        keys: the full names of that group's keys.
        words: keys of the command's own, beside `recipe` and `run`.
        flags: the command's own flags, which take no value.
        others: recipes that do not train, and that the command takes.

    Raises:
        ConfigError: a word that is given twice or without a value, a flag or a recipe that is not there, no such run,
            or two configs.
    """
    given, rest = _split_flags(as_config_flags(_write_run_out(arguments)), group, keys, (OFFLINE_FLAG, *flags))
    own, of_group, overrides = _divide(rest, group, keys, (*_OF_RUN, *words), (*NAMES, *others))
    name = choose("recipe", own.pop("recipe", RECIPES[0]), (*NAMES, *others))
    if "run" in own:
        if given.keys() & {*_VALUE_FLAGS}:
            raise ConfigError("the run's config is given twice", where=COMMAND_LINE, found="run=, and --config-...")
        folder: Path = find_run(own.pop("run"), (IN_RUN.config,), "run")
        refuse_references(folder / IN_RUN.config)
        given |= {"--config-dir": str(folder), "--config-name": IN_RUN.config.stem}
    if name in NAMES and not names_config(given):
        overrides = with_task(name, overrides)
    recipe = NAMES[name][0] if name in NAMES else name
    return LineAboutRun(own=own, of_group=of_group, recipe=recipe, flags=given, overrides=overrides)


def choose(key: str, value: str | None, known: Sequence[str]) -> str:
    """Give a value that is one of the known ones; ConfigError: it is none."""
    if value in known:
        return str(value)
    what = "which one?" if value is None else "no such value"
    hint = f"{key}={known[0]}" if value is None else nearest(value, known, f"{key}={{}}")
    raise ConfigError(what, where=f"{key} ({COMMAND_LINE})", found=value, allowed=", ".join(known), hint=hint)


def _write_run_out(arguments: Sequence[str]) -> list[str]:
    for number, argument in enumerate(arguments):
        if argument == RUN and (number == 0 or arguments[number - 1] not in ("--config", *_VALUE_FLAGS)):
            return [*arguments[:number], *as_recipe([*arguments, ""][number + 1], arguments[number + 2 :])]
    return [*arguments]


def _divide(
    arguments: Sequence[str], group: str, keys: Container[str], words: Sequence[str], recipes: Container[str]
) -> tuple[dict[str, str], list[str], list[str]]:
    """Give the command's own words, the overrides of its group, and those of the run."""
    own: dict[str, str] = {}
    of_group: list[str] = []
    of_run: list[str] = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not equals and argument in recipes:
            name, value = "recipe", argument
        elif not equals and is_run_folder(argument):
            name, value = "run", argument
        if name in words:
            if name in own or not value:
                what = "this is given twice" if name in own else "a value is missing"
                raise ConfigError(what, where=COMMAND_LINE, found=argument, hint=f"{name}={value or '...'}")
            own[name] = value
        elif f"{group}.{name}" in keys:
            what, hint = f"keys of the {group} begin with its name", f"{group}.{argument}"
            raise ConfigError(what, where=COMMAND_LINE, found=argument, hint=hint)
        else:
            (of_group if name.startswith(f"{group}.") else of_run).append(argument)
    return own, of_group, of_run


def _split_flags(
    arguments: Sequence[str], group: str, keys: Container[str], without_value: Sequence[str]
) -> tuple[dict[str, str], list[str]]:
    """Give the flags with their values ("": it takes none), and the overrides."""
    flags: dict[str, str] = {}
    overrides: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if name in without_value and not equals:
            flags[name] = ""
        elif name in _VALUE_FLAGS:
            flags[name] = value if equals else next(rest, "")
            if not flags[name]:
                raise ConfigError("this flag takes a value", where=COMMAND_LINE, found=argument)
        elif argument.startswith("-"):
            known, leaf = (*without_value, *_VALUE_FLAGS), name.lstrip("-").replace("-", "_")
            key, value = f"{group}.{leaf}", value or value_after(next(rest, "")) or ""
            override = f"{key}={value or '...'}" if key in keys else override_for(key, value or None)
            hint = override or reason_against(leaf) or nearest(name, known) or "--help"
            what, allowed = "there is no such flag", ", ".join(known)
            raise ConfigError(what, where=COMMAND_LINE, found=argument, allowed=allowed, hint=hint)
        else:
            overrides.append(argument)
    return flags, overrides
