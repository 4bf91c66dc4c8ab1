"""Config files: how Hydra finds them, in hfdist's folder and in the user's, and what must not be in them.

A file is parsed to a graph of nodes first: aliases are still references there, so that 200 bytes of nested aliases
cost nothing, and every finding has a line. Both classes are Hydra plugins, by its public plugin interfaces. They change
nothing for other Hydra applications in the same process: outside `searching` no folder is added.
"""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import Container, OmegaConf

from hfdist.config.checks.urls import refuse_secrets
from hfdist.config.conf_folder import NOT_GROUPS
from hfdist.errors import ConfigError

MAX_BYTES = 1 << 20
MAX_NODES = 50_000
"""Most YAML nodes of one file, with its aliases written out."""
MAX_DEPTH = 32
_NUM_KEPT = 128
"""Files that are not parsed anew: a sweep composes hundreds of configs of the same ones."""
HYDRA_KEYS = ("help", "job", "output_subdir", "run")
"""Hydra's own settings that may stand in a file; none of them makes Hydra load or call anything."""
_MERGE = "tag:yaml.org,2002:merge"
_MAPPING = "a YAML mapping: `key: value` lines"

_folders: ContextVar[tuple[Path, ...]] = ContextVar("hfdist_conf_folders", default=())


@contextmanager
def searching(folders: tuple[Path, ...]) -> Iterator[None]:
    """Let Hydra search these folders, the first one first, for everything within the context."""
    for plugin in (CheckedFolder, AddFolders):
        Plugins.instance().register(plugin)
    token = _folders.set(folders)
    try:
        yield
    finally:
        _folders.reset(token)


class AddFolders(SearchPathPlugin):
    """Adds the folders of `searching` to Hydra's search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append each folder, in order: the first that has a file wins."""
        for folder in _folders.get():
            search_path.append(provider="hfdist", path=f"{CheckedFolder.scheme()}://{folder}")


class CheckedFolder(ConfigSource):
    """A folder of YAML files."""

    @staticmethod
    def scheme() -> str:
        """Give the prefix of paths that Hydra opens with this class."""
        return "hfdist"

    def load_config(self, config_path: str) -> ConfigResult:
        """Read, check and parse one file; ConfigError: see `read_config_text`."""
        path = self._file(config_path)
        if not path.is_file():
            raise ConfigLoadError(f"Config not found : {path}")
        text = read_config_text(path)
        with _refusing_yaml(text, display(path)):
            config = copy.deepcopy(_load(text))
        try:
            header = self._get_header_dict(text[:512])
        except ValueError as error:
            what, allowed = f"the comment that places the file is wrong: {error}", "# @package _global_, or none"
            raise ConfigError(what, where=display(path), allowed=allowed) from error
        return ConfigResult(provider=self.provider, path=self.full_path(), config=config, header=header)

    def is_group(self, config_path: str) -> bool:
        """Whether this is a folder of options."""
        return config_path not in NOT_GROUPS and (Path(self.path) / config_path).is_dir()

    def is_config(self, config_path: str) -> bool:
        """Whether this is a config file."""
        return self._file(config_path).is_file()

    def available(self) -> bool:
        """Whether the folder exists."""
        return self.is_group("")

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """List groups and options below a folder."""
        names: list[str] = []
        for path in sorted((Path(self.path) / config_path).iterdir()):
            if not path.name.startswith(("_", ".")):
                self._list_add_result(names, str(Path(config_path) / path.name), path.name, results_filter)
        return sorted(set(names))

    def _file(self, config_path: str) -> Path:
        return Path(self.path) / self._normalize_file_name(config_path)


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
            found, allowed = f"{size_bytes} bytes", f"<= {MAX_BYTES} bytes"
            raise ConfigError("the config file is too big", where=place, found=found, allowed=allowed)
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config file cannot be read: {error}", where=place) from error
    _check_text(text, place)
    return text


def read_config(path: Path) -> dict[str, Any]:
    """Give what a config file holds, with its references as text; ConfigError: see `read_config_text`."""
    text, place = read_config_text(path), display(path)
    with _refusing_yaml(text, place):
        values: dict[str, Any] | None = _PlainLoader(text).get_single_data()
    return values or {}


