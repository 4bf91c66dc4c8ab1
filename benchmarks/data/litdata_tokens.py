"""Peer: litdata, optimized chunks of tokens read by its TokensLoader."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import torch
from litdata import StreamingDataLoader, StreamingDataset, TokensLoader, optimize
from torch import Tensor

from benchmarks.data.work import BATCH_SIZE, NUM_WORKERS, SEED, SEQUENCE_LENGTH, Work, load_work

_CHUNK_BYTES = "64MB"


class Tokens:
    """Shuffled."""

    def __init__(self) -> None:
        self._loader: Any = None

    def prepare(self, work: Work) -> None:
        """Write the chunks, which are the same for all lengths."""
        folder = work.folder / "litdata"
        if folder.exists():
            return
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        optimize(
            fn=_documents,
            inputs=[str(work.folder)],
            output_dir=str(part),
            chunk_bytes=_CHUNK_BYTES,
            num_workers=1,
            item_loader=TokensLoader(),
        )
        part.rename(folder)

    def reset(self, work: Work) -> None:
        """Nothing is left by a run."""

    def batches(self, work: Work, state: Any) -> Iterator[Tensor]:
        """See `Loader`."""
        loader = TokensLoader(block_size=SEQUENCE_LENGTH)
        dataset = StreamingDataset(
            str(work.folder / "litdata"), item_loader=loader, shuffle=True, drop_last=True, seed=SEED
        )
        self._loader = StreamingDataLoader(dataset, batch_size=BATCH_SIZE, num_workers=NUM_WORKERS)
        if state is not None:
            self._loader.load_state_dict(state)
        for batch in self._loader:
            yield batch.to(torch.int64)

    def state(self) -> Any:
        """The loader's own."""
        return self._loader.state_dict()


def _documents(folder: str) -> Iterator[Tensor]:
    from pathlib import Path

    for document in load_work(Path(folder)).documents():
        yield torch.from_numpy(document.copy())
