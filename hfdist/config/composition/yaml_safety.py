"""What a YAML file must not do, found before anything is built from it.

A file is parsed to a graph of nodes first: aliases are still references there, so that 200 bytes of nested aliases
cost nothing, and every finding has a line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from hfdist.config.checks.urls import refuse_secrets
from hfdist.errors import ConfigError

MAX_BYTES = 1 << 20
MAX_NODES = 50_000
"""Of one file, with its aliases written out."""
MAX_DEPTH = 32
HYDRA_KEYS = frozenset({"run", "output_subdir", "job", "help"})
"""Of Hydra's own settings those that may stand in a file; none of them makes Hydra load or call anything."""


def read_config_text(path: Path) -> str:
    """Read a config file and check it.

    Raises:
        ConfigError: not readable, too big, no YAML mapping, or one that runs code, reads the environment or
            trusts remote code.
    """
    place = display(path)
    try:
        size_bytes = path.stat().st_size
        if size_bytes > MAX_BYTES:
            raise ConfigError(
                "the config file is too big", where=place, found=f"{size_bytes} bytes", allowed=f"<= {MAX_BYTES} bytes"
            )
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config file cannot be read: {error}", where=place) from error
    check_config_text(text, place)
    return text


def check_config_text(text: str, place: str) -> None:
    """Check the text of a config file; `place` is how messages name it."""
    root = _parse(text, place)
    if root is None:
        raise ConfigError(
            "the config file is empty",
            where=place,
            allowed="a YAML mapping: `key: value` lines",
            hint=f"delete {place}",
        )
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(
            "the config file is not a mapping", where=_at(root, place), allowed="a YAML mapping: `key: value` lines"
        )
    _check_size(root, place)
    for path, key, value in _pairs(root, ()):
        _check_pair(".".join((*path, str(key.value))), key, value, place)
    _check_duplicates(root, place)


def refuse_resolver(text: str, where: str) -> None:
    """Refuse `${name:...}` in a value: only the values of other keys may be interpolated.

    The environment is the reason: what `${oc.env:...}` reads would end in the saved config, secrets included.
    """
    # An odd number of backslashes makes the text itself of what follows.
    rest, previous = re.sub(r"(?<!\\)(\\\\)*\\\$\{", "_", text), ""
    while rest != previous:
        # Innermost plain references first, so that a resolver whose name is itself a reference is seen too.
        rest, previous = re.sub(r"\$\{[^{}:]*\}", "_", rest), rest
    if re.search(r"\$\{[^{}]*:", rest):
        raise ConfigError(
            "only other keys can be interpolated; the environment is kept out of a config, because the config is saved",
            where=where,
            found=text,
            allowed="${section.key}",
            hint='write the value on the command line: key="$VARIABLE" (the shell fills it in)',
        )


def refuse_target(key: str, where: str) -> None:
    """Refuse a key that Hydra would take for the name of Python code to call."""
    if key.rpartition(".")[2] == "_target_":
        raise ConfigError(
            "a config holds values only; nothing is ever instantiated from `_target_`",
            where=where,
            found=key,
            hint="choose among the options of the groups, or write Python: a recipe is short",
        )


def display(path: Path) -> str:
    """The path as people read it: relative to where they are, if below."""
    try:
        return str(path.resolve().relative_to(Path.cwd().resolve()))
    except (ValueError, OSError):
        return str(path)


def _parse(text: str, place: str) -> yaml.Node | None:
    try:
        # The slower pure Python loader: the C one overflows the stack on deep nesting.
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except RecursionError as error:
        raise _too_deep(place) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        has_tab = "'\\t'" in problem
        raise ConfigError(
            f"not valid YAML: {problem}",
            where=place if mark is None else f"{place}, line {mark.line + 1}",
            found=None if mark is None or mark.line >= len(text.splitlines()) else text.splitlines()[mark.line].strip(),
            hint="indent with spaces; YAML takes no tabs" if has_tab else None,
        ) from error


