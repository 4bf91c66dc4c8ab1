"""What must not be in a config file or an override: ways from a value to code, to the environment, or to a secret."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

import yaml

from hfdist.config.checks.urls import refuse_secrets
from hfdist.config.composition.yaml_graph import Pair, line_of
from hfdist.errors import ConfigError

HYDRA_KEYS = ("help", "job", "output_subdir", "run")
"""Hydra's own settings that may stand in a file; none of them makes Hydra load or call anything."""


class _OfCommandLine(NamedTuple):
    """Why a file cannot set a key that runs code, and what to do."""

    what: str
    hint: str
    allowed: str
    harmless: Collection[str]
    """What YAML may have for the allowed value."""


_NULL = ("null", "~", "")
_OF_COMMAND_LINE = {
    "trust_remote_code": _OfCommandLine(
        "trust_remote_code runs Python code from the model's repository, so a file cannot switch it on",
        "model.trust_remote_code=true on the command line, once you have read that code",
        "false",
        ("false", "no", "off"),
    ),
    "lm_eval_include": _OfCommandLine(
        "tasks of the evaluation harness may run Python code, so a file cannot name a folder of them",
        "evaluate.lm_eval_include=... on the command line, once you have read them",
        "null",
        _NULL,
    ),
    "alert_command": _OfCommandLine(
        "this command would be run, so a file cannot give it",
        "report.alert_command=... on the command line",
        "null",
        _NULL,
    ),
}
"""Last names of keys that only the command line may set."""


def check_pair(pair: Pair, place: str) -> None:
    """Raise a ConfigError where a key of the file `place` must not stand there, or not with this value."""
    name, value, at = pair.name, pair.value, line_of(pair.key, place)
    where = f"{name} ({at})"
    refuse_target(name, at)
    for node in (pair.key, value):
        if isinstance(node, yaml.ScalarNode):
            refuse_resolver(node.value, where)
            if "\0" in node.value:
                raise ConfigError("no text of a config has a NUL character", where=where, found=node.value)
    if isinstance(value, yaml.ScalarNode) and not value.tag.endswith((":null", ":bool")):
        refuse_secrets(value.value, name, place=at)
    section, _, rest = name.partition(".")
    if section == "hydra" and rest and rest.partition(".")[0] not in HYDRA_KEYS:
        what, allowed = "this setting of Hydra is not available", ", ".join(f"hydra.{known}" for known in HYDRA_KEYS)
        hint = "--config-dir DIR adds a folder of your own" if "searchpath" in rest else None
        raise ConfigError(what, where=at, found=name, allowed=allowed, hint=hint)
    if value.value == "???" and not name.startswith("defaults."):
        what = "every key has a typed default here, over which `???` (a value to be given) is passed in silence"
        hint = "leave the key out, or null where nothing must be given"
        raise ConfigError(what, where=where, found="???", hint=hint)
    own = _OF_COMMAND_LINE.get(name.rpartition(".")[2])
    if own is not None and str(value.value).lower() not in own.harmless:
        raise ConfigError(own.what, where=where, found=value.value, allowed=own.allowed, hint=own.hint)


def refuse_target(key: str, where: str) -> None:
    """Refuse a key that Hydra would take for the name of Python code to call."""
    if key.rpartition(".")[2] == "_target_":
        what = "a config holds values only; nothing is ever instantiated from `_target_`"
        hint = "choose among the options of the groups, or write Python: a recipe is short"
        raise ConfigError(what, where=where, found=key, hint=hint)


def refuse_resolver(text: str, where: str) -> None:
    """Refuse `${name:...}` in a value: only the values of other keys may be interpolated.

    The environment is the reason: what `${oc.env:...}` reads would end in the saved config, secrets included.
    """
    # An odd number of backslashes makes the text itself of what follows.
    read = re.sub(r"(?<!\\)(\\\\)*\\\$\{", "_", text)
    # A resolver's name may itself be a reference, so each colon counts for the innermost brace that is open before it.
    opened: list[str] = []
    for sign in re.findall(r"\$\{|[{}:]", read):
        if sign == ":" and opened[-1:] == ["${"]:
            what = "only other keys can be interpolated; the environment is kept out of a config, because it is saved"
            hint = 'write the value on the command line: key="$VARIABLE" (the shell fills it in)'
            raise ConfigError(what, where=where, found=text, allowed="${section.key}", hint=hint)
        if sign == "}":
            del opened[-1:]
        elif sign != ":":
            opened.append(sign)
