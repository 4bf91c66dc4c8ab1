"""What the machine itself gives: rows of fixed length in a random order, without documents, positions or labels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from benchmarks.data.work import BATCH_SIZE, SEED, SEQUENCE_LENGTH, Work


class Memmap:
    """Rows of a mapped file of uint16, widened to a batch of int64."""

    def prepare(self, work: Work) -> None:
        """Write the file."""
        np.save(work.folder / f"rows-{SEQUENCE_LENGTH}.npy", work.sequences())

    def reset(self, work: Work) -> None:
        """Nothing is left by a run."""

    def state(self) -> Any:
        """None: it does not resume."""

    def batches(self, work: Work, state: Any) -> Iterator[Tensor]:
        """See `Loader`."""
        rows = np.asarray(np.load(work.folder / f"rows-{SEQUENCE_LENGTH}.npy", mmap_mode="r"))
        order = np.random.default_rng(SEED).permutation(len(rows))
        for start in range(0, len(order) - BATCH_SIZE + 1, BATCH_SIZE):
            yield torch.from_numpy(rows[order[start : start + BATCH_SIZE]].astype(np.int64))


class Arrow(Memmap):
    """Rows of a mapped Arrow file, found without a copy and widened."""

    def prepare(self, work: Work) -> None:
        """Write the file."""
        values = pa.array(work.sequences().reshape(-1))
        column = pa.FixedSizeListArray.from_arrays(values, SEQUENCE_LENGTH)
        table = pa.table({"input_ids": column})
        path = str(work.folder / f"rows-{SEQUENCE_LENGTH}.arrow")
        with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)

    def batches(self, work: Work, state: Any) -> Iterator[Tensor]:
        """See `Loader`."""
        path = str(work.folder / f"rows-{SEQUENCE_LENGTH}.arrow")
        table = pa.ipc.open_file(pa.memory_map(path)).read_all()
        values = table["input_ids"].chunk(0).flatten().to_numpy(zero_copy_only=True).reshape(-1, SEQUENCE_LENGTH)
        order = np.random.default_rng(SEED).permutation(len(values)).tolist()
        for start in range(0, len(order) - BATCH_SIZE + 1, BATCH_SIZE):
            batch = torch.empty((BATCH_SIZE, SEQUENCE_LENGTH), dtype=torch.int64)
            np.stack([values[row] for row in order[start : start + BATCH_SIZE]], out=batch.numpy())
            yield batch
