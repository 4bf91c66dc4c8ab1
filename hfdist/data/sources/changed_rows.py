"""Names for a message the rows of a shard that may have changed: those in parts whose hashes differ."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from hfdist.data.sources.base import Shard
from hfdist.data.storage.identity import Contents
from hfdist.units import list_first

_SHOWN_SPANS = 4


def changed_rows(shard: Shard, before: Contents | None, after: Contents | None) -> str:
    """Give ", row 3" or ", rows 5 to 9, 12" for the end of a message; an empty text where the rows are not known.

    `before` and `after` are the hashes of the shard's parts, then and now.
    """
    if before is None or after is None or len(before) != len(after):
        return ""
    changed: list[range] = []
    for part in np.flatnonzero(before != after).tolist():
        rows = shard.rows_of_part(part)
        if rows is None:
            return ""
        changed.append(rows)
    spans = _merged(changed)
    shown = [str(rows.start) if len(rows) == 1 else f"{rows.start} to {rows.stop - 1}" for rows in spans]
    listed = list_first(shown, _SHOWN_SPANS)
    num_rows = sum(map(len, spans))
    unit = "row" if num_rows == 1 else "rows"
    return f", {unit} {listed}" if listed else ""


def _merged(spans: Iterable[range]) -> list[range]:
    """Join ranges, in order of their starts, that touch or overlap."""
    merged: list[range] = []
    for span in spans:
        if merged and span.start <= merged[-1].stop:
            merged[-1] = range(merged[-1].start, span.stop)
        else:
            merged.append(span)
    return merged
