"""Who takes part: what a contender must offer, and the table of them. A new one is one class and its rows here."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from filelock import FileLock
from torch import Tensor

from benchmarks.data.work import Work


class Loader(Protocol):
    """A way to read the corpus, with one process that reads ahead."""

    def prepare(self, work: Work) -> None:
        """Write the format that it reads best, if it is not there: untimed, beside those of other modules."""

    def reset(self, work: Work) -> None:
        """Take away what an earlier run has left, and load what any training has. Runs before each, untimed."""

    def batches(self, work: Work, state: Any) -> Iterator[Tensor]:
        """Give batches of an epoch, int64, shape [BATCH_SIZE, SEQUENCE_LENGTH].

        Args:
            work: the corpus.
            state: None for the beginning, or what `state` gave: go on after it.
        """

    def state(self) -> Any:
        """Give what is needed to go on after the batch that was given last, as JSON."""


@dataclass(frozen=True)
class Contender:
    """One row of a table. Classes are named, not imported: each process loads those of its own contender only."""

    library: str
    variant: str
    resumes_by: str
    tokenized: bool
    loader: str
    """MODULE:CLASS, in this package."""
    options: dict[str, Any] = field(default_factory=dict)
    quick: bool = False
    """Whether the quick mode has it."""
    only_resumes: bool = False
    """Whether only `benchmarks.resume` has it."""
    needs_peers: bool = False
    """Whether it needs packages of `benchmarks/peers/data.txt`."""

    def load(self) -> Loader:
        """Import the class and make one.

        Raises:
            ImportError: the peer is not installed.
        """
        return load(self.loader, self.options)


def load(name: str, options: Mapping[str, Any]) -> Loader:
    """Import MODULE:CLASS of this package and make one.

    Raises:
        ImportError: the peer is not installed.
    """
    module, class_name = name.split(":")
    loader: Loader = getattr(importlib.import_module(f"benchmarks.data.{module}"), class_name)(**options)
    return loader


@contextmanager
def alone(folder: Path, loader: str) -> Iterator[None]:
    """Wait for other processes that prepare for a loader of the same module, as these share what they write."""
    with FileLock(folder / f"{loader.split(':')[0]}.lock"):
        yield


_REPLAYS, _STATEFUL = {"stateful": False}, {"stateful": True}

CONTENDERS = (
    Contender("hfdist", "cold token cache", "cursor", False, "ours:Text", {"warm": False}, quick=True),
    Contender("hfdist", "warm token cache", "cursor", False, "ours:Text", {"warm": True}),
    Contender("datasets", "shuffle buffer", "replay, as Trainer", False, "hf_datasets:Text", _REPLAYS),
    Contender("hfdist", "token files", "cursor", True, "ours:Tokens", quick=True),
    Contender("datasets", "shuffle buffer", "replay, as Trainer", True, "hf_datasets:Tokens", _REPLAYS, quick=True),
    Contender("datasets", "shuffle buffer", "state_dict", True, "hf_datasets:Tokens", _STATEFUL, only_resumes=True,
              needs_peers=True),
    Contender("mosaicml-streaming", "MDS, shuffled", "state_dict", True, "mosaic:Tokens", needs_peers=True),
    Contender("litdata", "TokensLoader, shuffled", "state_dict", True, "litdata_tokens:Tokens", needs_peers=True),
)  # fmt: skip
"""The first of each path is what the others are compared with."""
