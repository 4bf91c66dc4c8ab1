"""Which columns of a row hold what is read: `data.sources.NAME.text` and `columns`, and guesses for messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

GUESSES: Mapping[str, tuple[str, ...]] = {
    "prompt": ("question", "query", "instruction", "problem", "input"),
    "completion": ("answer", "response", "output", "solution", "target"),
    "output": ("response", "answer", "completion"),
    "input": ("context",),
    "chosen": ("accepted", "preferred", "chosen_response", "response_chosen"),
    "rejected": ("dispreferred", "rejected_response", "response_rejected"),
    "label": ("liked", "thumbs_up", "is_good"),
    "messages": ("conversation", "dialogue", "turns", "chat"),
}
"""Names that published datasets have for the columns of ours."""


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


def guess_columns(needed: Sequence[str], optional: Sequence[str], present: Sequence[str]) -> dict[str, str] | None:
    """Give the columns of a file that probably hold those of a format; None: not all that it needs have one."""
    by_name = {name.lower(): name for name in present}
    found: dict[str, str] = {}
    for name in (*needed, *optional):
        likely = (by_name[other] for other in (name, *GUESSES.get(name, ())) if other in by_name)
        taken = next((column for column in likely if column not in found.values()), None)
        if taken is not None:
            found[name] = taken
        elif name in needed:
            return None
    return {name: column for name, column in found.items() if name != column}
