"""Text files: one document each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hfdist.data.files import identify
from hfdist.errors import DataError


class TextShard:
    """A file of UTF-8 text. `errors="replace"` takes undecodable bytes; "strict" refuses them."""

    def __init__(self, path: Path, name: str, *, errors: str = "strict") -> None:
        self.name = name
        self.identity = identify(path, "")
        self.runs: Sequence[int] = (1,)
        self.rows_at_once = 1
        self._path, self._errors = path, errors

    def read(self, rows: Sequence[int]) -> list[str]:
        """Give the whole file, once for each of `rows`."""
        try:
            return [self._path.read_bytes().decode("utf-8", errors=self._errors) for _ in rows]
        except UnicodeDecodeError as error:
            raise DataError(
                "not UTF-8", where=f"{self._path}, byte {error.start}", found=error.object[error.start : error.end]
            ) from error
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror}", where=str(self._path)) from error
