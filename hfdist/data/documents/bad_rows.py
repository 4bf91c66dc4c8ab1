"""What to do about a row that cannot be read: leave it out, or, where all rows are so, write them in another way."""

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
"""Rows of a shard that are read to know whether all are bad."""


def find_all_bad(shard: Shard) -> DataError | None:
    """Give the error of the first row, with a hint, if none of the first rows can be read."""
    # All are of one run, the first that has rows.
    num_rows = 0 if holds_tokens(shard) else min(next(filter(None, shard.runs), 0), _MOST_TRIED)
    rows = list(shard.read(range(num_rows))) if num_rows else []
    bad = [row for row in rows if isinstance(row, BadRow)]
    if not bad or len(bad) < len(rows):
        return None
    error = copy.copy(bad[0].error)
    error.what += f" (none of the first {len(bad)} rows can be read)" if len(bad) > 1 else ""
    error.hint = _join(error.hint, _in_utf8(error) or _as_rows(error))
    return error


def find_rows_in_text(shard: Shard) -> DataError | None:
    """Give an error, if a text file, which is one document, holds rows of JSON."""
    if not shard.name.endswith(".txt") or not shard.runs:
        return None
    (text,) = shard.read([0])
    if not isinstance(text, str) or not text.startswith('{"'):
        return None
    what, hint = "a .txt file is one document, and this one holds rows of JSON", "the same file as NAME.jsonl"
    return DataError(what, where=shard.name, found=text[:80], hint=hint)


def with_way_out(error: DataError, shard: Shard, origin: str, *, is_alone: bool) -> DataError:
    """Give the error of a row with what to do.

    Args:
        error: of the row.
        shard: that holds it.
        origin: of the row, as `data.quarantine` has it.
        is_alone: whether there is no other shard: without its rows, nothing would be left.
    """
    all_bad = find_all_bad(shard)
    if all_bad is not None and is_alone:
        return all_bad
    # A copy: the rows of a damaged file share one.
    error = copy.copy(error)
    way_out = f"data.on_bad_rows=skip, or {quarantine([origin])}"
    error.hint = _join(error.hint, _in_utf8(error) or (None if all_bad is None else _as_rows(error)), way_out)
    return error


def quarantine(origins: Iterable[str]) -> str:
    """Write the override that takes rows out, for a shell."""
    return in_shell("data.quarantine", list(origins))


def _join(*hints: str | None) -> str | None:
    return ", or ".join(hint for hint in hints if hint is not None) or None


def _in_utf8(error: DataError) -> str | None:
    if not error.what.startswith("not UTF-8"):
        return None
    file = _file_of(error)
    if file is None:
        return "text in UTF-8"
    encoding = "UTF-16" if _begins_as_utf16(str(error.where).partition(", row ")[0]) else "ISO-8859-1"
    return f"iconv -f {encoding} -t UTF-8 {file} > NEW, if that is its encoding"


def _begins_as_utf16(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    except OSError:
        return False


def _as_rows(error: DataError) -> str | None:
    """Say what makes rows of JSON of a file that has none."""
    if not error.what.startswith(("not JSON", "a line is not a JSON object")):
        return None
    file, found, words = _file_of(error), str(error.found).strip(), "rows as JSON objects, a line each"
    if found.startswith(("{'", "['")):
        return "rows as json.dumps writes them, since JSON has double quotes"
    kind = ".json" if found.startswith("[") else ".csv" if "," in found and "{" not in found else None
    if file is None or (kind is None and found != "{"):
        return words
    command = "jq -c ." if kind is None else command_for(kind)
    return f"{words}: {command} < {file} > NEW.jsonl"


def _file_of(error: DataError) -> str | None:
    """Give the file for a shell; None: a shell does not find it, or it is packed."""
    file = str(error.where).partition(", row ")[0]
    is_plain = file.endswith((".jsonl", ".ndjson", ".txt")) and "://" not in file
    return shlex.quote(file) if is_plain else None
