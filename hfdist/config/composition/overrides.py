"""The overrides of the command line: refused, or rewritten to what Hydra takes, before Hydra composes."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException

from hfdist.config.checks.urls import refuse_secrets
from hfdist.config.composition.aliases import override_for, reason_against
from hfdist.config.composition.path_overrides import refuse_bare_paths, refuse_second_data, write_paths_out
from hfdist.config.composition.refused_values import refuse_target
from hfdist.config.conf_folder import groups_with, shipped_folder
from hfdist.config.override_text import ALLOWED, COMMAND_LINE, parse_override
from hfdist.config.plain_values import flatten
from hfdist.config.schema import Key, all_keys, find_key, members
from hfdist.errors import ConfigError, nearest
from hfdist.records.run_folder import is_run_folder

_SOURCES = ("data.sources", "data.eval_sources")
_PREFIXES = {OverrideType.CHANGE: "", OverrideType.ADD: "+", OverrideType.FORCE_ADD: "++"}


@dataclass(frozen=True, kw_only=True)
class GivenOverride:
    """An override as the user wrote it, and as Hydra gets it."""

    text: str
    """The whole argument."""
    key: str
    """The key or the group that is set, without `+`."""
    value: object
    """The value as Hydra's parser reads it."""
    for_hydra: str
    """The argument that Hydra gets in place of `text`."""

    @property
    def value_text(self) -> str:
        """The part of the text after the equals sign."""
        return self.text.partition("=")[2]


def prepare_overrides(
    texts: Sequence[str], recipe: str = "pretrain", folders: Sequence[Path] = ()
) -> list[GivenOverride]:
    """Parse and check the overrides of a recipe.

    Five things are made easier than in plain Hydra: members of free mappings (`model.config.*`, `train.arguments.*`,
    `strategy.deepspeed.*`), of `data.sources` and of `data.eval_sources` need no `+`, text stays text
    (`model.revision=1e5`), a list of texts may be given as its one item (`report.to=wandb`), `data=` and `model=`
    take files, folders and Hub ids as well as an option (`data=chats/*.jsonl`, `model=Qwen/Qwen3-4B`), and
    `strategy.deepspeed=` takes a DeepSpeed config file.

    Args:
        texts: the arguments of the command line.
        recipe: the name of the recipe, for messages.
        folders: folders of configs, hfdist's own among them: a name stands for an option in them, and only else for
            a file.

    Raises:
        ConfigError: not an override, a sweep, a setting of Hydra, a `_target_`, or a secret.
    """
    folders = folders or (shipped_folder(),)
    refuse_second_data(texts)
    _refuse_split(texts)
    refuse_bare_paths(texts)
    return [_prepare(part, recipe) for text in texts for part in write_paths_out(text, folders)]


def _refuse_split(texts: Sequence[str]) -> None:
    """Refuse what the shell has split at its spaces: a key and its value, a mapping, a list."""
    for number, text in enumerate(texts):
        rest = texts[number + 1 :]
        if re.fullmatch(r"[\w.]+=", text) and rest and "=" not in rest[0]:
            what, hint = "a space stands after the =", shlex.quote(f"{text}{rest[0]}")
            raise ConfigError(what, where=COMMAND_LINE, found=f"{text} {rest[0]}", hint=hint)
        for opening, closing in (("{", "}"), ("[", "]")):
            begins = re.match(rf"[\w.+]+=\{opening}", text)
            if not begins or text.count(opening) <= text.count(closing):
                continue
            # The first argument that ends with the closing bracket is the end of the value.
            end = next((place for place, other in enumerate(rest) if other.endswith(closing)), None)
            if end is not None:
                whole = " ".join([text, *rest[: end + 1]])
                what, hint = "the shell has split a value at its spaces", shlex.quote(whole)
                raise ConfigError(what, where=COMMAND_LINE, found=whole, allowed=ALLOWED, hint=hint)


def _prepare(text: str, recipe: str) -> GivenOverride:
    """Parse and check one argument; ConfigError: it is no override, or one that is not allowed."""
    try:
        override = parse_override(text)
    except HydraException as error:
        raise _not_an_override(text) from error
    key = override.key_or_group
    where = f"{key} ({COMMAND_LINE})"
    if not key:
        raise _not_an_override(text)
    if key.partition(".")[0].partition("/")[0] == "hydra":
        what = "Hydra's own settings are fixed: it only composes here, and writes nothing"
        hint = "run.dir=... is where a run writes; --config-dir DIR adds configs of your own"
        raise ConfigError(what, where=where, found=text, hint=hint)
    if override.is_sweep_override():
        raise _several_values(key, text.partition("=")[2], recipe)
    value = override.value()
    refuse_number(find_key(key), value, where)
    for name, _ in flatten(value, key):
        refuse_target(name, f"{name} ({COMMAND_LINE})")
    refuse_secrets(value, key, place=COMMAND_LINE)
    return GivenOverride(text=text, key=key, value=value, for_hydra=_for_hydra(override, text))


