"""Corpora of more and more small files, and what the start of a rank costs with an index of them and without."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.growth.training import heap_bytes
from hfdist.config.data import DataConfig, SourceConfig
from hfdist.data import Corpus, open_corpus
from hfdist.data.index import index_sources
from hfdist.data.order.shuffle import LaneOrder

_ROWS, _NAME = 4, "text"


@dataclass(kw_only=True)
class Costs:
    """Costs of one corpus, in a process of its own."""

    index_cpu_seconds: float
    opened_cpu_seconds: float
    """CPU seconds of a start that opens the files, and finds in its cache what an earlier one left there."""
    indexed_cpu_seconds: float
    """CPU seconds of a start that maps the index."""
    indexed_heap_bytes: int
    """Bytes that are left allocated of that; what is mapped is not among them."""
    index_bytes: int


def write_parquet(folder: Path, number: int) -> None:
    """Write one file of four rows."""
    pq.write_table(pa.table({_NAME: _texts(number)}), folder / f"{number:07d}.parquet")


def write_json_lines(folder: Path, number: int) -> None:
    """Write one file of four rows."""
    (folder / f"{number:07d}.jsonl").write_text("".join(json.dumps({_NAME: text}) + "\n" for text in _texts(number)))


WRITERS: dict[str, Callable[[Path, int], None]] = {"parquet": write_parquet, "JSON lines": write_json_lines}


def measure(folder: Path, kind: str, num_files: int) -> Costs:
    """Write the files, index them, and start both ways."""
    data, index = folder / "data", folder / "index"
    data.mkdir(parents=True)
    for number in range(num_files):
        WRITERS[kind](data, number)
    config = DataConfig(sources={_NAME: SourceConfig(path=str(data))}, workers=0, cache_dir=str(folder / "cache"))
    begin = time.process_time()
    index_sources(config, index)
    index_cpu_seconds = time.process_time() - begin
    opened, opened_cpu_seconds = _start(config)
    source = replace(config.sources[_NAME], index=str(index / _NAME))
    before_bytes = heap_bytes()
    indexed, indexed_cpu_seconds = _start(replace(config, sources={_NAME: source}))
    indexed_heap_bytes = heap_bytes() - before_bytes
    assert (indexed.fingerprint, indexed.inventory.digest) == (opened.fingerprint, opened.inventory.digest)
    return Costs(
        index_cpu_seconds=index_cpu_seconds,
        opened_cpu_seconds=opened_cpu_seconds,
        indexed_cpu_seconds=indexed_cpu_seconds,
        indexed_heap_bytes=indexed_heap_bytes,
        index_bytes=sum(path.stat().st_size for path in (index / _NAME).iterdir()),
    )


def _start(config: DataConfig) -> tuple[Corpus, float]:
    """Open the corpus, and find the first documents of a lane."""
    begin = time.process_time()
    corpus = open_corpus(config)
    LaneOrder(corpus.pools[0].runs, lanes=config.lanes, key=(config.seed, "all")).rest_of_blocks(0, 0, 0, 1)
    return corpus, time.process_time() - begin


def _texts(number: int) -> list[str]:
    return [f"row {row} of file {number}, of some words" for row in range(_ROWS)]
