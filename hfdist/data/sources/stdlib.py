"""The installed Python standard library as real data without a download: source files, or chats about docstrings."""

from __future__ import annotations

import ast
import inspect
import json
import os
import platform
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from hfdist.config.data import RowFormat
from hfdist.data.cache import write_once
from hfdist.data.sources.base import Shard
from hfdist.data.sources.rows import RowReader
from hfdist.data.sources.text import JsonLinesShard, TextShard
from hfdist.data.storage.filecache import FileCache
from hfdist.data.storage.files import LocalFile
from hfdist.data.storage.identity import identify_all, read_contents

_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}
"""Folders that are not part of the library itself, or not there on every installation."""
_TESTS = {"test", "tests", "idle_test"}
"""Folders of tests, whose docstrings explain nothing of the library."""
_LEAST_CHARACTERS, _MOST_CHARACTERS = 40, 1000
"""Characters of an answer: shorter docstrings say nothing, and longer ones are manuals."""
_FORMAT = 1
"""Version of the conversations that are made of the same library."""

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def open_standard_library(cache: FileCache) -> list[Shard]:
    """Give every source file as a shard, in order of their paths; a small file is one document."""
    root = _root()
    files = [LocalFile(path, path.relative_to(root).as_posix()) for path in _source_files(_SKIPPED_FOLDERS)]
    files.sort(key=lambda file: file.name)
    read_contents(files, cache.folder)
    pairs = zip(files, identify_all(files, ""), strict=True)
    # Some test files of the library are badly encoded on purpose.
    return [TextShard(file, identity, cache, errors="replace") for file, identity in pairs]


def open_docstrings(cache: FileCache) -> list[Shard]:
    """Give a shard with a conversation for each function and class that has a docstring; it is cached as a file."""
    path = cache.folder / "docstrings" / f"{platform.python_version()}-{_FORMAT}.jsonl"
    lines = (json.dumps({"messages": messages}).encode() + b"\n" for messages in _conversations())
    write_once(path, lambda file: file.writelines(lines))
    rows = RowReader(format=RowFormat.messages)
    file = LocalFile(path, path.name)
    (identity,) = identify_all([file], rows.key)
    read_contents([file], cache.folder)
    return [JsonLinesShard(file, identity, rows, cache)]


def _root() -> Path:
    """Give the folder of the library."""
    return Path(sysconfig.get_path("stdlib"))


def _source_files(skipped_folders: set[str]) -> Iterator[Path]:
    """Give the Python files of the library in no order, without those below folders of these names."""
    for folder, folders_below, names in os.walk(_root()):
        # The walk does not enter folders that are taken out of its list: installed packages may be ten times as much.
        folders_below[:] = set(folders_below) - skipped_folders
        for name in names:
            if name.endswith(".py"):
                yield Path(folder, name)


def _conversations() -> Iterator[list[dict[str, object]]]:
    """Give for each docstring a question with a name and a signature, and the docstring as its answer."""
    for path in sorted(_source_files(_SKIPPED_FOLDERS | _TESTS)):
        module = ".".join(path.relative_to(_root()).with_suffix("").parts).removesuffix(".__init__")
        with warnings.catch_warnings():
            # The parser warns of old escapes in strings.
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_bytes())
        for name, node in _definitions(tree, module):
            answer = inspect.cleandoc(ast.get_docstring(node, clean=False) or "").strip()
            if _LEAST_CHARACTERS <= len(answer) <= _MOST_CHARACTERS:
                yield [{"role": "user", "content": _question(name, node)}, {"role": "assistant", "content": answer}]


def _definitions(node: ast.AST, prefix: str) -> Iterator[tuple[str, _Definition]]:
    """Give functions and classes with their full names, in the order in which they stand."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Definition):
            name = f"{prefix}.{child.name}"
            yield name, child
            yield from _definitions(child, name)


def _question(name: str, node: _Definition) -> str:
    """Ask what a function or a class of this full name does."""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(map(ast.unparse, node.bases))
        signature = f"class {node.name}({bases})" if bases else f"class {node.name}"
    else:
        result = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
        signature = f"def {node.name}({ast.unparse(node.args)}){result}"
    return f"What does `{name}` do?\n\n{signature}"
