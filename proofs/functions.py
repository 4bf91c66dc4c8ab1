"""Rows of functions of the installed standard library: what a docstring says, and the body without it."""

from __future__ import annotations

import ast
import json
import sysconfig
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_OF_TEN = {0: "held_out", 1: "valid"}
"""Which tenths of the modules are not trained on."""
_LEFT_OUT = ("site-packages", "test", "tests", "idle_test", "lib2to3", "turtledemo", "pydoc_data")
_LEAST_CHARACTERS = 40


class Function(NamedTuple):
    """A function that says what it does."""

    told: str
    """First paragraph of its docstring, on one line."""
    body: str
    """Its statements but the docstring, without comments."""


def read_functions() -> dict[str, list[Function]]:
    """Give the functions of each part, in the order of their files; all of a module or package are in one part.

    A docstring or a body that stood before is left out: of the next one nobody could say which is meant.
    """
    library = Path(sysconfig.get_path("stdlib"))
    found: dict[str, list[Function]] = defaultdict(list)
    met: set[str] = set()
    for path in sorted(library.rglob("*.py")):
        inside = path.relative_to(library)
        if set(inside.parts).isdisjoint(_LEFT_OUT):
            module = inside.parts[0].removesuffix(".py")
            part = _OF_TEN.get(zlib.crc32(module.encode()) % 10, "train")
            for function in _functions_of(path):
                if met.isdisjoint(function):
                    met.update(function)
                    found[part].append(function)
    return found


def _functions_of(path: Path) -> Iterator[Function]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and (told := ast.get_docstring(node)):
            body = "\n".join(map(ast.unparse, node.body[1:]))
            if len(body) >= _LEAST_CHARACTERS:
                yield Function(" ".join(told.partition("\n\n")[0].split()), body)


def write_rows(folder: Path) -> dict[str, list[Function]]:
    """Write a file of rows for each part, and give the functions."""
    found = read_functions()
    for part, functions in found.items():
        with (folder / f"{part}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps({"query": one.told, "positive": one.body}) + "\n" for one in functions)
    return found
