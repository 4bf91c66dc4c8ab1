"""What a source must offer, and the checks that all of them share."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, Protocol

from hfdist.errors import DataError


class Shard(Protocol):
    """A file, or whatever else is read as one."""

    name: str
    """Path relative to the source, or an id."""
    identity: str
    """Changes with what is read from it."""
    runs: Sequence[int]
    """Numbers of rows that are cheap to read together, in order; their sum is the number of rows."""

    rows_at_once: int
    """How many rows of a run to ask for together; 1 where one row costs no more alone."""

    def read(self, rows: Sequence[int]) -> list[str]:
        """Give the texts of some rows, in the order asked for.

        Raises:
            DataError: names the file and the row.
        """


def check_column(column: str, present: Sequence[str], *, where: str) -> None:
    """Check that a table has the text column.

    Raises:
        DataError: lists the columns that it has.
    """
    if column not in present:
        near = difflib.get_close_matches(column, present, n=1, cutoff=0.0)
        raise DataError(
            f"there is no column {column!r}",
            where=where,
            allowed=", ".join(present),
            hint=f"data.sources.NAME.text={near[0]}" if near else None,
        )


def check_text(value: Any, *, where: str) -> str:
    """Give `value` if it is text; half of a surrogate pair, which JSON allows and UTF-8 does not, becomes `?`.

    Raises:
        DataError: null or another type.
    """
    if not isinstance(value, str):
        found = "null" if value is None else f"{type(value).__name__}: {value!r}"
        raise DataError("the text column holds no text", where=where, found=found, allowed="a string")
    return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")
