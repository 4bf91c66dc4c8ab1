"""What is not as planned: how often, and the first of it by name."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from hfdist.data.documents.corpus import Corpus
from hfdist.errors import printable

Integers = NDArray[np.int64]

_MOST_NAMES = 20


class Discrepancy(Enum):
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


class Discrepancies:
    """What is not as planned, by kind: how often, and the first of them by name."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self.counts: dict[Discrepancy, int] = {}
        self.names: dict[Discrepancy, list[str]] = {}
        """The first `_MOST_NAMES` of each kind."""

    def add(self, kind: Discrepancy, names: Iterable[str], count: int) -> None:
        """Count `count` more of a kind; reads only as many names as are shown."""
        if count == 0:
            return
        self.counts[kind] = self.counts.get(kind, 0) + count
        known = self.names.setdefault(kind, [])
        known += [name for name, _ in zip(names, range(_MOST_NAMES - len(known)), strict=False)]

    def add_documents(
        self, kind: Discrepancy, documents: Integers, where: str, sequences: Integers | None = None
    ) -> None:
        """Count documents; `sequences` are the numbers of those in which they stand."""
        found = [None] * len(documents) if sequences is None else sequences.tolist()
        names = (
            f"{self._name(document)}{where}{'' if sequence is None else f', sequence {sequence}'}"
            for document, sequence in zip(documents.tolist(), found, strict=True)
        )
        self.add(kind, names, len(documents))

    def _name(self, document: int) -> str:
        if 0 <= document < self._corpus.num_documents:
            return printable(str(self._corpus.origin(document)))
        return f"document {document} (of {self._corpus.num_documents})"

    def __str__(self) -> str:
        """A paragraph for each kind; empty if there are none."""
        lines = []
        for kind, count in self.counts.items():
            names = self.names[kind]
            lines += [f"{kind.value}: {count:,}", *(f"  {name}" for name in names)]
            if count > len(names):
                lines.append(f"  ... and {count - len(names):,} more")
        return "\n".join(lines)
