"""The report: one table for each path, every figure also as a multiple of hfdist's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.data.rounds import Failure, Figures, Row
from benchmarks.table import markdown

_COLUMNS: list[tuple[str, Callable[[Figures], float], int]] = [
    ("Mtokens per CPU-second", lambda figures: figures.tokens_per_cpu_second / 1e6, 2),
    ("Mtokens per second", lambda figures: figures.tokens_per_second / 1e6, 2),
    ("first batch s", lambda figures: figures.first_seconds, 2),
    ("with imports s", lambda figures: figures.first_with_imports_seconds, 2),
    ("resume at 90 % s", lambda figures: figures.resume_seconds, 2),
    ("peak MiB", lambda figures: figures.peak_bytes / 2**20, 0),
]


def tables(rows: Sequence[Row]) -> str:
    """Both paths. The others of a table are divided by its first row."""
    parts = []
    for tokenized, title in ((False, "Text, tokenized on the way"), (True, "Tokenized beforehand")):
        own = [row for row in rows if row.contender.tokenized == tokenized]
        if own:
            parts.append(f"### {title}\n\n{_table(own)}")
    return "\n\n".join(parts)


def _table(rows: Sequence[Row]) -> str:
    base = rows[0].result
    header = ["library", "reads", "resumes by", *(title for title, _, _ in _COLUMNS), "same batches after a resume"]
    return markdown(header, [_line(row, base) for row in rows])


def _line(row: Row, base: Figures | Failure) -> list[str]:
    contender, result = row
    names = [contender.library, contender.variant, contender.resumes_by]
    if isinstance(result, Failure):
        return [*names, result.reason.replace("|", "/"), *["-"] * len(_COLUMNS)]
    cells = []
    for _, value, digits in _COLUMNS:
        ratio = f" ({value(result) / value(base):.2f}x)" if isinstance(base, Figures) else ""
        cells.append(f"{value(result):.{digits}f}{ratio}")
    return [*names, *cells, "yes" if result.resumes_exactly else "no"]
