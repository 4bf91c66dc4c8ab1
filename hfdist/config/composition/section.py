"""A section that is no part of a run's config: a file of its folder in conf/, or of the user's own, and overrides."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Generic, TypeVar, cast

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hfdist.config.checks.urls import refuse_secrets
from hfdist.config.composition.aliases import override_for, reason_against
from hfdist.config.composition.files import display, read_config
from hfdist.config.composition.overrides import refuse_number
from hfdist.config.conf_folder import list_options, shipped_folder
from hfdist.config.override_text import COMMAND_LINE, parse_override
from hfdist.config.paths import expand_user
from hfdist.config.plain_values import check_items, flatten, plain
from hfdist.config.schema import ANY_NAME, Key, all_keys, keys_of, values_by_key
from hfdist.errors import ConfigError, first_line, nearest

T = TypeVar("T")


class Section(Generic[T]):
    """Reads values of a dataclass.

    Args:
        kind: the dataclass; the limits of its fields are checked.
        group: the folder in `conf/`, and the first part of each key.
    """

    def __init__(self, kind: type[T], group: str) -> None:
        self._kind, self._group, self._prefix = kind, group, f"{group}."
        self.keys: Mapping[str, Key] = {key.name: key for key in keys_of(kind, self._prefix)}
        """All keys of the section by their full names."""

    def compose(self, path: Path, overrides: Sequence[str] = ()) -> T:
        """Merge a file and overrides over the defaults, and check them; ConfigError: the first mistake."""
        config = OmegaConf.structured(self._kind)
        given = [(f"{self._prefix}{key}", value, display(path)) for key, value in read_config(path).items()]
        given += [(*self._parse(override), COMMAND_LINE) for override in overrides]
        for key, value, place in given:
            config = self._merge(config, key, value, place)
        try:
            values = cast(T, OmegaConf.to_object(config))
        except OmegaConfBaseException as error:
            raise ConfigError(f"a reference leads nowhere: {first_line(error)}", where=self._group) from error
        self._check(values)
        return values

    def describe(self) -> str:
        """Give a line for each key, with its default and what it is, for a command's help."""
        values = values_by_key(self._kind(), self._prefix)
        given = [(f"{key.name}={_shown(value)}", key.words or "") for key, value in values if not is_dataclass(value)]
        width = max(len(key) for key, _ in given)
        return "\n".join(f"{key:<{width}}  {words}" for key, words in given)

    def options(self, own: Path | None = None) -> dict[str, Path]:
        """Give the files of the folder by name; those of a folder of the user's own, laid out as `conf/`, win."""
        folders = [folder for folder in (shipped_folder(), own) if folder is not None]
        return {
            name: folder / self._group / f"{name}.yaml"
            for folder in folders
            for name in list_options(folder, self._group)
        }

    def find(self, name: str, own: Path | None = None, *, key: str, hint: str, others: Sequence[str] = ()) -> Path:
        """Give the file of a name, or of a path.

        Args:
            name: the name of a file in the folder, or the path of a file.
            own: see `options`.
            key: the key that names it, for messages.
            hint: what to try where no name is near.
            others: names that the key takes, too.

        Raises:
            ConfigError: there is none.
        """
        options = self.options(own)
        path = options.get(name, expand_user(name))
        # Not by pathlib: Python 3.11 raises for a name that is too long.
        if os.path.isfile(path):
            return path
        known = sorted({*options, *others})
        raise ConfigError(
            f"there is no such {self._group}",
            where=key,
            found=name,
            allowed=f"{', '.join(known)}, or the path of a file",
            hint=nearest(name, known, f"{key.partition(' ')[0]}={{}}") or hint,
        )

    def _merge(self, config: DictConfig, key: str, value: object, place: str) -> DictConfig:
        for name, _ in self._members(key, value):
            if name not in self.keys:
                raise self._unknown(name, value, place)
        refuse_number(self.keys.get(key), value, f"{key} ({place})")
        nested: object = value
        for part in reversed(key.split(".")[1:]):
            nested = {part: nested}
        try:
            return cast(DictConfig, OmegaConf.merge(config, nested))
        except (OmegaConfBaseException, OverflowError) as error:
            what = f"this value does not fit: {first_line(error)}"
            # A member of a free mapping is no key itself, and neither is the whole section.
            found = self.keys.get(key) or self.keys.get(key.rpartition(".")[0])
            allowed = None if found is None else found.allowed
            raise ConfigError(what, where=f"{key} ({place})", found=value, allowed=allowed) from error

    def _unknown(self, name: str, value: object, place: str) -> ConfigError:
        """Say that there is no such key, and which one was probably meant."""
        leaves = [key.removeprefix(self._prefix) for key in self.keys]
        # It may stand one section higher.
        above = f"{self._prefix}{name.rpartition('.')[2]}"
        called = override_for(name, value) or override_for(above, value) or ""
        hint = (
            (called if called.startswith(self._prefix) else self._of_a_run(name, value))
            or (f"{above}={value}" if above in self.keys else None)
            or reason_against(name)
            or nearest(name.removeprefix(self._prefix), leaves, f"{self._prefix}{{}}={value}", cutoff=0.75)
        )
        section = self.keys.get(name.rpartition(".")[0])
        known = [key for key in self.keys if section is None or key.startswith(section.name)]
        return ConfigError(f"there is no key `{name}`", where=f"{name} ({place})", allowed=", ".join(known), hint=hint)

    def _of_a_run(self, name: str, value: object) -> str | None:
        """Give the override of a run whose key was put into this section; None: it is no key of a run."""
        leaf = name.removeprefix(self._prefix)
        values = ",".join(map(str, value)) if isinstance(value, list) else value
        own = [key for key in self.keys if key.endswith(f".{leaf}")]
        named = own or [key for key in all_keys() if leaf in (key, key.rpartition(".")[2]) and ANY_NAME not in key]
        return shlex.quote(f"{named[0]}={values}") if named else override_for(leaf, values)

    def _parse(self, override: str) -> tuple[str, object]:
        key, _, value = override.partition("=")
        try:
            parsed = parse_override(override)
            if parsed.is_sweep_override() or parsed.is_add() or parsed.is_delete():
                raise HydraException("only key=value")
            refuse_secrets(parsed.value(), key, place=COMMAND_LINE)
            return parsed.key_or_group, parsed.value()
        except HydraException as error:
            known = self.keys.get(key)
            hint = self._of_a_run(key, value) if known is None else None
            if known is not None and known.takes_list:
                hint = shlex.quote(f"{key}={json.dumps(value.strip('[]').split(','))}")
            hint = hint or f"quote it, for the shell and for the config: '{key}=\"{value}\"'"
            what = "this is not an override"
            raise ConfigError(what, where=COMMAND_LINE, found=override, allowed="key=value", hint=hint) from error

    def _members(self, key: str, value: object) -> Iterator[tuple[str, object]]:
        """Give the keys that a value sets, each with its full name."""
        known = self.keys.get(key)
        # An empty one is named itself, where it is no key.
        if isinstance(value, dict) and value and (known is None or known.type != dict[str, str]):
            for name, item in value.items():
                yield from self._members(f"{key}.{name}", item)
        else:
            # One member of a free mapping, as in cluster.environment.NCCL_DEBUG=INFO.
            section = self.keys.get(key.rpartition(".")[0])
            yield (section.name if section is not None and section.type == dict[str, str] else key), value

    def _check(self, values: object) -> None:
        for key, value in values_by_key(values, self._prefix):
            if value is not None and key.limit is not None and not key.limit.accepts(value):
                raise ConfigError("this value is not possible", where=key.name, found=value, allowed=key.allowed)
            check_items(key, value)
            # What a line of a job file holds must not begin another.
            for name, text in flatten(value, key.name) if isinstance(value, (str, list, dict)) else ():
                if isinstance(text, str) and not all(c.isprintable() or c == "\t" for c in text):
                    what = f"a value of a {self._group} is one line"
                    raise ConfigError(what, where=name, found=text, allowed="text without control characters")


def _shown(value: object) -> str:
    value = plain(value)
    return value if isinstance(value, str) else json.dumps(value)
