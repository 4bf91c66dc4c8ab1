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
    """One override: as the user wrote it, and as Hydra gets it."""

    text: str
    key: str
    value: object
    for_hydra: str

    @property
    def value_text(self) -> str:
        """What stands after the equals sign."""
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
        texts: the arguments.
        recipe: to name in messages.
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
    for place, text in enumerate(texts):
        if re.fullmatch(r"[\w.]+=", text) and texts[place + 1 :] and "=" not in texts[place + 1]:
            what, hint = "a space stands after the =", shlex.quote(f"{text}{texts[place + 1]}")
            raise ConfigError(what, where=COMMAND_LINE, found=f"{text} {texts[place + 1]}", hint=hint)
        for opened, closed in ("{}", "[]"):
            if re.match(rf"[\w.+]+=\{opened}", text) and text.count(opened) > text.count(closed):
                ends = [end for end in range(place + 1, len(texts)) if texts[end].endswith(closed)]
                if ends:
                    whole = " ".join(texts[place : ends[0] + 1])
                    what, hint = "the shell has split a value at its spaces", shlex.quote(whole)
                    raise ConfigError(what, where=COMMAND_LINE, found=whole, allowed=ALLOWED, hint=hint)


def _prepare(text: str, recipe: str) -> GivenOverride:
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
        given = text.partition("=")[2]
        hint, known = f"hfdist sweep sweep=grid recipe={recipe} {key}={given} for a run of each", find_key(key)
        if re.fullmatch(r"\d{1,3}(,000)+", given):
            hint = f"{key}={given.replace(',', '')}"
        if known is not None and known.takes_list:
            hint += f"; a list is '{key}=[{given}]'"
        if known is not None and known.is_text:
            hint += f"; text with a comma is '{key}=\"{given}\"'"
        raise ConfigError("several values for one key: a run takes one", where=where, found=given, hint=hint)
    value = override.value()
    refuse_number(find_key(key), value, where)
    for name, _ in flatten(value, key):
        refuse_target(name, f"{name} ({COMMAND_LINE})")
    refuse_secrets(value, key, place=COMMAND_LINE)
    return GivenOverride(text=text, key=key, value=value, for_hydra=_for_hydra(override, text))


def refuse_number(known: Key | None, value: object, where: str) -> None:
    """Refuse a number for what is true or false: OmegaConf reads any but 0 as true."""
    if known is not None and known.type in (bool, bool | None) and type(value) is int and value not in (0, 1):
        what, hint = "this is true or false, and no number", None
        if known.leaf == "gpus":
            hint = f"{known.name}=true {known.name.replace('gpus', 'processes')}={value}"
        raise ConfigError(what, where=where, found=value, allowed="true or false", hint=hint)


def _for_hydra(override: Override, text: str) -> str:
    if override.type is OverrideType.DEL or override.package is not None:
        return text
    key, value, given = override.key_or_group, text.partition("=")[2] or "''", override.value()
    if key == "experiment":
        # No primary config lists it, so that plain Hydra wants a `+`; with or without is the same here.
        return f"+{key}={value}"
    found = find_key(key)
    prefix = _PREFIXES[override.type]
    if found is not None and not found.is_free and not members(key) and override.type is OverrideType.ADD:
        # It is there: as in plain Hydra without the +.
        prefix = ""
    if found is not None and found.is_text and isinstance(given, (bool, int, float)):
        value = f"'{value}'"
    if found is not None and found.type == list[str] and isinstance(given, (str, bool, int, float)):
        value = f"[{value}]"
    for sources in _SOURCES:
        if key == sources or key.startswith(f"{sources}."):
            # As one mapping: Hydra adds a typed member only by merging.
            for part in reversed(key.removeprefix(sources).split(".")[1:]):
                value = f"{{{part}:{value}}}"
            return f"++{sources}={value}"
    above = (all_keys().get(name) for name in itertools.accumulate(key.split("."), "{}.{}".format))
    is_in_free_mapping = any(known is not None and known.is_free for known in above)
    is_free_member = override.type is OverrideType.CHANGE and is_in_free_mapping
    return f"{'++' if is_free_member else prefix}{key}={value}"


def _not_an_override(text: str) -> ConfigError:
    key, equals, value = text.partition("=")
    known = all_keys().get(key)
    if text.endswith(",") and text.strip(","):
        hint = text.rstrip(",")
    elif text in ("help", "?"):
        hint = "--help"
    elif not equals and text.endswith((".yaml", ".yml")):
        hint = f"--config {text}, if that is a config"
    elif not equals and text.endswith(":"):
        hint = f"{text[:-1]}=VALUE, without a space"
    elif not equals and is_run_folder(text):
        hint = f"--config {text.rstrip('/')}/config.yaml has the config of that run"
    elif not equals and (groups := groups_with(shipped_folder(), text)):
        hint = ", or ".join(f"{group}={text}" for group in groups)
    elif not equals and known:
        hint = f"{key}=... without spaces around the ="
    elif not equals and ":" in text:
        hint = text.replace(":", "=", 1)
    elif equals and " " in value and "=" in value:
        hint = "write each override as an argument of its own"
    elif equals and known and not known.is_text:
        hint = f"{key}=... with {known.allowed}"
    elif equals and find_key(key) is None and (instead := reason_against(key) or override_for(key)) is not None:
        hint = instead
    elif equals and key.strip(" +~") and value:
        hint = f"quote it, for the shell and for the config: '{key.strip()}=\"{value.strip()}\"'"
    else:
        hint = nearest(key, all_keys(), "{}=...") or "optimizer.lr=1e-3 or strategy=zero2"
    return ConfigError("this is not an override", where=COMMAND_LINE, found=text, allowed=ALLOWED, hint=hint)
