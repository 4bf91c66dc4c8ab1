"""A YAML text as a graph of nodes: aliases are references there, so 200 bytes of nested ones cost nothing.

And each finding has a line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import yaml

from hfdist.errors import ConfigError

MAX_NODES = 50_000
"""Most YAML nodes of one file, with its aliases written out."""
MAX_DEPTH = 32
_MERGE = "tag:yaml.org,2002:merge"


class Pair(NamedTuple):
    """A key with its value."""

    above: tuple[str, ...]
    """Names of the keys above it."""
    key: yaml.Node
    value: yaml.Node

    @property
    def name(self) -> str:
        """All names, such as `optimizer.lr`."""
        return ".".join((*self.above, str(self.key.value)))


def parse(text: str, place: str) -> yaml.Node | None:
    """Give the root of a text; None: nothing but comments. `place` names the file in errors, which are ConfigErrors."""
    with refusing_yaml(text, place):
        # The slower pure Python loader: the C one overflows the stack on deep nesting.
        return yaml.compose(text, Loader=yaml.SafeLoader)


def line_of(node: yaml.Node, place: str) -> str:
    """Name the file and the line of a node."""
    return f"{place}, line {node.start_mark.line + 1}"


@contextmanager
def refusing_yaml(text: str, place: str) -> Iterator[None]:
    """Raise a ConfigError where PyYAML cannot read the text."""
    try:
        yield
    except RecursionError as error:
        raise _too_deep(place) from error
    except (ValueError, LookupError, AttributeError) as error:
        # What an explicit tag asks for, such as `!!int x`, `!!bool x` and `!!timestamp x`.
        raise ConfigError(f"not valid YAML: {error}", where=place, hint="values without `!!` tags") from error
    except yaml.YAMLError as error:
        mark, lines = getattr(error, "problem_mark", None), text.splitlines()
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        where = place if mark is None else f"{place}, line {mark.line + 1}"
        found = None if mark is None or mark.line >= len(lines) else lines[mark.line].strip()
        hint = _hint(problem, found or "")
        raise ConfigError(f"not valid YAML: {problem}", where=where, found=found, hint=hint) from error


def _hint(problem: str, line: str) -> str | None:
    if "'\\t'" in problem:
        return "indent with spaces; YAML takes no tabs"
    if "${" in line and "'}'" in problem:
        return re.sub(r"([^\s{,]*\$\{[^}]*\}[^\s},]*)", r'"\1"', line)
    if "mapping values are not allowed" in problem or "expected <block end>" in problem:
        return "begin the keys of one section in the same column, and keys of the file in the first"
    return None


def check_size(root: yaml.Node, place: str) -> None:
    """Raise a ConfigError on more nodes or levels than a config has, with the aliases of a file written out."""
    # Nodes and levels below each node, by its id.
    sizes: dict[int, tuple[int, int]] = {}
    above: set[int] = set()

    def measure(node: yaml.Node, depth: int) -> tuple[int, int]:
        if id(node) in above:
            raise ConfigError("an alias stands for a value that contains it", where=line_of(node, place))
        if depth > MAX_DEPTH:
            raise _too_deep(line_of(node, place))
        if id(node) not in sizes:
            above.add(id(node))
            parts = [measure(child, depth + 1) for child in _children(node)]
            sizes[id(node)] = 1 + sum(size for size, _ in parts), 1 + max((levels for _, levels in parts), default=-1)
            above.remove(id(node))
        if depth + sizes[id(node)][1] > MAX_DEPTH:
            raise _too_deep(line_of(node, place))
        return sizes[id(node)]

    num_nodes, _ = measure(root, 0)
    if num_nodes > MAX_NODES:
        what = "the config file unfolds to too many values (aliases count each time)"
        raise ConfigError(what, where=place, found=f"{num_nodes} values", allowed=f"<= {MAX_NODES}")


def _children(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        for pair in node.value:
            yield from pair
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value


def list_pairs(node: yaml.Node, place: str, above: tuple[str, ...] = ()) -> Iterator[Pair]:
    """Give every key with its value, and the names above it; ConfigError: a mapping has the same key twice.

    What `<<` merges into a mapping stands in it under the same names.
    """
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            if isinstance(item, yaml.ScalarNode):
                # A list's item has no key of its own: it is shown as one.
                yield Pair(above, yaml.ScalarNode("", str(index), item.start_mark, item.end_mark), item)
            yield from list_pairs(item, place, (*above, str(index)))
    elif isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and key.value in lines:
                what, hint = "the same key twice in one mapping", f"keep one of the lines {lines[key.value]} and {line}"
                raise ConfigError(what, where=line_of(key, place), found=key.value, hint=hint)
            lines[str(key.value)] = line
            if key.tag == _MERGE:
                for merged in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    yield from list_pairs(merged, place, above)
                continue
            yield Pair(above, key, value)
            yield from list_pairs(value, place, (*above, str(key.value)))


def _too_deep(where: str) -> ConfigError:
    return ConfigError("the config is nested too deeply", where=where, allowed=f"at most {MAX_DEPTH} levels")
