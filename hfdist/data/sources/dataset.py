"""Datasets of the `datasets` library as shards: given from Python, or opened by a Hub id or from a folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
from datasets import Dataset
from huggingface_hub.errors import LocalEntryNotFoundError

from hfdist.config.data import DataConfig, SourceConfig
from hfdist.config.paths import expand_user
from hfdist.data.cache import digest_of
from hfdist.data.sources.arrow_columns import check_schema, hash_table, make_text, one_array, texts_at
from hfdist.data.sources.base import BadRow, ContentError, FilePlace, damage, rows_held_at_once
from hfdist.data.sources.rows import RowReader
from hfdist.data.storage.files import LocalFile
from hfdist.data.storage.identity import MOST_BYTES, Contents, cached_contents, digests_of, part_rows
from hfdist.errors import ConfigError, DataError, first_line

_SAMPLED_ROWS = 64
"""Rows by which a dataset is identified and the size of its rows is estimated."""


class DatasetShard:
    """The rows of one dataset, which is in memory or memory-mapped, in a single run."""

    def __init__(self, name: str, dataset: Dataset, rows: RowReader, cache_dir: Path | None = None) -> None:
        """Take a dataset of known length; ContentError: it lacks the columns that `rows` reads.

        `name` is the name of the shard, also in messages. Without `cache_dir`, `contents` are hashed each time.
        """
        columns = check_schema(dataset.features.arrow_schema, rows, where=name)
        self.name = name
        self.runs: Sequence[int] = (len(dataset),)
        # The other columns may hold images or audio, which would be decoded with each row.
        self._rows = dataset.select_columns(columns).with_format("arrow")
        self._reader = rows
        self.gives_examples = rows.gives_examples
        sample = self.read(range(0, len(dataset), max(1, len(dataset) // _SAMPLED_ROWS)))
        texts = [None if isinstance(text, BadRow) else text for text in sample]
        self.rows_at_once = rows_held_at_once(sum(len(text or "") for text in texts), len(texts))
        # The library's own fingerprint, which has no public name, holds times of files. They differ between machines,
        # so that the fingerprint is for this machine's caches only.
        self.identity = digest_of([rows.key, len(dataset), texts])
        self.contents = self._read_contents(dataset, cache_dir) if self._rows.data.nbytes <= MOST_BYTES else None
        self.place = None if self.contents is not None else FilePlace(name, dataset._fingerprint)
        self.local_identity = json.dumps([self.identity, dataset._fingerprint, *digests_of(self.contents)])

    def rows_of_part(self, part: int) -> range:
        """Give the rows of a part of `contents`."""
        size = part_rows(self.runs[0])
        return range(part * size, min((part + 1) * size, self.runs[0]))

    def _read_contents(self, dataset: Dataset, cache_dir: Path | None) -> Contents:
        """Give the hashes of the rows, from the cache where the dataset's files are as they were."""
        paths = [Path(file["filename"]) for file in dataset.cache_files]
        if cache_dir is None or not paths:
            return self._hash_parts()
        # The library's fingerprint tells what was done to the rows of these files, but not whether they were edited.
        files = [LocalFile(path, path.name) for path in paths]
        key = digest_of([self.identity, dataset._fingerprint, *(file.key for file in files)])
        return cached_contents(key, cache_dir, self._hash_parts, changed_ns=max(file.changed_ns for file in files))

    def _hash_parts(self) -> Contents:
        """Hash the rows part by part; shape [parts]."""
        size = part_rows(self.runs[0])
        parts = (self._rows[start : start + size] for start in range(0, self.runs[0], size))
        return np.array([hash_table(part) for part in parts], dtype=np.uint64)

    def read(self, rows: Sequence[int]) -> list[str | BadRow]:
        """Give the texts of rows, in the order asked for; of a damaged dataset bad rows."""
        if not rows:
            return []
        try:
            (batch,) = self._rows[list(rows)].combine_chunks().to_batches()
        except (pa.ArrowException, OSError) as error:
            return [BadRow(damage("the dataset is damaged", error, where=self.name))] * len(rows)
        lazy_texts = texts_at(one_array(batch, self._reader), range(len(rows)), rows, self._reader, where=self.name)
        return [make_text(text) for text in lazy_texts]


def open_hub(
    key: str, config: SourceConfig, data: DataConfig | None = None, *, cache_dir: Path | None = None
) -> DatasetShard:
    """Open one split of the dataset that `config` names: on the Hub, or in a folder. `key` is the key of its path.

    Raises:
        ConfigError: no such dataset or split.
        ContentError: the dataset lacks the columns that are read.
        DataError: the Hub does not answer, and the dataset is not on this machine.
    """
    assert config.path is not None  # checked with the config
    folder = expand_user(config.path)
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            dataset = _saved(folder, config)
        else:
            path = str(folder) if folder.is_dir() else config.path
            dataset = datasets.load_dataset(path, config.subset, split=config.split, revision=config.revision)
    # RuntimeError: a dataset that is a script, which the library no longer runs. KeyError, TypeError: a damaged
    # description.
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, datasets.exceptions.DatasetsError) as error:
        if _is_out_of_reach(error):
            raise DataError(
                "the Hub does not answer or is switched off, and the dataset is not in the local cache",
                where=key,
                found=config.path,
                hint="check the network, or load it once with `datasets` on this machine while it is connected",
            ) from error
        raise ConfigError(
            f"the dataset cannot be opened: {first_line(error)}",
            where=key,
            found=config.path,
            hint="check path, subset and split; for a gated one, `hf auth login`",
        ) from error
    version = f"{config.subset}/{config.split}@{config.revision}"
    rows = RowReader.of(config, data or DataConfig(), key.removesuffix(".path"))
    return DatasetShard(f"{config.path}/{version}", dataset, rows, cache_dir)


def _is_out_of_reach(error: BaseException | None) -> bool:
    """Whether the Hub did not answer, which `datasets` itself reports as "not found": one of the causes says it."""
    while error is not None:
        if isinstance(error, (LocalEntryNotFoundError, ConnectionError, TimeoutError)):
            return True
        # The context is there even where the error was raised "from None".
        error = error.__cause__ or error.__context__
    return False


def _saved(folder: Path, config: SourceConfig) -> Dataset:
    """Open a folder that `save_to_disk` wrote: a dataset, or the split that `config` names of several.

    ValueError: there is no such split. ContentError: the dataset names a file outside its folder.
    """
    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_bytes())["splits"]
        if config.split not in splits:
            raise ValueError(f"there is no split {config.split!r}, but {', '.join(splits)}")
        folder = folder / config.split
    for entry in json.loads((folder / "state.json").read_bytes())["_data_files"]:
        if Path(entry["filename"]).name != entry["filename"]:
            raise ContentError("a saved dataset names a file outside its folder", where=str(folder), found=entry)
    return Dataset.load_from_disk(str(folder), keep_in_memory=False)
