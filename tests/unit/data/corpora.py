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
from pyarrow import feather, ipc

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


def write_txt(folder: Path) -> str:
    for number, text in enumerate(texts()):
        (folder / f"{number:03d}.txt").write_text(text, encoding="utf-8")
    return str(folder)


def write_parquet(folder: Path) -> str:
    # Two files with row groups of uneven size.
    for number, rows in enumerate((texts()[:50], texts()[50:])):
        table = pa.table({"id": list(range(len(rows))), "text": list(rows)})
        pq.write_table(table, folder / f"part-{number}.parquet", row_group_size=17)
    return str(folder / "*.parquet")


def jsonl_bytes() -> bytes:
    return "".join(json.dumps({"text": text, "n": 1}, ensure_ascii=False) + "\n" for text in texts()).encode()


def write_jsonl(folder: Path) -> str:
    (folder / "rows.jsonl").write_bytes(jsonl_bytes())
    return str(folder / "rows.jsonl")


def write_jsonl_gz(folder: Path) -> str:
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(jsonl_bytes()))
    return str(folder)


def write_jsonl_zst(folder: Path) -> str:
    (folder / "rows.jsonl.zst").write_bytes(zstandard.compress(jsonl_bytes()))
    return str(folder)


def write_arrow(folder: Path) -> str:
    """A stream of batches of uneven size, as `datasets` writes it."""
    table = pa.table({"id": list(range(len(texts()))), "text": list(texts())})
    with ipc.new_stream(folder / "rows.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=17)
    return str(folder)


def write_feather(folder: Path) -> str:
    """A file with a footer, compressed."""
    table = pa.table({"id": list(range(len(texts()))), "text": list(texts())})
    feather.write_feather(table, str(folder / "rows.feather"), compression="zstd", chunksize=17)
    return str(folder)


WRITERS = {
    "txt": write_txt,
    "parquet": write_parquet,
    "arrow": write_arrow,
    "feather": write_feather,
    "jsonl": write_jsonl,
    "jsonl.gz": write_jsonl_gz,
    "jsonl.zst": write_jsonl_zst,
}


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
