"""Peer: `datasets` streaming, with the map functions of transformers' `run_clm.py`, or over sequences of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from accelerate import skip_first_batches
from datasets import IterableDataset, load_dataset
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import default_data_collator

from benchmarks.data.work import BATCH_SIZE, NUM_WORKERS, SEED, SEQUENCE_LENGTH, TEXT, Work

_NUM_SHARDS = 8


class _Streaming:
    """What both paths share.

    Args:
        stateful: resume by torchdata's StatefulDataLoader, as `datasets` documents; otherwise by reading everything
            again, as the Trainer does.
    """

    def __init__(self, *, stateful: bool) -> None:
        self._num_given = 0
        self._loader: Any = None
        self._make_loader: Any = DataLoader
        if stateful:
            from torchdata.stateful_dataloader import StatefulDataLoader

            self._make_loader = StatefulDataLoader
        self._stateful = stateful

    def reset(self, work: Work) -> None:
        """Nothing is left by a run."""

    def state(self) -> Any:
        """The loader's own, or the number of batches."""
        return self._loader.state_dict() if self._stateful else self._num_given

    def _open(self, files: list[str]) -> IterableDataset:
        dataset = load_dataset("parquet", data_files=files, split="train", streaming=True)
        # As by default.
        return dataset.shuffle(seed=SEED, buffer_size=1000)

    def _read(self, dataset: IterableDataset, state: Any, **options: Any) -> Iterator[Any]:
        self._loader = self._make_loader(dataset, num_workers=NUM_WORKERS, **options)
        batches = self._loader
        if state is not None and self._stateful:
            self._loader.load_state_dict(state)
        elif state is not None:
            self._num_given = state
            batches = skip_first_batches(self._loader, state)
        for batch in batches:
            self._num_given += 1
            yield batch


class Text(_Streaming):
    """Tokenize and group on the way."""

    def prepare(self, work: Work) -> None:
        """It reads the corpus as it is."""

    def batches(self, work: Work, state: Any) -> Iterator[Tensor]:
        """See `Loader`."""
        tokenizer = work.tokenizer
        end = tokenizer.eos_token_id

        def tokenize(rows: dict[str, list[str]]) -> dict[str, Any]:
            ids = tokenizer(rows[TEXT], return_attention_mask=False)["input_ids"]
            return {"input_ids": [[*document, end] for document in ids]}

        dataset = self._open(work.parquet_files).map(tokenize, batched=True, remove_columns=[TEXT])
        # As run_clm.py has it. `with_format("torch")` would make this four times slower.
        options = {"batch_size": BATCH_SIZE, "collate_fn": default_data_collator}
        for batch in self._read(dataset.map(_group, batched=True), state, **options):
            yield batch["input_ids"]


class Tokens(_Streaming):
    """Parquet with one sequence a row."""

    def prepare(self, work: Work) -> None:
        """Write it, in shards."""
        folder = work.folder / f"sequences-{SEQUENCE_LENGTH}"
        if folder.exists():
            return
        part = folder.with_suffix(".part")
        part.mkdir(exist_ok=True)
        for number, rows in enumerate(np.array_split(work.sequences(), _NUM_SHARDS)):
            values = pa.array(rows.astype(np.int32).reshape(-1))
            table = pa.table({"input_ids": pa.FixedSizeListArray.from_arrays(values, SEQUENCE_LENGTH)})
            pq.write_table(table, part / f"{number:05d}.parquet", row_group_size=1024)
        part.rename(folder)

    def batches(self, work: Work, state: Any) -> Iterator[Tensor]:
        """See `Loader`."""
        files = sorted(str(path) for path in (work.folder / f"sequences-{SEQUENCE_LENGTH}").glob("*.parquet"))
        # Batches of Arrow: the fastest of its formats here, twice as fast as torch tensors by row.
        dataset = self._open(files).with_format("arrow").batch(BATCH_SIZE, drop_last_batch=True)
        yield from self._read(dataset, state, batch_size=None, collate_fn=_to_tensor)


class MapStyle(Tokens):
    """The same parquet, opened whole: rows in a random order."""

    def __init__(self) -> None:
        super().__init__(stateful=False)
        self._rows: Any = None

    def batches(self, work: Work, state: Any) -> Iterator[Tensor]:
        """See `Loader`."""
        if self._rows is None:
            files = sorted(str(path) for path in (work.folder / f"sequences-{SEQUENCE_LENGTH}").glob("*.parquet"))
            self._rows = load_dataset("parquet", data_files=files, split="train").with_format("arrow")
        order = np.random.default_rng(SEED).permutation(len(self._rows))
        for start in range(0, len(order) - BATCH_SIZE + 1, BATCH_SIZE):
            yield _to_tensor(self._rows[order[start : start + BATCH_SIZE]])


def _to_tensor(batch: pa.Table) -> Tensor:
    values = batch["input_ids"].combine_chunks()
    while pa.types.is_nested(values.type):
        values = values.flatten()
    return torch.from_numpy(values.to_numpy().reshape(-1, SEQUENCE_LENGTH).astype(np.int64))


def _group(rows: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
    """`group_texts` of run_clm.py: what is left over of a batch of rows is dropped."""
    joined = [token for document in rows["input_ids"] for token in document]
    whole = len(joined) // SEQUENCE_LENGTH * SEQUENCE_LENGTH
    return {"input_ids": [joined[start : start + SEQUENCE_LENGTH] for start in range(0, whole, SEQUENCE_LENGTH)]}
