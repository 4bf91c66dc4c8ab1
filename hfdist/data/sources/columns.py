"""Columns of rows: the paths by which a config names one, and guesses of the right one, which messages propose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

GUESSES: Mapping[str, tuple[str, ...]] = {
    "prompt": ("question", "query", "instruction", "problem", "input"),
    "completion": ("answer", "response", "output", "solution", "target"),
    "output": ("response", "answer", "completion"),
    "input": ("context",),
    "chosen": ("accepted", "preferred", "chosen_response", "response_chosen"),
    "rejected": ("dispreferred", "rejected_response", "response_rejected"),
    "label": ("liked", "thumbs_up", "is_good"),
    "query": ("question", "sentence1", "instruction", "title"),
    "positive": ("answer", "document", "passage", "context", "text", "sentence2"),
    "negative": ("hard_negative", "negative_passages"),
    "source": ("document", "article", "text", "dialogue", "input", "question", "src"),
    "target": ("summary", "highlights", "abstract", "output", "answer", "translation", "tgt"),
    "messages": ("conversation", "dialogue", "turns", "chat"),
}
"""Names that published datasets have for each column of our formats, the most likely first."""


class Kind(Enum):
    """Kind of the values of a column, as far as messages need it."""

    text = "text"
    turns = "turns"
    """Lists of objects, as messages are."""
    flag = "flag"
    """Values that are true or false, or 1 or 0."""
    other = "other"


def kinds_of(rows: Iterable[Mapping[str, object]]) -> dict[str, Kind]:
    """Give the columns of some rows, each with the kind of all its values; `other` where they differ."""
    found: dict[str, Kind | None] = {}
    for row in rows:
        for name, value in row.items():
            before = found.get(name)
            if value is None:
                # A null is of any kind.
                found[name] = before
                continue
            kind = _kind_of(value)
            found[name] = kind if before in (None, kind) else Kind.other
    return {name: Kind.other if kind is None else kind for name, kind in found.items()}


def _kind_of(value: object) -> Kind:
    if isinstance(value, str):
        return Kind.text
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return Kind.turns
    if isinstance(value, int) and value in (0, 1):
        return Kind.flag
    return Kind.other


def may_hold(name: str, kind: Kind) -> bool:
    """Whether a format's column `name` may hold values of this kind."""
    if name == "label":
        return kind is Kind.flag
    return kind in (Kind.text, Kind.turns)


@dataclass(frozen=True)
class Column:
    """The place of a value in a row: the first of `paths`, such as `answer` or `meta.answer`, that the row has."""

    paths: tuple[str, ...]

    @classmethod
    def of(cls, value: str | Iterable[str]) -> Column:
        """Make a column of one path, or of several, as a config names them."""
        return cls((value,) if isinstance(value, str) else tuple(value))

    def __str__(self) -> str:
        """Name the paths, for a message."""
        return " or ".join(map(repr, self.paths))

    def places(self, present: Iterable[str]) -> list[tuple[str, ...]]:
        """Give the paths whose column is among those `present`, each as the column and the names within it."""
        names = set(present)
        found: list[tuple[str, ...]] = []
        for path in self.paths:
            column, *fields = path.split(".")
            # A column may have a dot in its own name.
            if path in names:
                found.append((path,))
            elif column in names:
                found.append((column, *fields))
        return found

    def value(self, row: Mapping[str, object]) -> object:
        """Give the value that a row has at the first path with one; None: it has none."""
        for path in self.paths:
            found = row.get(path)
            if found is None:
                found = row
                for name in path.split("."):
                    found = found.get(name) if isinstance(found, Mapping) else None
            if found is not None:
                return found
        return None


TEXT = Column(("text",))
"""The column of plain text that is read where the config names no other."""


def guess_columns(needed: Sequence[str], optional: Sequence[str], kinds: Mapping[str, Kind]) -> dict[str, str] | None:
    """Give the columns of a file that probably hold columns of a format, by the format's names.

    `needed` and `optional` are the format's columns, and `kinds` the file's, with the kinds of their values. Columns
    that have the format's name already are left out. None: no column of the file may hold one that is needed.
    """
    by_name = {name.lower(): name for name in kinds}
    found: dict[str, str] = {}
    for name in (*needed, *optional):
        likely = [by_name[other] for other in (name, *GUESSES.get(name, ())) if other in by_name]
        fitting = [column for column in likely if column not in found.values() and may_hold(name, kinds[column])]
        if fitting:
            found[name] = fitting[0]
        elif name in needed:
            return None
    return {name: column for name, column in found.items() if name != column}