def _check_size(root: yaml.Node, place: str) -> None:
    sizes: dict[int, int] = {}
    above: set[int] = set()

    def count(node: yaml.Node, depth: int) -> int:
        if id(node) in above:
            raise ConfigError("an alias stands for a value that contains it", where=_at(node, place))
        if depth > MAX_DEPTH:
            raise _too_deep(_at(node, place))
        if id(node) not in sizes:
            above.add(id(node))
            sizes[id(node)] = 1 + sum(count(child, depth + 1) for child in _children(node))
            above.remove(id(node))
        return sizes[id(node)]

    num_nodes = count(root, 0)
    if num_nodes > MAX_NODES:
        raise ConfigError(
            "the config file unfolds to too many values (aliases count each time)",
            where=place,
            found=f"{num_nodes} values",
            allowed=f"<= {MAX_NODES}",
        )


def _check_duplicates(node: yaml.Node, place: str) -> None:
    if isinstance(node, yaml.MappingNode):
        first: dict[str, yaml.Node] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in first:
                raise ConfigError(
                    "the same key twice in one mapping",
                    where=_at(key, place),
                    found=key.value,
                    hint=f"keep one of the lines {first[key.value].start_mark.line + 1} and {key.start_mark.line + 1}",
                )
            first[str(key.value)] = key
    for child in _children(node):
        _check_duplicates(child, place)


def _children(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield key
            yield value
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value


def _pairs(node: yaml.Node, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], yaml.Node, yaml.Node]]:
    """Every key with its value, and the names above it."""
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            if isinstance(item, yaml.ScalarNode):
                # A list's item has no key of its own: it is shown as one.
                yield path, yaml.ScalarNode("", str(index), item.start_mark, item.end_mark), item
            yield from _pairs(item, (*path, str(index)))
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield path, key, value
            yield from _pairs(value, (*path, str(key.value)))


def _check_pair(name: str, key: yaml.Node, value: yaml.Node, place: str) -> None:
    at = _at(key, place)
    refuse_target(name, at)
    for node in (key, value):
        if isinstance(node, yaml.ScalarNode):
            refuse_resolver(node.value, f"{name} ({at})")
    if isinstance(value, yaml.ScalarNode) and not value.tag.endswith((":null", ":bool")):
        refuse_secrets(value.value, name, place=at)
    if value.value == "???" and not name.startswith("defaults."):
        raise ConfigError(
            "every key has a typed default here, over which `???` (a value to be given) is passed in silence",
            where=f"{name} ({at})",
            found="???",
            hint="leave the key out, or null where nothing must be given",
        )
    leaf = name.rpartition(".")[2]
    if leaf == "trust_remote_code" and str(value.value).lower() not in ("false", "no", "off"):
        raise ConfigError(
            "trust_remote_code runs Python code from the model's repository, so a file cannot switch it on",
            where=f"{name} ({at})",
            found=value.value,
            allowed="false",
            hint="model.trust_remote_code=true on the command line, once you have read that code",
        )
    if leaf == "lm_eval_include" and str(value.value).lower() not in ("null", "~", ""):
        raise ConfigError(
            "tasks of the evaluation harness may run Python code, so a file cannot name a folder of them",
            where=f"{name} ({at})",
            found=value.value,
            allowed="null",
            hint="evaluate.lm_eval_include=... on the command line, once you have read them",
        )
    parent, _, leaf = name.partition(".")
    if parent == "hydra" and leaf and leaf.partition(".")[0] not in HYDRA_KEYS:
        raise ConfigError(
            "this setting of Hydra is not available",
            where=at,
            found=name,
            allowed=", ".join(sorted(f"hydra.{known}" for known in HYDRA_KEYS)),
            hint="--config-dir DIR adds a folder of your own" if "searchpath" in leaf else None,
        )


def _at(node: yaml.Node, place: str) -> str:
    return f"{place}, line {node.start_mark.line + 1}"


def _too_deep(where: str) -> ConfigError:
    return ConfigError("the config is nested too deeply", where=where, allowed=f"at most {MAX_DEPTH} levels")
