"""Sums of a ledger by source, for a table."""

from __future__ import annotations

import numpy as np

from hfdist.data.documents.corpus import Corpus
from hfdist.data.order.records import Records, Status

_HEADS = ("source", *(status.name.replace("_", " ") for status in Status), "tokens", "epochs")


class LedgerSums:
    """Sums of a ledger by source: documents by status, tokens, epochs."""

    def __init__(self, corpus: Corpus) -> None:
        self._names = corpus.source_names
        self._rows = np.array([int(corpus.sources[name].runs.rows.sum()) for name in self._names])
        self._ends = np.cumsum(self._rows)
        self._documents = np.zeros((len(self._names), len(Status)), dtype=np.int64)
        self._tokens = np.zeros(len(self._names), dtype=np.int64)
        self.epochs: dict[int, set[int]] = {}
        """Epochs with records, by pool."""

    def add(self, records: Records) -> None:
        """Add the records of a lane. A document counts where it begins."""
        sources = np.searchsorted(self._ends, records["document"], side="right")
        begins = records["first_token"] == 0
        kinds = sources[begins] * len(Status) + records["fate"][begins]
        self._documents += np.bincount(kinds, minlength=self._documents.size).reshape(self._documents.shape)
        tokens = np.bincount(sources, weights=records["num_tokens"], minlength=len(self._names))
        self._tokens += tokens.astype(np.int64)
        for pool in np.unique(records["pool"]).tolist():
            self.epochs.setdefault(pool, set()).update(np.unique(records["epoch"][records["pool"] == pool]).tolist())

    def join(self, other: LedgerSums) -> None:
        """Add the sums of other lanes."""
        self._documents += other._documents
        self._tokens += other._tokens
        for pool, epochs in other.epochs.items():
            self.epochs.setdefault(pool, set()).update(epochs)

    @property
    def tokens(self) -> int:
        """Tokens of all sources."""
        return int(self._tokens.sum())

    def __str__(self) -> str:
        """A table with a line for each source."""
        rows = [_HEADS]
        for number, name in enumerate(self._names):
            counts = self._documents[number]
            epochs = counts.sum() / max(self._rows[number], 1)
            rows.append((name, *(f"{count:,}" for count in counts), f"{self._tokens[number]:,}", f"{epochs:.2f}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)
