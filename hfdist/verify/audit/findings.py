"""What is not as planned, collected by kind: how often, and the first of them by name."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hfdist.data.documents.corpus import Corpus
from hfdist.errors import printable

MOST_NAMES = 20


class Kind(Enum):
    """What can be wrong; the first five are of documents."""

    unplanned = "planned by the order too often or not at all"
    never = "seen too seldom"
    in_part = "seen in part only"
    again = "seen too often"
    misplaced = "seen in the wrong place"
    unreadable = "records that no run writes"
    numbering = "sequences missing or out of turn"
    source = "sequences of a source whose turn it was not"
    cursor = "not as the checkpoint counts"
    digest = "records that are not those which the checkpoint has digested"


class Spots(NamedTuple):
    """Documents of a lane that are not as planned."""

    kind: Kind
    documents: NDArray[np.int64]
    sequences: NDArray[np.int64] | None = None
    """In which they stand; None: in none."""


class Findings:
    """Collects them.

    Args:
        corpus: to name rows.
    """

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self.counts: dict[Kind, int] = {}
        self.names: dict[Kind, list[str]] = {}
        """The first `MOST_NAMES` of each kind."""

    def add(self, kind: Kind, names: Iterable[str], count: int) -> None:
        """Take `count` of a kind; only as many names as are shown are looked at."""
        if count == 0:
            return
        self.counts[kind] = self.counts.get(kind, 0) + count
        known = self.names.setdefault(kind, [])
        known += [name for name, _ in zip(names, range(MOST_NAMES - len(known)), strict=False)]

    def add_documents(self, spots: Spots, lane: int | None = None) -> None:
        """Take documents of a lane."""
        place = "" if lane is None else f", lane {lane}"

        def names() -> Iterable[str]:
            for index, document in enumerate(spots.documents.tolist()):
                where = place if spots.sequences is None else f"{place}, sequence {int(spots.sequences[index])}"
                yield f"{self.name(document)}{where}"

        self.add(spots.kind, names(), len(spots.documents))

    def name(self, document: int) -> str:
        """SOURCE:FILE:ROW, also of a number that no document has."""
        if 0 <= document < self._corpus.num_documents:
            return printable(str(self._corpus.origin(document)))
        return f"document {document} (of {self._corpus.num_documents})"

    def __str__(self) -> str:
        """A paragraph for each kind; nothing: an empty text."""
        lines = []
        for kind, count in self.counts.items():
            names = self.names[kind]
            lines += [f"{kind.value}: {count:,}", *(f"  {name}" for name in names)]
            if count > len(names):
                lines.append(f"  ... and {count - len(names):,} more")
        return "\n".join(lines)