@lru_cache(_NUM_KEPT)
def _check_text(text: str, place: str) -> None:
    root = _parse(text, place)
    if root is None and text.strip():
        # Comments alone: a preset that is different in nothing.
        return
    if root is None:
        hint = f"delete {place}, or begin a config with `defaults: [finetune, _self_]`"
        raise ConfigError("the config file is empty", where=place, allowed=_MAPPING, hint=hint)
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError("the config file is not a mapping", where=_at(root, place), allowed=_MAPPING)
    _check_size(root, place)
    for names, key, value in _pairs(root, (), place):
        _check_pair(".".join((*names, str(key.value))), key, value, place)


@lru_cache(_NUM_KEPT)
def _load(text: str) -> Container:
    config = OmegaConf.load(io.StringIO(text))
    assert isinstance(config, Container)
    return config


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
        what = "only other keys can be interpolated; the environment is kept out of a config, because it is saved"
        hint = 'write the value on the command line: key="$VARIABLE" (the shell fills it in)'
        raise ConfigError(what, where=where, found=text, allowed="${section.key}", hint=hint)


RUN_DEFAULTS = ("run_schema", "_self_")
"""The defaults list that a run writes into its config."""


def refuse_references(path: Path) -> None:
    """Refuse `${...}` in the config of a run, perhaps of somebody else's: what a run has written is resolved.

    References to references unfold to any size, of any file.
    """
    place = display(path)
    root = _parse(read_config_text(path), place)
    for names, key, value in _pairs(root, (), place) if root is not None else ():
        if not names and str(key.value) == "defaults":
            listed = [item.value for item in value.value] if isinstance(value, yaml.SequenceNode) else value.value
            if listed != list(RUN_DEFAULTS):
                # Another file beside it could do what is refused below.
                what, allowed = "the config of a run is whole by itself", f"[{', '.join(RUN_DEFAULTS)}]"
                raise ConfigError(what, where=f"defaults ({_at(key, place)})", found=str(listed), allowed=allowed)
        for node in (key, value):
            if isinstance(node, yaml.ScalarNode) and re.search(r"(?<!\\)(\\\\)*\$\{", node.value):
                what = "the config of a run has no references to other keys: they were resolved when it was written"
                where = f"{'.'.join((*names, str(key.value)))} ({_at(node, place)})"
                hint = "the file as the run has written it"
                raise ConfigError(what, where=where, found=node.value, allowed=r"\${ for the text itself", hint=hint)


def refuse_target(key: str, where: str) -> None:
    """Refuse a key that Hydra would take for the name of Python code to call."""
    if key.rpartition(".")[2] == "_target_":
        what = "a config holds values only; nothing is ever instantiated from `_target_`"
        hint = "choose among the options of the groups, or write Python: a recipe is short"
        raise ConfigError(what, where=where, found=key, hint=hint)


def display(path: Path) -> str:
    """Give a path as people read it: relative to the working folder, if it is below."""
    try:
        return str(path.resolve().relative_to(Path.cwd().resolve()))
    except (ValueError, OSError):
        return str(path)


