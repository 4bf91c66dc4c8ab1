"""What every contender reads: one corpus as parquet shards of uneven size, one tokenizer, and the corpus as tokens."""

from __future__ import annotations

import itertools
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SEQUENCE_LENGTH = int(os.environ.get("BENCHMARK_SEQUENCE_LENGTH", "1024"))
NUM_WORKERS = int(os.environ.get("BENCHMARK_WORKERS", "1"))
"""Workers of every loader. They and the length are read here, so that all contenders' processes get the same."""
BATCH_SIZE = 8
SEED = 0
TEXT = "text"
VOCAB_SIZE = 4096

_TOKENIZER_BYTES = 2_000_000
_SHARD_SHARES = (0.28, 0.22, 0.17, 0.12, 0.08, 0.06, 0.04, 0.03)
_ROW_GROUP_ROWS = 512
_DOCUMENT_BYTES = (500, 1000, 2000, 4000, 8000)


@dataclass(frozen=True)
class Work:
    """The folder of one benchmark, and how much is in it."""

    folder: Path
    num_tokens: int
    """Tokens of the whole corpus, with an end-of-text token after each document."""
    token_copies: int
    """How often the tokenized path has the corpus, so that fast contenders run for long enough to be timed."""

    @property
    def parquet_files(self) -> list[str]:
        """The corpus as text, in a column `text`."""
        return sorted(str(path) for path in (self.folder / "text").glob("*.parquet"))

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer of all contenders; those that need none do not import transformers, which takes seconds."""
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(self.folder / "tokenizer")

    def documents(self) -> Iterator[NDArray[np.uint16]]:
        """Give the tokens of all documents of the tokenized path."""
        tokens, ends = np.load(self.folder / "tokens.npy", mmap_mode="r"), np.load(self.folder / "ends.npy")
        for _ in range(self.token_copies):
            yield from np.split(tokens, ends[:-1])

    def sequences(self) -> NDArray[np.uint16]:
        """The same, cut to sequences: shape [sequences, SEQUENCE_LENGTH]."""
        tokens = np.tile(np.load(self.folder / "tokens.npy"), self.token_copies)
        return tokens[: len(tokens) // SEQUENCE_LENGTH * SEQUENCE_LENGTH].reshape(-1, SEQUENCE_LENGTH)

    def num_batches(self, *, tokenized: bool) -> int:
        """Whole batches in an epoch of a path."""
        copies = self.token_copies if tokenized else 1
        return self.num_tokens * copies // (SEQUENCE_LENGTH * BATCH_SIZE)


def make_work(folder: Path, *, text_bytes: int, token_copies: int) -> Work:
    """Write the corpus and the tokenizer into an empty folder."""
    from hfdist.models.tokenizer import train_bpe

    texts = _collect(text_bytes)
    tokenizer = train_bpe(_up_to(texts, _TOKENIZER_BYTES), VOCAB_SIZE)
    tokenizer.save_pretrained(folder / "tokenizer")
    _write_parquet(folder / "text", texts)
    documents = [
        np.array([*ids, tokenizer.eos_token_id], dtype=np.uint16)
        for start in range(0, len(texts), 256)
        for ids in tokenizer(texts[start : start + 256])["input_ids"]
    ]
    np.save(folder / "tokens.npy", np.concatenate(documents))
    np.save(folder / "ends.npy", np.cumsum([len(document) for document in documents]))
    work = Work(folder, sum(len(document) for document in documents), token_copies)
    (folder / "work.json").write_text(json.dumps({**asdict(work), "folder": str(folder)}))
    return work


def load_work(folder: Path) -> Work:
    """Read what `make_work` has written."""
    values = json.loads((folder / "work.json").read_text())
    return Work(**{**values, "folder": folder})


def _collect(text_bytes: int) -> list[str]:
    """Pieces of Python files, of the lengths of web pages: those of the library, of what is installed, and again."""
    paths = sysconfig.get_paths()
    files = [path for root in ("stdlib", "purelib") for path in sorted(Path(paths[root]).rglob("*.py"))]
    texts: list[str] = []
    size_bytes = 0
    for file in itertools.cycle(files):
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        while lines and size_bytes < text_bytes:
            wanted_bytes = _DOCUMENT_BYTES[len(texts) % len(_DOCUMENT_BYTES)]
            ends = itertools.accumulate(len(line.encode()) for line in lines)
            num_lines = next((number for number, end in enumerate(ends, 1) if end >= wanted_bytes), len(lines))
            texts.append("".join(lines[:num_lines]))
            size_bytes += len(texts[-1].encode())
            lines = lines[num_lines:]
        if size_bytes >= text_bytes:
            break
    return texts


def _write_parquet(folder: Path, texts: list[str]) -> None:
    folder.mkdir()
    ends = np.rint(np.cumsum(_SHARD_SHARES) * len(texts)).astype(int).tolist()
    for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        table = pa.table({TEXT: texts[start:end]})
        pq.write_table(table, folder / f"{number:05d}.parquet", row_group_size=_ROW_GROUP_ROWS)


def _up_to(texts: list[str], max_bytes: int) -> Iterator[str]:
    read_bytes = 0
    for text in texts:
        yield text
        read_bytes += len(text.encode())
        if read_bytes >= max_bytes:
            return