def _several_values(key: str, given: str, recipe: str) -> ConfigError:
    """Make the error of several values with commas, which Hydra reads as a sweep; `given` is all of them."""
    known = find_key(key)
    if re.fullmatch(r"\d{1,3}(,000)+", given):
        # The commas are those of thousands.
        hint = f"{key}={given.replace(',', '')}"
    else:
        hint = f"hfdist sweep sweep=grid recipe={recipe} {key}={given} for a run of each"
    if known is not None and known.takes_list:
        hint += f"; a list is '{key}=[{given}]'"
    if known is not None and known.is_text:
        hint += f"; text with a comma is '{key}=\"{given}\"'"
    what, where = "several values for one key: a run takes one", f"{key} ({COMMAND_LINE})"
    return ConfigError(what, where=where, found=given, hint=hint)


def refuse_number(known: Key | None, value: object, where: str) -> None:
    """Refuse a number for what is true or false: OmegaConf reads any but 0 as true."""
    if known is not None and known.type in (bool, bool | None) and type(value) is int and value not in (0, 1):
        what, hint = "this is true or false, and no number", None
        if known.leaf == "gpus":
            hint = f"{known.name}=true {known.name.replace('gpus', 'processes')}={value}"
        raise ConfigError(what, where=where, found=value, allowed="true or false", hint=hint)


def _for_hydra(override: Override, text: str) -> str:
    """Write an override as plain Hydra takes it: with the `+` that it wants, and text in quotes."""
    if override.type is OverrideType.DEL or override.package is not None:
        return text
    key, value = override.key_or_group, text.partition("=")[2] or "''"
    if key == "experiment":
        # No primary config lists it, so that plain Hydra wants a `+`; with or without is the same here.
        return f"+{key}={value}"
    value = _quote_value(find_key(key), value, override.value())
    for sources in _SOURCES:
        if key == sources or key.startswith(f"{sources}."):
            # One mapping, `++data.sources={NAME:{path:VALUE}}`: Hydra adds a typed member only by merging.
            for part in reversed(key.removeprefix(sources).split(".")[1:]):
                value = f"{{{part}:{value}}}"
            return f"++{sources}={value}"
    return f"{_prefix_for_hydra(override)}{key}={value}"


def _quote_value(known: Key | None, value: str, parsed: object) -> str:
    """Write a value so that Hydra's parser reads what the key takes: text stays text, one item becomes a list."""
    if known is None:
        return value
    if known.is_text and isinstance(parsed, (bool, int, float)):
        return f"'{value}'"
    if known.type == list[str] and isinstance(parsed, (str, bool, int, float)):
        return f"[{value}]"
    return value


def _prefix_for_hydra(override: Override) -> str:
    """Give the `+` or `++` that Hydra wants before a key, or nothing."""
    key = override.key_or_group
    known = find_key(key)
    is_plain_key = known is not None and not known.is_free and not members(key)
    if override.type is OverrideType.ADD and is_plain_key:
        # The key is in the config already, so that there is nothing to add.
        return ""
    names = itertools.accumulate(key.split("."), "{}.{}".format)
    sections = [all_keys()[name] for name in names if name in all_keys()]
    if override.type is OverrideType.CHANGE and any(section.is_free for section in sections):
        return "++"
    return _PREFIXES[override.type]


def _not_an_override(text: str) -> ConfigError:
    """Make the error of an argument that Hydra's parser does not read; its hint is what was probably meant."""
    key, equals, value = text.partition("=")
    hint = _hint_with_equals(text, key, value) if equals else _hint_without_equals(text)
    if hint is None:
        hint = nearest(key, all_keys(), "{}=...") or "optimizer.lr=1e-3 or strategy=zero2"
    return ConfigError("this is not an override", where=COMMAND_LINE, found=text, allowed=ALLOWED, hint=hint)


def _hint_without_equals(text: str) -> str | None:
    """Give what was probably meant by an argument without an equals sign; None: nothing is known."""
    groups = groups_with(shipped_folder(), text)
    if text.endswith(",") and text.strip(","):
        return text.rstrip(",")
    if text in ("help", "?"):
        return "--help"
    if text.endswith((".yaml", ".yml")):
        return f"--config {text}, if that is a config"
    if text.endswith(":"):
        return f"{text[:-1]}=VALUE, without a space"
    if is_run_folder(text):
        return f"--config {text.rstrip('/')}/config.yaml has the config of that run"
    if groups:
        return ", or ".join(f"{group}={text}" for group in groups)
    if text in all_keys():
        return f"{text}=... without spaces around the ="
    return text.replace(":", "=", 1) if ":" in text else None


def _hint_with_equals(text: str, key: str, value: str) -> str | None:
    """Give what was probably meant by `key=value`, which Hydra's parser does not read; None: nothing is known."""
    known = all_keys().get(key)
    if text.endswith(","):
        return text.rstrip(",")
    if " " in value and "=" in value:
        return "write each override as an argument of its own"
    if known is not None and not known.is_text:
        return f"{key}=... with {known.allowed}"
    instead = None
    if find_key(key) is None:
        instead = reason_against(key) or override_for(key)
    if instead is not None:
        return instead
    if key.strip(" +~") and value:
        return f"quote it, for the shell and for the config: '{key.strip()}=\"{value.strip()}\"'"
    return None
