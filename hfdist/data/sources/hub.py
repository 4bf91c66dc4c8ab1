"""A dataset that the `datasets` library opens: a Hub id or a folder, memory-mapped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import datasets

from hfdist.config.data import SourceConfig
from hfdist.data.sources.base import check_column, check_text
from hfdist.errors import ConfigError, DataError

_SAMPLED_ROWS = 64


class HubShard:
    """The rows of one split."""

    def __init__(self, name: str, config: SourceConfig) -> None:
        assert config.path is not None  # checked with the config
        key = f"data.sources.{name}"
        try:
            self._rows = datasets.load_dataset(config.path, config.subset, split=config.split, revision=config.revision)
        # RuntimeError: a dataset that is a script, which the library no longer runs.
        except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            raise ConfigError(
                f"the dataset cannot be opened: {(str(error) or type(error).__name__).splitlines()[0]}",
                where=f"{key}.path",
                found=config.path,
                hint="check path, subset and split; for a gated one, `hf auth login`",
            ) from error
        self._where = f"{config.path}, split {config.split}"
        check_column(config.text, self._rows.column_names, where=self._where)
        kind = self._rows.features[config.text]
        if getattr(kind, "dtype", None) not in ("string", "large_string"):
            raise DataError("the text column holds no text", where=f"{self._where}, column {config.text}", found=kind)
        # The other columns may hold images or audio, which would be decoded with each row.
        self._rows = self._rows.select_columns([config.text])
        self._column = config.text
        self.name = f"{config.path}/{config.subset}/{config.split}@{config.revision}"
        self.runs: Sequence[int] = (len(self._rows),)
        self.rows_at_once = 1
        self.identity = self._sampled_identity()

    def _sampled_identity(self) -> str:
        """Hash of some rows: the library's own fingerprint holds times of files, which differ between machines."""
        step = max(1, len(self._rows) // _SAMPLED_ROWS)
        sample = self.read(range(0, len(self._rows), step))
        return hashlib.blake2b(json.dumps([self._column, sample]).encode(), digest_size=12).hexdigest()

    def read(self, rows: Sequence[int]) -> list[str]:
        """Give the texts of rows."""
        return [check_text(self._rows[row][self._column], where=f"{self._where}, row {row}") for row in rows]
