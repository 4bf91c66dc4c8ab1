"""How rows in files of other kinds become files that can be read: a command for a shell, which the error gives."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from hfdist.config.paths import expand_user

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
        key: the config key whose value is `given`.
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
        command = _for_each(alike, given, kind, f'{command} < "$file" > "$file.jsonl"')
    then = given if expand_user(given).is_dir() else _made(given, ".jsonl")
    return f"{command}; then {shlex.quote(f'{key}={then}')}"


def _made(given: str, suffix: str) -> str:
    """Give what finds the files that were made of those that a file name or a glob has found."""
    return f"{given}/*{suffix}" if given.endswith("**") else f"{given}{suffix}"


def _for_each(paths: Sequence[Path], given: str, kind: str, command: str) -> str:
    """Give the loop of a shell that runs a command for each "$file": of a folder those of a kind, or of a glob all."""
    if expand_user(given).is_dir():
        folder = shlex.quote(os.path.commonpath(paths) or ".")
        return f'find -L {folder} -name "*{kind}" | while IFS= read -r file; do {command}; done'
    # The command touches no other file: those beside them, or below, were not asked for.
    glob = re.sub(r"([^\w*?!\[\]./~-])", r"\\\1", given)
    own = command if given.endswith(kind) else f'case "$file" in *{kind}) {command};; esac'
    return f"{'shopt -s globstar; ' if '**' in given else ''}for file in {glob}; do {own}; done"


def _as_text(paths: Sequence[Path], given: str, key: str) -> str | None:
    """Give what makes documents of files of plain text; None: they are of no such kind."""
    kind = next((suffix for suffix in _TEXT_SUFFIXES if any(path.suffix == suffix for path in paths)), None)
    if kind is None:
        return None
    if len(paths) == 1:
        file = shlex.quote(str(paths[0]))
        return f"cp {file} {file}.txt; then {shlex.quote(f'{key}={paths[0]}.txt')}"
    then = given if expand_user(given).is_dir() else _made(given, ".txt")
    command = _for_each(paths, given, kind, 'cp "$file" "$file.txt"')
    return f"{command}; then {shlex.quote(f'{key}={then}')}"


def _has_rows(path: Path) -> bool:
    """Whether JSON is a list, or objects a line each under another suffix."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES).lstrip(b"\xef\xbb\xbf \t\r\n")
        if head.startswith(b"["):
            return True
        first, _, rest = head.partition(b"\n")
        row = json.loads(first)
        # One list in a single object holds the rows, most likely.
        return isinstance(row, dict) and (bool(rest.strip()) or [*map(type, row.values())] != [list])
    except (OSError, ValueError, RecursionError):
        return False
