"""Tokenize a corpus once, into token files, in several processes; what was interrupted goes on where it stopped."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shlex
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from filelock import FileLock, Timeout
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from hfdist.config.data import BadRows, ChatConfig
from hfdist.data.pretokenize.workers import Made, cut_chunks, make_tokens
from hfdist.data.sources.base import Shard
from hfdist.data.sources.tokenfile import (
    META,
    TOKENIZER,
    VERSION,
    FileRecord,
    Meta,
    OriginShard,
    TokenFileShard,
    load_saved,
    name_of,
    parse_record,
    paths_of,
    read_json,
    read_meta,
    sizes_of,
)
from hfdist.data.tokenization.encoders import Encoders
from hfdist.data.tokenization.tokenize import token_dtype, tokenizer_digest
from hfdist.errors import ConfigError, DataError, ResourceError

logger = logging.getLogger(__name__)

# Small shards share a file up to this many rows: a folder of a million texts is not to become three million files.
_SHARED_FILE_ROWS = 256
_SHOWN_ROWS = 20

_NamedShard = tuple[str, Shard]


@dataclass(frozen=True)
class Tokenized:
    """What a folder of token files holds, and what a call of `pretokenize` did for it."""

    files: list[FileRecord]
    size_bytes: int
    """Of the token files."""
    new_tokens: int
    """Made by this call; the others were there."""
    seconds: float

    @property
    def documents(self) -> int:
        """Bad rows included, which are empty."""
        return sum(file.rows for file in self.files)

    @property
    def tokens(self) -> int:
        """Of all documents, end-of-text tokens included."""
        return sum(file.tokens for file in self.files)


def pretokenize(
    shards: Sequence[_NamedShard],
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    workers: int,
    on_bad_rows: BadRows,
    chat: ChatConfig | None = None,
    progress: bool = False,
) -> Tokenized:
    """Write token files of all documents; files that an interrupted call has finished are kept.

    Args:
        shards: with the names of their sources, in canonical order.
        tokenizer: must have an end-of-text token; is saved beside the files.
        folder: made where there is none.
        workers: processes that read and tokenize; 0: this one.
        on_bad_rows: `error` stops; else they become empty documents, and meta.json lists them.
        chat: `data.chat`; None: its defaults.
        progress: show a bar.

    Raises:
        ConfigError: the folder holds tokens of another corpus or tokenizer, or another process writes it.
        DataError: a file or a row cannot be read.
        ResourceError: the disk is full, or a worker has died.
    """
    began = time.monotonic()
    for source, shard in shards:
        if isinstance(shard, TokenFileShard):
            raise ConfigError("the source holds tokens already", where=f"data.sources.{source}.kind", found="tokens")
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock", timeout=0):
            job = _Job(shards, tokenizer, folder, chat or ChatConfig())
            new_tokens = 0 if job.is_done() else job.run(workers, on_bad_rows, progress)
    files = read_meta(folder).files
    size_bytes = sum(sum(sizes_of(file, job.dtype)) for file in files)
    return Tokenized(files, size_bytes, new_tokens, time.monotonic() - began)


def report_tokenized(made: Tokenized, folder: Path, *, vocab_size: int | None) -> None:
    """Log a summary, and how to train on it.

    Args:
        made: see `pretokenize`.
        folder: likewise.
        vocab_size: of a tokenizer that was trained on the corpus: a model takes its size, which must be said when the
            tokenizer comes from a folder.
    """
    logger.info(
        "%s: %s documents, %s tokens, %.1f tokens a document, %s in %d files",
        folder,
        f"{made.documents:,}",
        f"{made.tokens:,}",
        made.tokens / max(made.documents, 1),
        f"{made.size_bytes:,} bytes",
        len(made.files),
    )
    if made.new_tokens:
        rate = made.new_tokens / made.seconds
        logger.info("%s tokens made in %.1f s: %s tokens/s", f"{made.new_tokens:,}", made.seconds, f"{rate:,.0f}")
    bad_rows: dict[str, list[int]] = {}
    for file in made.files:
        for origin, row in map(file.origin, file.bad_rows):
            bad_rows.setdefault(f"{origin.source}:{origin.shard}", []).append(row)
    for name, rows in bad_rows.items():
        shown = ", ".join(map(str, rows[:_SHOWN_ROWS])) + (", ..." if len(rows) > _SHOWN_ROWS else "")
        logger.warning("%s: %d unreadable, now empty documents: rows %s", name, len(rows), shown)
    overrides = ["data=tokens", f"data.sources.tokens.path={folder}", f"model.tokenizer.name={folder / TOKENIZER}"]
    if vocab_size is not None:
        overrides.append(f"model.config.vocab_size={vocab_size}")
    logger.info("train on them with: python recipes/pretrain.py %s", shlex.join(overrides))


class _Job:
    """What is to be written into a folder."""

    def __init__(
        self, shards: Sequence[_NamedShard], tokenizer: PreTrainedTokenizerBase, folder: Path, chat: ChatConfig
    ) -> None:
        self._folder, self._tokenizer, self._encoders = folder, tokenizer, Encoders(tokenizer, chat)
        self._digest = self._encoders.digest(examples=False)
        has_examples = any(shard.gives_examples for _, shard in shards)
        self._encoding = self._encoders.digest(examples=has_examples)
        self.dtype = token_dtype(tokenizer, examples=has_examples)
        self._files = _share(shards)

    def is_done(self) -> bool:
        """Whether all files are there.

        Raises:
            ConfigError: those of something else are.
        """
        if not (self._folder / META).is_file():
            return False
        meta = read_meta(self._folder)
        same_tokenizer = (meta.tokenizer_digest, meta.encoding) == (self._digest, self._encoding)
        if same_tokenizer and [file.origins for file in meta.files] == [_origins(shards) for shards in self._files]:
            return True
        raise ConfigError(
            f"the folder holds the tokens of another {'corpus' if same_tokenizer else 'tokenizer or data.chat'}",
            where="run.dir",
            found=str(self._folder),
            hint="another run.name, or delete the folder",
        )

    def run(self, workers: int, on_bad_rows: BadRows, progress: bool) -> int:
        """Write the files that are missing, then meta.json; give how many tokens were made."""
        self._save_tokenizer()
        records = {number: record for number in range(len(self._files)) if (record := self._find(number)) is not None}
        missing = {
            number: cut_chunks([shard for _, shard in shards])
            for number, shards in enumerate(self._files)
            if number not in records
        }
        chunks = [chunk for chunks in missing.values() for chunk in chunks]
        made = make_tokens(chunks, self._encoders, self.dtype, workers=workers, on_bad_rows=on_bad_rows)
        with tqdm(
            total=sum(_num_rows(shards) for shards in self._files),
            initial=sum(record.rows for record in records.values()),
            desc="tokenize",
            unit="doc",
            disable=not progress,
            file=sys.stderr,
            dynamic_ncols=True,
        ) as bar:
            shown = _show(made, bar)
            for number, of_file in missing.items():
                records[number] = self._write(number, islice(shown, len(of_file)))
        meta = Meta(self._digest, self.dtype, [records[number] for number in range(len(self._files))], self._encoding)
        _write_json(self._folder / META, {"version": VERSION, **asdict(meta)})
        for number in records:
            self._record_path(number).unlink(missing_ok=True)
        return sum(records[number].tokens for number in missing)

    def _write(self, number: int, chunks: Iterator[Made]) -> FileRecord:
        """Write one token file, and last the record that it is there."""
        tokens_path, index_path, digests_path = paths_of(self._folder, name_of(number))
        lengths, digests, bad_rows = array("q", [0]), array("Q"), list[int]()
        digest = hashlib.blake2b(digest_size=16)
        with _whole_file(tokens_path) as file:
            for chunk in chunks:
                bad_rows += [len(digests) + place for place in chunk.bad]
                lengths.extend(chunk.lengths)
                digests.extend(chunk.digests)
                file.write(chunk.tokens.data)
                digest.update(chunk.tokens.data)
        offsets = np.cumsum(np.asarray(lengths), dtype="<i8")
        for path, values in ((index_path, offsets), (digests_path, np.asarray(digests).astype("<u8"))):
            with _whole_file(path) as file:
                np.save(file, values, allow_pickle=False)
            digest.update(values.data)
        origins = _origins(self._files[number])
        record = FileRecord(name_of(number), len(digests), int(offsets[-1]), digest.hexdigest(), origins, bad_rows)
        _write_json(self._record_path(number), {"made_by": self._made_by, "record": asdict(record)})
        return record

    def _find(self, number: int) -> FileRecord | None:
        """The record of a file that an interrupted call has finished."""
        path = self._record_path(number)
        try:
            values = read_json(path)
            record = parse_record(values["record"], number)
            present = [file.stat().st_size for file in paths_of(self._folder, record.name)]
            is_ours = values["made_by"] == self._made_by and record.origins == _origins(self._files[number])
        except (DataError, KeyError, TypeError, ValueError, OSError):
            return None
        return record if is_ours and present == list(sizes_of(record, self.dtype)) else None

    @property
    def _made_by(self) -> list[Any]:
        return [VERSION, self._digest, self.dtype, self._encoding]

    def _record_path(self, number: int) -> Path:
        return self._folder / f"{name_of(number)}.json"

    def _save_tokenizer(self) -> None:
        folder = self._folder / TOKENIZER
        self._tokenizer.save_pretrained(folder)
        try:
            is_same = tokenizer_digest(load_saved(folder)) == self._digest
        except DataError:
            is_same = False
        if not is_same:
            logger.warning(
                "%s does not give the tokenizer as it was, such as one with code of its own; train with the same "
                "model.tokenizer.name as now",
                folder,
            )


def _show(made: Iterator[Made], bar: tqdm[Any]) -> Iterator[Made]:
    num_tokens, began = 0, time.monotonic()
    for chunk in made:
        num_tokens += len(chunk.tokens)
        bar.set_postfix({"tok/s": f"{num_tokens / (time.monotonic() - began):,.0f}"}, refresh=False)
        bar.update(len(chunk.lengths))
        yield chunk


def _share(shards: Sequence[_NamedShard]) -> list[list[_NamedShard]]:
    """Say which shards go into which file, in order: large ones have one of their own."""
    files: list[list[_NamedShard]] = []
    for named in shards:
        if files and _num_rows([*files[-1], named]) <= _SHARED_FILE_ROWS:
            files[-1].append(named)
        else:
            files.append([named])
    return files


def _num_rows(shards: Sequence[_NamedShard]) -> int:
    return sum(sum(shard.runs) for _, shard in shards)


def _origins(shards: Sequence[_NamedShard]) -> list[OriginShard]:
    return [OriginShard(source, shard.name, shard.identity, list(shard.runs)) for source, shard in shards]


@contextmanager
def _whole_file(path: Path) -> Iterator[BinaryIO]:
    """Give a new file, which takes its name when it is whole and on the disk."""
    partial = Path(f"{path}.partial")
    with partial.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    with _whole_file(path) as file:
        file.write(json.dumps(values).encode())


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Say what is wrong with the folder."""
    try:
        yield
    except Timeout as error:
        raise ConfigError(
            "another process writes these token files", where="run.dir", found=str(folder), hint="another run.name"
        ) from error
    except OSError as error:
        reason = error.strerror or error
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceError(
                f"the token files do not fit: {reason}",
                where="run.dir",
                found=str(folder),
                hint="make room; the same command goes on from the files that are finished",
            ) from error
        raise ConfigError(f"the folder cannot be used: {reason}", where="run.dir", found=str(folder)) from error
