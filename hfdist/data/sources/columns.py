"""Which columns of a row hold what is read: `data.sources.NAME.text` and `columns`, and guesses for messages."""

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
"""Names that published datasets have for the columns of ours."""


class Kind(Enum):
    """What the values of a column are, as far as a message needs to know it."""

    text = "text"
    turns = "turns"
    """Lists of objects, as messages are."""
    flag = "flag"
    """True or false, or 1 or 0."""
    other = "other"


def kinds_of(rows: Iterable[Mapping[str, object]]) -> dict[str, Kind]:
    """Give the columns of some rows, and what all their values are."""
    found: dict[str, set[Kind]] = {}
    for row in rows:
        for name, value in row.items():
            found.setdefault(name, set()).update(() if value is None else (_kind_of(value),))
    return {name: next(iter(kinds)) if len(kinds) == 1 else Kind.other for name, kinds in found.items()}


def _kind_of(value: object) -> Kind:
    if isinstance(value, str):
        return Kind.text
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return Kind.turns
    return Kind.flag if isinstance(value, (bool, int)) and value in (0, 1) else Kind.other


def may_hold(name: str, kind: Kind) -> bool:
    """Whether values of this kind may be what a format has in the column `name`."""
    return kind is Kind.flag if name == "label" else kind in (Kind.text, Kind.turns)


@dataclass(frozen=True)
class Column:
    """Where a value stands: at the first of `paths`, such as `answer` or `meta.answer`, that a row has."""

    paths: tuple[str, ...]

    @classmethod
    def of(cls, value: str | Iterable[str]) -> Column:
        """Take a path, or a list of them, as a config has them."""
        return cls((value,) if isinstance(value, str) else tuple(value))

    def __str__(self) -> str:
        """Name the paths, for a message."""
        return " or ".join(map(repr, self.paths))

    def places(self, present: Iterable[str]) -> list[tuple[str, ...]]:
        """Give each path that may be there: a column of the file, and the names within it."""
        names = set(present)
        found = [(path,) if path in names else tuple(path.split(".")) for path in self.paths]
        return [place for place in found if place[0] in names]

    def value(self, row: Mapping[str, object]) -> object:
        """Give the value; None: the row has none."""
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


def guess_columns(needed: Sequence[str], optional: Sequence[str], kinds: Mapping[str, Kind]) -> dict[str, str] | None:
    """Give the columns of a file that probably hold those of a format; None: not all that it needs have one.

    `kinds` are its columns, and what their values are.
    """
    by_name = {name.lower(): name for name in kinds}
    found: dict[str, str] = {}
    for name in (*needed, *optional):
        likely = (by_name[other] for other in (name, *GUESSES.get(name, ())) if other in by_name)
        taken = next(
            (column for column in likely if column not in found.values() and may_hold(name, kinds[column])), None
        )
        if taken is not None:
            found[name] = taken
        elif name in needed:
            return None
    return {name: column for name, column in found.items() if name != column}