class _PlainLoader(yaml.SafeLoader):
    """Loads dates as the text that they are, as OmegaConf does."""

    yaml_implicit_resolvers = {  # noqa: RUF012  # an attribute of PyYAML's
        first: [pair for pair in pairs if not pair[0].endswith(":timestamp")]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def _parse(text: str, place: str) -> yaml.Node | None:
    with _refusing_yaml(text, place):
        # The slower pure Python loader: the C one overflows the stack on deep nesting.
        return yaml.compose(text, Loader=yaml.SafeLoader)


@contextmanager
def _refusing_yaml(text: str, place: str) -> Iterator[None]:
    """Raise a ConfigError where PyYAML cannot read the text."""
    try:
        yield
    except RecursionError as error:
        raise _too_deep(place) from error
    except ValueError as error:
        # What an explicit tag asks for, such as `!!int x`.
        raise ConfigError(f"not valid YAML: {error}", where=place, hint="values without `!!` tags") from error
    except yaml.YAMLError as error:
        mark, lines = getattr(error, "problem_mark", None), text.splitlines()
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        where = place if mark is None else f"{place}, line {mark.line + 1}"
        found = None if mark is None or mark.line >= len(lines) else lines[mark.line].strip()
        hint = _yaml_hint(problem, found or "")
        raise ConfigError(f"not valid YAML: {problem}", where=where, found=found, hint=hint) from error


def _yaml_hint(problem: str, line: str) -> str | None:
    if "'\\t'" in problem:
        return "indent with spaces; YAML takes no tabs"
    if "${" in line and "'}'" in problem:
        return re.sub(r"([^\s{,]*\$\{[^}]*\}[^\s},]*)", r'"\1"', line)
    if "mapping values are not allowed" in problem or "expected <block end>" in problem:
        return "begin the keys of one section in the same column, and keys of the file in the first"
    return None


def _check_size(root: yaml.Node, place: str) -> None:
    # Nodes and levels of each node, with its aliases written out.
    sizes: dict[int, tuple[int, int]] = {}
    above: set[int] = set()

    def measure(node: yaml.Node, depth: int) -> tuple[int, int]:
        if id(node) in above:
            raise ConfigError("an alias stands for a value that contains it", where=_at(node, place))
        if depth > MAX_DEPTH:
            raise _too_deep(_at(node, place))
        if id(node) not in sizes:
            above.add(id(node))
            parts = [measure(child, depth + 1) for child in _children(node)]
            sizes[id(node)] = 1 + sum(size for size, _ in parts), 1 + max((levels for _, levels in parts), default=-1)
            above.remove(id(node))
        if depth + sizes[id(node)][1] > MAX_DEPTH:
            raise _too_deep(_at(node, place))
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


def _pairs(
    node: yaml.Node, path: tuple[str, ...], place: str
) -> Iterator[tuple[tuple[str, ...], yaml.Node, yaml.Node]]:
    """Give every key with its value, and the names above it; ConfigError: a mapping has the same key twice.

    What `<<` merges into a mapping stands in it under the same names.
    """
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            if isinstance(item, yaml.ScalarNode):
                # A list's item has no key of its own: it is shown as one.
                yield path, yaml.ScalarNode("", str(index), item.start_mark, item.end_mark), item
            yield from _pairs(item, (*path, str(index)), place)
    elif isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and key.value in lines:
                what, hint = "the same key twice in one mapping", f"keep one of the lines {lines[key.value]} and {line}"
                raise ConfigError(what, where=_at(key, place), found=key.value, hint=hint)
            lines[str(key.value)] = line
            if key.tag == _MERGE:
                for merged in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    yield from _pairs(merged, path, place)
                continue
            yield path, key, value
            yield from _pairs(value, (*path, str(key.value)), place)


def _check_pair(name: str, key: yaml.Node, value: yaml.Node, place: str) -> None:
    at = _at(key, place)
    where, word, leaf = f"{name} ({at})", str(value.value).lower(), name.rpartition(".")[2]
    refuse_target(name, at)
    for node in (key, value):
        if isinstance(node, yaml.ScalarNode):
            refuse_resolver(node.value, where)
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
    if leaf == "trust_remote_code" and word not in ("false", "no", "off"):
        what = "trust_remote_code runs Python code from the model's repository, so a file cannot switch it on"
        hint = "model.trust_remote_code=true on the command line, once you have read that code"
        raise ConfigError(what, where=where, found=value.value, allowed="false", hint=hint)
    if leaf == "lm_eval_include" and word not in ("null", "~", ""):
        what = "tasks of the evaluation harness may run Python code, so a file cannot name a folder of them"
        hint = "evaluate.lm_eval_include=... on the command line, once you have read them"
        raise ConfigError(what, where=where, found=value.value, allowed="null", hint=hint)
    if leaf == "alert_command" and word not in ("null", "~", ""):
        what = "this command would be run, so a file cannot give it"
        hint = "report.alert_command=... on the command line"
        raise ConfigError(what, where=where, found=value.value, allowed="null", hint=hint)


def _at(node: yaml.Node, place: str) -> str:
    return f"{place}, line {node.start_mark.line + 1}"


def _too_deep(where: str) -> ConfigError:
    return ConfigError("the config is nested too deeply", where=where, allowed=f"at most {MAX_DEPTH} levels")
