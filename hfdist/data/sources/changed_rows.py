"""Which rows of a shard lie in parts whose hashes differ, in the words of a message."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from hfdist.data.sources.base import Shard
from hfdist.data.storage.identity import Contents
from hfdist.units import list_first

_SHOWN_SPANS = 4


def changed_rows(shard: Shard, before: Contents | None, after: Contents | None) -> str:
    """Give ", row 3" or ", rows 5 to 9, 12"; an empty text where the rows are not known."""
    if before is None or after is None or len(before) != len(after):
        return ""
    found = [shard.rows_of_part(part) for part in np.flatnonzero(before != after).tolist()]
    known = [rows for rows in found if rows is not None]
    if len(known) < len(found):
        return ""
    spans = _merged(known)
    shown = [str(rows.start) if len(rows) == 1 else f"{rows.start} to {rows.stop - 1}" for rows in spans]
    listed = list_first(shown, _SHOWN_SPANS)
    unit = "row" if len(spans) == 1 and len(spans[0]) == 1 else "rows"
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
