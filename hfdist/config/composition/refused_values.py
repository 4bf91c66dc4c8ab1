"""Refusals of values in config files and overrides that would run code, read the environment or store a secret."""

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


class _CommandLineKey(NamedTuple):
    """A key that runs code, so that a file must not set it: what the error says, and what may stand in a file."""

    what: str
    """The reason, for the message."""
    hint: str
    allowed: str
    """The value that a file may give."""
    spellings: Collection[str]
    """Texts by which YAML writes the allowed value, in small letters."""


_NULL_SPELLINGS = ("null", "~", "")
_COMMAND_LINE_KEYS = {
    "trust_remote_code": _CommandLineKey(
        what="trust_remote_code runs Python code from the model's repository, so a file cannot switch it on",
        hint="model.trust_remote_code=true on the command line, once you have read that code",
        allowed="false",
        spellings=("false", "no", "off"),
    ),
    "lm_eval_include": _CommandLineKey(
        what="tasks of the evaluation harness may run Python code, so a file cannot name a folder of them",
        hint="evaluate.lm_eval_include=... on the command line, once you have read them",
        allowed="null",
        spellings=_NULL_SPELLINGS,
    ),
    "alert_command": _CommandLineKey(
        what="this command would be run, so a file cannot give it",
        hint="report.alert_command=... on the command line",
        allowed="null",
        spellings=_NULL_SPELLINGS,
    ),
}
"""Keys that only the command line may set, by the last part of their names."""


def check_pair(pair: Pair, place: str) -> None:
    """Raise a ConfigError where a key of the file `place` must not stand there, or not with this value."""
    line = line_of(pair.key, place)
    where = f"{pair.name} ({line})"
    refuse_target(pair.name, line)
    _refuse_texts(pair, where)
    if isinstance(pair.value, yaml.ScalarNode) and not pair.value.tag.endswith((":null", ":bool")):
        refuse_secrets(pair.value.value, pair.name, place=line)
    _refuse_hydra_settings(pair.name, line)
    _refuse_missing(pair, where)
    _refuse_code(pair, where)


def _refuse_texts(pair: Pair, where: str) -> None:
    """Refuse a resolver or a NUL character, in the key's name or its value."""
    for node in (pair.key, pair.value):
        if isinstance(node, yaml.ScalarNode):
            refuse_resolver(node.value, where)
            if "\0" in node.value:
                raise ConfigError("no text of a config has a NUL character", where=where, found=node.value)


def _refuse_hydra_settings(name: str, line: str) -> None:
    """Refuse settings of Hydra that make it load or call something."""
    section, _, rest = name.partition(".")
    if section != "hydra" or not rest or rest.partition(".")[0] in HYDRA_KEYS:
        return
    what, allowed = "this setting of Hydra is not available", ", ".join(f"hydra.{known}" for known in HYDRA_KEYS)
    hint = "--config-dir DIR adds a folder of your own" if "searchpath" in rest else None
    raise ConfigError(what, where=line, found=name, allowed=allowed, hint=hint)


def _refuse_missing(pair: Pair, where: str) -> None:
    """Refuse Hydra's sign for a value that must be given: the typed default of the key would win over it."""
    # In a defaults list the sign says that an option must be chosen, which Hydra checks.
    if pair.value.value == "???" and not pair.name.startswith("defaults."):
        what = "every key has a typed default here, over which `???` (a value to be given) is passed in silence"
        hint = "leave the key out, or null where nothing must be given"
        raise ConfigError(what, where=where, found="???", hint=hint)


def _refuse_code(pair: Pair, where: str) -> None:
    """Refuse a value by which code would be run, where only the command line may give it."""
    key = _COMMAND_LINE_KEYS.get(pair.name.rpartition(".")[2])
    if key is not None and str(pair.value.value).lower() not in key.spellings:
        raise ConfigError(key.what, where=where, found=pair.value.value, allowed=key.allowed, hint=key.hint)


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
    # After an odd number of backslashes, `${` is text. After an even number, each two are one backslash.
    unescaped = re.sub(r"(?<!\\)(\\\\)*\\\$\{", "_", text)
    # A resolver's name may itself be a reference, as in `${${name}:argument}`: a colon belongs to the brace that is
    # open at that place. In `{a: ${b}}` that is a mapping's.
    open_braces: list[str] = []
    for sign in re.findall(r"\$\{|[{}:]", unescaped):
        if sign == "}":
            # A brace that closes none is text.
            if open_braces:
                open_braces.pop()
        elif sign != ":":
            open_braces.append(sign)
        elif open_braces and open_braces[-1] == "${":
            what = "only other keys can be interpolated; the environment is kept out of a config, because it is saved"
            hint = 'write the value on the command line: key="$VARIABLE" (the shell fills it in)'
            raise ConfigError(what, where=where, found=text, allowed="${section.key}", hint=hint)
