"""Corpora of 1, 10 and 100 times a size, as token files and as text, and what a stream over one of them costs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerFast

from benchmarks.growth.training import heap_bytes
from hfdist.config.data import DataConfig, SourceConfig, SourceKind
from hfdist.data import TokenStream, open_corpus
from hfdist.data.order.lane_state import Columns
from hfdist.data.sources.tokenfile import META, TOKENIZER, VERSION, FileRecord, Meta, OriginShard, name_of, paths_of
from hfdist.data.tokenization.text_encoder import tokenizer_digest
from hfdist.models.tokenizer import train_bpe

MICRO_BATCH_SIZE, SEQUENCE_TOKENS, LANES = 4, 256, 8
NUM_BATCHES = 100
"""After which a run is resumed."""
_WORDS = ("the", "of", "gradient", "loss", "rank", "token", "stream", "layer", "weights", "sum", "step", "memory")
_TOKEN_FILES, _TOKEN_FILE_DOCUMENTS, _DOCUMENT_TOKENS = 8, 2_500, 50
_TEXT_FILES, _TEXT_FILE_ROWS, _ROW_WORDS = 2, 100, 100

T = TypeVar("T")


@dataclass(kw_only=True)
class Costs:
    """Costs of one stream, in a process of its own; nothing is cached for it but what it has cached itself."""

    open_cpu_seconds: float = 0.0
    open_again_cpu_seconds: float = 0.0
    first_batch_cpu_seconds: float = 0.0
    """CPU seconds from the open corpus to the first batch, the stream's making included."""
    batch_cpu_seconds: float = 0.0
    """Mean CPU seconds of a batch after the first: sequences are made several at a time."""
    resume_cpu_seconds: float = 0.0
    """CPU seconds from the open corpus to the batch after the cursor."""
    cursor_bytes: int = 0
    heap_bytes: int = 0
    """Bytes that are left allocated of all of that."""


def make_tokenizer(folder: Path) -> None:
    """Train and save the tokenizer of all corpora."""
    train_bpe(_texts(2_000, seed=0), 512).save_pretrained(folder)


def write_token_files(folder: Path, tokenizer_folder: Path, times: int) -> None:
    """As many files at every size, each as many times as large."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)
    tokenizer.save_pretrained(folder / TOKENIZER)
    random, documents = np.random.default_rng(0), _TOKEN_FILE_DOCUMENTS * times
    records = []
    for number in range(_TOKEN_FILES):
        tokens_path, index_path, digests_path = paths_of(folder, name_of(number))
        random.integers(1, 500, documents * _DOCUMENT_TOKENS, dtype=np.uint16).tofile(tokens_path)
        np.save(index_path, np.arange(documents + 1, dtype="<i8") * _DOCUMENT_TOKENS)
        np.save(digests_path, random.integers(0, 2**64, documents, dtype="<u8"))
        origin = OriginShard("text", name_of(number), f"identity-{number}", [documents])
        num_tokens = documents * _DOCUMENT_TOKENS
        records.append(FileRecord(name_of(number), documents, num_tokens, f"digest-{number}", [origin], []))
    digest = tokenizer_digest(tokenizer)
    meta = Meta(digest, "uint16", records, digest)
    (folder / META).write_text(json.dumps({"version": VERSION, **asdict(meta)}))


def write_parquet(folder: Path, tokenizer_folder: Path, times: int) -> None:
    """As many times as many files, of one size."""
    folder.mkdir()
    for number in range(_TEXT_FILES * times):
        table = pa.table({"text": _texts(_TEXT_FILE_ROWS, seed=number)})
        pq.write_table(table, folder / f"{number:05d}.parquet", row_group_size=_TEXT_FILE_ROWS)


def write_json_lines(folder: Path, tokenizer_folder: Path, times: int) -> None:
    """As many files at every size, each as many times as large."""
    folder.mkdir()
    for number in range(_TEXT_FILES):
        lines = [json.dumps({"text": text}) for text in _texts(_TEXT_FILE_ROWS * times, seed=number)]
        (folder / f"{number}.jsonl").write_text("\n".join(lines) + "\n")


WRITERS: dict[str, tuple[SourceKind, Callable[[Path, Path, int], None]]] = {
    "token files, larger": (SourceKind.tokens, write_token_files),
    "parquet, more files": (SourceKind.files, write_parquet),
    "JSON lines, larger files": (SourceKind.files, write_json_lines),
}


def measure(folder: Path, tokenizer_folder: Path, kind: SourceKind) -> Costs:
    """Open the corpus, read batches, and go on from a cursor."""
    costs, tokenizer = Costs(), PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)
    config = DataConfig(
        sources={"text": SourceConfig(kind=kind, path=str(folder))},
        sequence_length=SEQUENCE_TOKENS,
        lanes=LANES,
        workers=0,
        cache_dir=f"{folder}-cache",
    )
    before_bytes = heap_bytes()
    corpus, costs.open_cpu_seconds = _timed(lambda: open_corpus(config))
    corpus, costs.open_again_cpu_seconds = _timed(lambda: open_corpus(config))

    def start(cursor: tuple[dict[str, object], Columns] | None) -> tuple[TokenStream, Iterator[Any]]:
        stream = TokenStream(corpus, tokenizer, config)
        if cursor is not None:
            stream.load_state_dict(*cursor)
        batches = iter(stream.loader(batch_size=MICRO_BATCH_SIZE))
        next(batches)
        return stream, batches

    (stream, batches), costs.first_batch_cpu_seconds = _timed(lambda: start(None))
    _, all_cpu_seconds = _timed(lambda: [next(batches) for _ in range(NUM_BATCHES)])
    costs.batch_cpu_seconds = all_cpu_seconds / NUM_BATCHES
    costs.cursor_bytes = len(stream.cursor().to_bytes())
    cursor = stream.cursor().to_columns()
    _, costs.resume_cpu_seconds = _timed(lambda: start(cursor))
    costs.heap_bytes = heap_bytes() - before_bytes
    return costs


def _texts(count: int, *, seed: int) -> list[str]:
    random = np.random.default_rng(seed)
    return [" ".join(words) for words in random.choice(_WORDS, (count, _ROW_WORDS))]


def _timed(action: Callable[[], T]) -> tuple[T, float]:
    begin = time.process_time()
    result = action()
    return result, time.process_time() - begin
