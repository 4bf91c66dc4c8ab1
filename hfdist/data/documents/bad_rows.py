"""Hints for rows that cannot be read: a single bad row is left out, and where all are bad, the file is converted."""

from __future__ import annotations

import codecs
import copy
import shlex
from collections.abc import Iterable

from hfdist.config.override_text import in_shell
from hfdist.data.sources.base import BadRow, Shard, holds_tokens
from hfdist.data.storage.conversion import command_for
from hfdist.errors import DataError

_MOST_TRIED = 16
"""Number of rows of a shard that are read to know whether all are bad."""


def find_all_bad(shard: Shard) -> DataError | None:
    """Give the error of the first row, with a hint, where none of the first rows can be read; None: some can."""
    # One read may ask for rows of one run only: the first that has rows.
    first_run = next((num_rows for num_rows in shard.runs if num_rows), 0)
    if holds_tokens(shard) or not first_run:
        return None
    rows = list(shard.read(range(min(first_run, _MOST_TRIED))))
    errors = [row.error for row in rows if isinstance(row, BadRow)]
    if len(errors) < len(rows):
        return None
    error = copy.copy(errors[0])
    if len(errors) > 1:
        error.what += f" (none of the first {len(errors)} rows can be read)"
    error.hint = _join(error.hint, _in_utf8(error) or _as_rows(error))
    return error


def find_rows_in_text(shard: Shard) -> DataError | None:
    """Give an error where a text file, which is read as one document, holds rows of JSON; None: it does not."""
    if not shard.name.endswith(".txt") or not shard.runs:
        return None
    (text,) = shard.read([0])
    if not isinstance(text, str) or not text.startswith('{"'):
        return None
    what, hint = "a .txt file is one document, and this one holds rows of JSON", "the same file as NAME.jsonl"
    return DataError(what, where=shard.name, found=text[:80], hint=hint)


def with_way_out(error: DataError, shard: Shard, origin: str, *, is_alone: bool) -> DataError:
    """Give a copy of the error of a row, with a hint that says what to do.

    Args:
        error: Error of the bad row.
        shard: Shard that holds the row.
        origin: Name of the row, as `data.quarantine` takes it.
        is_alone: Whether there is no other shard: without its rows, nothing would be left.
    """
    all_bad = find_all_bad(shard)
    if all_bad is not None and is_alone:
        return all_bad
    conversion = _in_utf8(error)
    if conversion is None and all_bad is not None:
        conversion = _as_rows(error)
    # All rows of a damaged file share one error.
    error = copy.copy(error)
    error.hint = _join(error.hint, conversion, f"data.on_bad_rows=skip, or {quarantine([origin])}")
    return error


def quarantine(origins: Iterable[str]) -> str:
    """Write the override, for a shell, that takes the rows of these names out of the training."""
    return in_shell("data.quarantine", list(origins))


def _join(*hints: str | None) -> str | None:
    """Join the hints that there are; None: there is none."""
    return ", or ".join(hint for hint in hints if hint is not None) or None


def _in_utf8(error: DataError) -> str | None:
    """Propose what makes UTF-8 of a file in another encoding; None: the error is another one."""
    if not error.what.startswith("not UTF-8"):
        return None
    file = _file_of(error)
    if file is None:
        return "text in UTF-8"
    encoding = "UTF-16" if _begins_as_utf16(_path_of(error)) else "ISO-8859-1"
    return f"iconv -f {encoding} -t UTF-8 {file} > NEW, if that is its encoding"


def _begins_as_utf16(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    except OSError:
        return False


def _as_rows(error: DataError) -> str | None:
    """Propose what makes JSON lines of a file in another format; None: the error is another one."""
    if not error.what.startswith(("not JSON", "a line is not a JSON object")):
        return None
    file, found, wanted = _file_of(error), str(error.found).strip(), "rows as JSON objects, a line each"
    if found.startswith(("{'", "['")):
        return "rows as json.dumps writes them, since JSON has double quotes"
    command: str | None = None
    if found.startswith("["):
        command = command_for(".json")
    elif "," in found and "{" not in found:
        command = command_for(".csv")
    elif found == "{":
        # Objects of several lines each.
        command = "jq -c ."
    if file is None or command is None:
        return wanted
    return f"{wanted}: {command} < {file} > NEW.jsonl"


def _file_of(error: DataError) -> str | None:
    """Give the file of a bad row, quoted for a shell; None: it is on no disk of this machine, or compressed."""
    path = _path_of(error)
    is_plain = path.endswith((".jsonl", ".ndjson", ".txt")) and "://" not in path
    return shlex.quote(path) if is_plain else None


def _path_of(error: DataError) -> str:
    """Give the file of a bad row: errors say `FILE, row N`."""
    path, _, _ = str(error.where).partition(", row ")
    return path
