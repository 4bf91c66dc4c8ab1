"""How rows in files of other kinds become files that can be read: a command for a shell, which the error gives."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

_HEAD_BYTES = 1 << 16
_CSV = (
    "import pandas, sys; pandas.read_csv(sys.stdin.buffer, dtype=str, keep_default_na=False{}).to_json(sys.stdout, "
    'orient="records", lines=True)'
)
# A list of rows, or rows a line each.
_JSON = (
    'import json, sys; text = sys.stdin.buffer.read().decode("utf-8-sig"); [print(json.dumps(row)) for row in '
    '(json.loads(text) if text.lstrip()[:1] == "[" else map(json.loads, filter(str.strip, text.split("\\n"))))]'
)
_UNPACK = "import {0}, shutil, sys; shutil.copyfileobj({0}.open(sys.stdin.buffer), sys.stdout.buffer)"
_COMMANDS = {
    ".csv": f"python -c '{_CSV.format('')}'",
    ".json": f"python -c '{_JSON}'",
    ".jsonl.bz2": f"python -c '{_UNPACK.format('bz2')}'",
    ".jsonl.xz": f"python -c '{_UNPACK.format('lzma')}'",
    ".tsv": "python -c '" + _CSV.format(r', sep="\t"') + "'",
}
_TEXT_SUFFIXES = (".md", ".rst", ".tex", ".py", ".log")
"""Files of plain text, each of which may be a document as .txt is."""
SUFFIXES = tuple(_COMMANDS)


def command_for(kind: str) -> str:
    """Give the command that reads a file with this ending, one of `SUFFIXES`, and writes rows of JSON."""
    return _COMMANDS[kind]


def hint_for(paths: Sequence[Path], given: str, key: str) -> str | None:
    """Give what to do with files that cannot be read as they are; None: they are of no kind that is known.

    Args:
        paths: the files that were found.
        given: a file, a folder or a glob, as the user wrote it.
        key: of the config, where it stands.
    """
    kind = next((suffix for suffix in SUFFIXES if any(path.name.endswith(suffix) for path in paths)), None)
    if kind is None:
        return _as_text(paths, given, key)
    alike = [path for path in paths if path.name.endswith(kind)]
    if kind == ".json" and not _has_rows(alike[0]):
        return "rows as JSON objects, a line each, in a file NAME.jsonl, without an object or a list around them"
    command = _COMMANDS[kind]
    if len(alike) == 1:
        file = shlex.quote(str(alike[0]))
        command = f"{command} < {file} > {file}.jsonl"
    else:
        folder = shlex.quote(os.path.commonpath(alike))
        command = f'find -L {folder} -name "*{kind}" | while read -r file; do {command} < "$file" > "$file.jsonl"; done'
    is_folder = Path(given).expanduser().is_dir()
    return f"{command}; then {shlex.quote(f'{key}={given}' if is_folder else f'{key}={given}.jsonl')}"


def _as_text(paths: Sequence[Path], given: str, key: str) -> str | None:
    """Give what makes documents of files of plain text; None: they are of no such kind."""
    kind = next((suffix for suffix in _TEXT_SUFFIXES if any(path.suffix == suffix for path in paths)), None)
    if kind is None:
        return None
    if len(paths) == 1:
        file = shlex.quote(str(paths[0]))
        return f"cp {file} {file}.txt; then {shlex.quote(f'{key}={paths[0]}.txt')}"
    folder = shlex.quote(os.path.commonpath(paths))
    then = given if Path(given).expanduser().is_dir() else f"{given}.txt"
    command = f'find -L {folder} -name "*{kind}" | while read -r file; do cp "$file" "$file.txt"; done'
    return f"{command}; then {shlex.quote(f'{key}={then}')}"


def _has_rows(path: Path) -> bool:
    """Whether JSON is a list, or objects a line each under another suffix."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES).lstrip(b"\xef\xbb\xbf \t\r\n")
        if head.startswith(b"["):
            return True
        row = json.loads(head.partition(b"\n")[0])
        # One list in an object holds the rows, most likely.
        return isinstance(row, dict) and [*map(type, row.values())] != [list]
    except (OSError, ValueError, RecursionError):
        return False
