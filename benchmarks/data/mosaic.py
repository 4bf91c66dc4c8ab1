"""Peer: mosaicml-streaming, MDS shards with one sequence of tokens a sample."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks.data.work import BATCH_SIZE, NUM_WORKERS, SEED, SEQUENCE_LENGTH, Work

# `import streaming` loads its datasets of images, and with them torchvision, which nothing here needs.
sys.modules.setdefault("streaming.vision", ModuleType("streaming.vision"))

from streaming import MDSWriter, StreamingDataLoader, StreamingDataset  # noqa: E402 - after the line above
from streaming.base.util import clean_stale_shared_memory  # noqa: E402 - as well


class Tokens:
    """Shuffled by its default algorithm."""

    def __init__(self) -> None:
        self._loader: Any = None

    def prepare(self, work: Work) -> None:
        """Write the shards."""
        folder = work.folder / f"mds-{SEQUENCE_LENGTH}"
        shutil.rmtree(folder, ignore_errors=True)
        with MDSWriter(out=str(folder), columns={"tokens": f"ndarray:uint16:{SEQUENCE_LENGTH}"}) as writer:
            for sequence in work.sequences():
                writer.write({"tokens": sequence})

    def reset(self, work: Work) -> None:
        """Runs end without its own clean-up, and leave shared memory."""
        clean_stale_shared_memory()

    def batches(self, work: Work, state: Any) -> Iterator[Tensor]:
        """See `Loader`."""
        dataset = StreamingDataset(
            local=str(work.folder / f"mds-{SEQUENCE_LENGTH}"), shuffle=True, shuffle_seed=SEED, batch_size=BATCH_SIZE
        )
        self._loader = StreamingDataLoader(dataset, batch_size=BATCH_SIZE, num_workers=NUM_WORKERS)
        if state is not None:
            self._loader.load_state_dict(state)
        for batch in self._loader:
            yield batch["tokens"].to(torch.int64)

    def state(self) -> Any:
        """The loader's own."""
        return self._loader.state_dict()
