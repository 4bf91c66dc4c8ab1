"""Small real corpora on disk, and the settings to read them."""

from __future__ import annotations

import gzip
import json
import sysconfig
from functools import cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from pyarrow import ipc

from hfdist.config.data import BadRows, DataConfig, SourceConfig, SourceKind
from hfdist.data.sources.base import BadRow, Shard
from hfdist.data.sources.find import find_shards
from hfdist.models.tokenizer import train_bpe


@cache
def texts() -> tuple[str, ...]:
    """Real documents of uneven length: modules of the standard library, cut short."""
    root = Path(sysconfig.get_path("stdlib"))
    return tuple(
        path.read_text(encoding="utf-8")[: 200 + 60 * n] for n, path in enumerate(sorted(root.glob("*.py"))[:90])
    )


@cache
def tokenizer():
    """A byte-level BPE of those documents."""
    return train_bpe(texts(), 512)


def jsonl_bytes() -> bytes:
    return "".join(json.dumps({"text": text, "n": 1}, ensure_ascii=False) + "\n" for text in texts()).encode()


PACKERS = {".jsonl": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}


def write_rows(rows: pa.Table | list[dict], path: Path, most_rows: int | None = None, **options) -> Path:
    """Write a file of the kind that its suffix names, in row groups or record batches of `most_rows`."""
    if path.suffix in PACKERS:
        rows = rows.to_pylist() if isinstance(rows, pa.Table) else rows
        path.write_bytes(PACKERS[path.suffix]("".join(json.dumps(row) + "\n" for row in rows).encode()))
        return path
    table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=most_rows, **options)
    else:
        # A stream, as `datasets` writes it, or a file with a footer.
        with (ipc.new_stream if path.suffix == ".arrow" else ipc.new_file)(path, table.schema, **options) as writer:
            writer.write_table(table, max_chunksize=most_rows)
    return path


def table_of_texts(start: int = 0, stop: int | None = None) -> pa.Table:
    rows = texts()[start:stop]
    return pa.table({"id": list(range(len(rows))), "text": list(rows)})


def write_txt(folder: Path) -> str:
    for number, text in enumerate(texts()):
        (folder / f"{number:03d}.txt").write_text(text, encoding="utf-8")
    return str(folder)


def write_parquet(folder: Path) -> str:
    """Two files with row groups of uneven size."""
    write_rows(table_of_texts(0, 50), folder / "part-0.parquet", 17)
    write_rows(table_of_texts(50), folder / "part-1.parquet", 17)
    return str(folder / "*.parquet")


def write_feather(folder: Path) -> str:
    options = ipc.IpcWriteOptions(compression="zstd")
    return str(write_rows(table_of_texts(), folder / "rows.feather", 17, options=options))


WRITERS = {
    "txt": write_txt,
    "parquet": write_parquet,
    "feather": write_feather,
    **{
        kind: lambda folder, kind=kind: str(write_rows(table_of_texts(), folder / f"rows.{kind}", 17))
        for kind in ("arrow", "jsonl", "jsonl.gz", "jsonl.zst")
    },
}
"""Each gives the path of a source."""


def files_config(path: str, cache_dir: Path, **settings) -> DataConfig:
    """Read `path` with short sequences and few lanes."""
    defaults = {"sequence_length": 32, "lanes": 12, "eval_fraction": 0.1, "eval_sequences": 8, "workers": 0}
    return DataConfig(
        sources={"files": SourceConfig(kind=SourceKind.files, path=path)},
        cache_dir=str(cache_dir),
        **{**defaults, **settings},
    )


def open_shards(path: str, cache_dir: Path, **settings) -> list[Shard]:
    """Open files as a run does."""
    config = files_config(path, cache_dir, **{**settings, "on_bad_rows": BadRows(settings.get("on_bad_rows", "error"))})
    return list(find_shards("files", config, cache_dir))


def read_all(shards: list[Shard]) -> list[str | BadRow]:
    """Every row, in the chunks that a lane would ask for."""
    texts = []
    for shard in shards:
        first = 0
        for run in shard.runs:
            for start in range(first, first + run, shard.rows_at_once):
                texts += shard.read(range(start, min(start + shard.rows_at_once, first + run)))
            first += run
    return texts
