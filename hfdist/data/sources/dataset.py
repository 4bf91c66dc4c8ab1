"""A dataset of the `datasets` library as one shard: given from Python, or opened by `hub.py`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from datasets import Dataset

from hfdist.data.cache.files import digest_of
from hfdist.data.sources.base import BadRow, damage, rows_held_at_once
from hfdist.data.sources.columns import check_schema, hash_table, one_array, texts_at
from hfdist.data.sources.rows import RowReader
from hfdist.data.storage.contents import MOST_BYTES, Contents, digests_of, kept, part_rows
from hfdist.data.storage.localfile import LocalFile

_SAMPLED_ROWS = 64


class DatasetShard:
    """The rows of a dataset, in memory or memory-mapped."""

    def __init__(self, name: str, dataset: Dataset, rows: RowReader, cache_dir: Path | None = None) -> None:
        """Check the columns.

        Args:
            name: of the shard, and of the place in messages.
            dataset: of known length, not a stream.
            rows: what is read of it.
            cache_dir: of this machine's caches; None: `contents` are hashed each time.

        Raises:
            ContentError: there are no such columns, or the one of plain text holds no text.
        """
        columns = check_schema(dataset.features.arrow_schema, rows, where=name)
        self.name = name
        self.runs: Sequence[int] = (len(dataset),)
        # The other columns may hold images or audio, which would be decoded with each row.
        self._rows = dataset.select_columns(columns).with_format("arrow")
        self._reader, self.gives_examples = rows, rows.gives_examples
        sample = self.read(range(0, len(dataset), max(1, len(dataset) // _SAMPLED_ROWS)))
        texts = [None if isinstance(text, BadRow) else text for text in sample]
        self.rows_at_once = rows_held_at_once(sum(len(text or "") for text in texts), len(texts))
        # The library's own fingerprint holds times of files, which differ between machines, so that it is for the
        # caches only. It has no public name.
        identity = json.dumps([rows.key, len(dataset), texts])
        self.identity = hashlib.blake2b(identity.encode(), digest_size=12).hexdigest()
        self.contents = self._read_contents(dataset, cache_dir) if self._rows.data.nbytes <= MOST_BYTES else None
        self.place = None if self.contents is not None else (name, dataset._fingerprint)
        self.local_identity = json.dumps([self.identity, dataset._fingerprint, *digests_of(self.contents)])

    def rows_of_part(self, part: int) -> range:
        """Tell its rows."""
        size = part_rows(self.runs[0])
        return range(part * size, min((part + 1) * size, self.runs[0]))

    def _read_contents(self, dataset: Dataset, cache_dir: Path | None) -> Contents:
        paths = [Path(file["filename"]) for file in dataset.cache_files]
        if cache_dir is None or not paths:
            return self._hash_parts()
        # The library's fingerprint tells what was done to the rows of these files, but not whether they were edited.
        files = [LocalFile(path, path.name) for path in paths]
        key = digest_of([self.identity, dataset._fingerprint, *(file.key for file in files)])
        return kept(key, cache_dir, self._hash_parts, changed_ns=max(file.changed_ns for file in files))

    def _hash_parts(self) -> Contents:
        size = part_rows(self.runs[0])
        parts = (self._rows[start : start + size] for start in range(0, self.runs[0], size))
        return np.array([hash_table(part) for part in parts], dtype=np.uint64)

    def read(self, rows: Sequence[int]) -> list[str | BadRow]:
        """Give the texts of rows."""
        if not rows:
            return []
        try:
            (batch,) = self._rows[list(rows)].combine_chunks().to_batches()
        except (pa.ArrowException, OSError) as error:
            return [BadRow(damage("the dataset is damaged", error, where=self.name))] * len(rows)
        return list(texts_at(one_array(batch, self._reader), range(len(rows)), rows, self._reader, where=self.name))
