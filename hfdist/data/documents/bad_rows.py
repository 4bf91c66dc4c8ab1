"""What to do about a row that cannot be read: leave it out, or, where all rows are so, write them in another way."""

from __future__ import annotations

import copy
import shlex

from hfdist.data.sources.base import BadRow, Shard
from hfdist.data.storage.conversion import command_for
from hfdist.errors import DataError

_MOST_TRIED = 16
"""Rows of a shard that are read to know whether all are bad."""


def find_all_bad(shard: Shard) -> DataError | None:
    """Give the error of the first row, with a hint, if none of the first rows can be read."""
    num_rows = min(shard.runs[0], _MOST_TRIED) if shard.runs and not hasattr(shard, "token_columns") else 0
    rows = list(shard.read(range(num_rows)))
    bad = [row for row in rows if isinstance(row, BadRow)]
    if not bad or len(bad) < len(rows):
        return None
    error = copy.copy(bad[0].error)
    error.what += f" (none of the first {len(bad)} rows can be read)" if len(bad) > 1 else ""
    error.hint = _join(error.hint, _in_utf8(error) or _as_rows(error))
    return error


def with_way_out(error: DataError, shard: Shard, origin: str) -> DataError:
    """Give the error of a row with what to do; `origin` is the row as `data.quarantine` has it."""
    all_bad = find_all_bad(shard)
    if all_bad is not None:
        return all_bad
    # A copy: the rows of a damaged file share one.
    error = copy.copy(error)
    error.hint = _join(error.hint, _in_utf8(error), f"data.on_bad_rows=skip, or 'data.quarantine=[\"{origin}\"]'")
    return error


def _join(*hints: str | None) -> str | None:
    return ", or ".join(hint for hint in hints if hint is not None) or None


def _in_utf8(error: DataError) -> str | None:
    is_other = error.what.startswith("not UTF-8")
    return f"iconv -f ISO-8859-1 -t UTF-8 {_file_of(error)} > NEW, if that is its encoding" if is_other else None


def _as_rows(error: DataError) -> str | None:
    """Say what makes rows of JSON of a file that has none."""
    if not error.what.startswith(("not JSON", "a line is not a JSON object")):
        return None
    file, found = _file_of(error), str(error.found).strip()
    if found.startswith(("{'", "['")):
        return "rows as json.dumps writes them, since JSON has double quotes"
    if found == "{":
        return f"jq -c . {file} > NEW.jsonl, which writes each row on one line"
    kind = ".json" if found.startswith("[") else ".csv" if "," in found and "{" not in found else None
    return "rows as JSON objects, a line each" if kind is None else f"{command_for(kind)} < {file} > NEW.jsonl"


def _file_of(error: DataError) -> str:
    return shlex.quote(str(error.where).partition(", row ")[0])
