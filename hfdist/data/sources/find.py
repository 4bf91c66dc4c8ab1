"""From a source's config to its shards, in canonical order, all checked before training."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from hfdist.config.data import SourceConfig, SourceKind
from hfdist.data.sources.base import Shard
from hfdist.data.sources.hub import HubShard
from hfdist.data.sources.jsonlines import JsonLinesShard
from hfdist.data.sources.parquet import ParquetShard
from hfdist.data.sources.text import TextShard
from hfdist.errors import ConfigError

SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".txt")
# Not part of the library itself, or not there on every installation.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}


def find_shards(name: str, config: SourceConfig, cache_dir: Path) -> Sequence[Shard]:
    """Open the shards of one source.

    Raises:
        ConfigError: the config names something that does not exist.
        DataError: a file that is damaged or lacks the text column.
    """
    match config.kind:
        case SourceKind.stdlib:
            return _standard_library()
        case SourceKind.hub:
            return [HubShard(name, config)]
        case SourceKind.files:
            return _files(name, config, cache_dir)


def _standard_library() -> list[Shard]:
    """The installed Python standard library's own source: real text on every machine."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = (p for p in root.rglob("*.py") if not _SKIPPED_FOLDERS & set(p.relative_to(root).parts))
    # Some of its tests are deliberately badly encoded.
    return [TextShard(path, path.relative_to(root).as_posix(), errors="replace") for path in sorted(paths)]


def _files(name: str, config: SourceConfig, cache_dir: Path) -> list[Shard]:
    assert config.path is not None  # checked with the config
    key = f"data.sources.{name}.path"
    pattern = Path(config.path).expanduser()
    if pattern.is_dir():
        root, paths = pattern, sorted(p for p in pattern.rglob("*") if _is_data(p, pattern))
        searched = f"{pattern}/**/*{{{','.join(SUFFIXES)}}}"
    else:
        paths = sorted(Path(p) for p in glob.glob(str(pattern), recursive=True) if Path(p).is_file())
        # Names are relative to the part without wildcards, so that a corpus may move.
        root = Path(*takewhile(lambda part: not glob.has_magic(part), pattern.parent.parts))
        searched = str(pattern)
    if not paths:
        raise ConfigError(
            "no file is there",
            where=key,
            found=searched,
            allowed=f"a file, a folder, or a glob (quote it) of {', '.join(SUFFIXES)}",
        )
    return [_open(path, path.relative_to(root).as_posix(), key, config.text, cache_dir) for path in paths]


def _is_data(path: Path, folder: Path) -> bool:
    # Hidden folders hold caches and checkpoints of notebooks; some writers name folders like files.
    hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
    return path.name.endswith(SUFFIXES) and not hidden and path.is_file()


def _open(path: Path, name: str, key: str, column: str, cache_dir: Path) -> Shard:
    if not os.access(path, os.R_OK):
        raise ConfigError("the file cannot be read: permission denied", where=key, found=str(path))
    if path.name.endswith(".parquet"):
        return ParquetShard(path, name, column)
    if path.name.endswith(".txt"):
        return TextShard(path, name)
    if path.name.endswith(SUFFIXES):
        return JsonLinesShard(path, name, column, cache_dir)
    raise ConfigError("a kind of file that cannot be read", where=key, found=str(path), allowed=", ".join(SUFFIXES))
