"""Datasets that the `datasets` library opens: a Hub id, a folder of data files, or a folder that it saved."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
from huggingface_hub.errors import LocalEntryNotFoundError

from hfdist.config.data import RowFormat, SourceConfig
from hfdist.data.sources.base import ContentError, first_line
from hfdist.data.sources.dataset import DatasetShard
from hfdist.data.sources.rows import RowReader
from hfdist.errors import ConfigError, DataError


def open_hub(
    key: str, config: SourceConfig, default: RowFormat = RowFormat.text, *, cache_dir: Path | None = None
) -> DatasetShard:
    """Open one split.

    Args:
        key: of its path in the config, to name in messages.
        config: of the source.
        default: format of its rows where the source names none.
        cache_dir: as of `DatasetShard`.

    Raises:
        ConfigError: no such dataset or split.
        ContentError: it lacks the columns.
        DataError: the Hub does not answer.
    """
    assert config.path is not None  # checked with the config
    folder = Path(config.path).expanduser()
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            dataset = _saved(folder, config)
        else:
            dataset = datasets.load_dataset(config.path, config.subset, split=config.split, revision=config.revision)
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
    rows = RowReader.of(config, default, key.removesuffix(".path"))
    return DatasetShard(f"{config.path}/{version}", dataset, rows, cache_dir)


def _is_out_of_reach(error: BaseException | None) -> bool:
    """Whether a question to the Hub without an answer is behind it: `datasets` calls that "not found" in the end."""
    while error is not None:
        if isinstance(error, (LocalEntryNotFoundError, ConnectionError, TimeoutError)):
            return True
        # Also where it was raised "from None".
        error = error.__cause__ or error.__context__
    return False


def _saved(folder: Path, config: SourceConfig) -> datasets.Dataset:
    """Open what `save_to_disk` wrote: a dataset, or several by the names of their splits."""
    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_bytes())["splits"]
        if config.split not in splits:
            raise ValueError(f"there is no split {config.split!r}, but {', '.join(splits)}")
        folder = folder / config.split
    for entry in json.loads((folder / "state.json").read_bytes())["_data_files"]:
        if Path(entry["filename"]).name != entry["filename"]:
            raise ContentError("a saved dataset names a file outside its folder", where=str(folder), found=entry)
    return datasets.Dataset.load_from_disk(str(folder), keep_in_memory=False)
