"""Tokenize a corpus once into token files, on one machine or on many; what was interrupted goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
import logging
import shlex
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from hfdist.atomic_write import remove_unfinished, write_atomically
from hfdist.config.data import BadRows, ChatConfig
from hfdist.data.sources.base import BadRow, Shard
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
from hfdist.data.storage.identity import digests_of
from hfdist.data.stream.worker_deaths import WorkerRegistry
from hfdist.data.stream.worker_map import map_in_workers
from hfdist.data.tokenization.encoders import Encoders
from hfdist.data.tokenization.text_encoder import text_digest, token_dtype, tokenizer_digest
from hfdist.errors import ConfigError, DataError, ResourceError
from hfdist.failures import is_full_disk
from hfdist.units import list_first

logger = logging.getLogger(__name__)

# Small shards share a file up to this many rows: a folder of a million texts is not to become three million files.
_SHARED_FILE_ROWS = 256
_SHOWN_ROWS = 20
# What a worker reads together: some kinds of files are decoded from the beginning of a run for each chunk of it.
_CHUNK_ROWS = 64
_CHUNK_READS = 8
_ENCODED_ROWS = 32
_CHUNKS_AHEAD = 4
_SHOWN_BAD_ROWS = 10
_NOTHING = np.empty(0, dtype=np.int32)

_NamedShard = tuple[str, Shard]
"""A shard, after the name of its source."""
_Chunk = tuple[Shard, range]
"""Rows of one run of a shard."""


def pretokenize(
    shards: Sequence[_NamedShard],
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    workers: int,
    on_bad_rows: BadRows,
    chat: ChatConfig | None = None,
    share: tuple[int, int] = (0, 1),
    progress: bool = False,
) -> Meta | None:
    """Write token files of all documents, and give what meta.json says; files of an interrupted call are kept.

    Several calls may share the files, each in a process of its own, on any machine that sees the folder. Who comes last
    writes meta.json. None: others have not written all of theirs.

    Args:
        shards: with the names of their sources, in canonical order.
        tokenizer: must have an end-of-text token; is saved beside the files.
        folder: made where there is none.
        workers: processes that read and tokenize; 0: this one.
        on_bad_rows: `error` stops; else they become empty documents, and meta.json lists them.
        chat: `data.chat`; None: its defaults.
        share: number of this call, and how many share the files: `data.shard`.
        progress: show a bar.

    Raises:
        ConfigError: the folder holds tokens of another corpus or tokenizer, or another process has the same share.
        DataError: a file or a row cannot be read, or another share was made of other files, or by another tokenizer.
        ResourceError: the disk is full, or a worker has died.
    """
    for source, shard in shards:
        if isinstance(shard, TokenFileShard):
            raise ConfigError("the source holds tokens already", where=f"data.sources.{source}.kind", found="tokens")
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        number, count = share
        with FileLock(folder / (".lock" if count == 1 else f".lock-{number}-of-{count}"), timeout=0):
            job = _Job(shards, tokenizer, folder, chat or ChatConfig())
            if not job.is_done():
                job.write_files(range(number, job.num_files, count), workers, on_bad_rows, progress)
                with FileLock(folder / ".lock-end"):
                    missing = job.finish()
                if missing:
                    logger.info("%s: share %d of %d is done; %d files of others are missing", folder, *share, missing)
                    return None
    return read_meta(folder)


def report_tokenized(made: Meta, folder: Path, *, vocab_size: int | None) -> None:
    """Log a summary of what `pretokenize` has made in a folder, and how to train on it.

    `vocab_size` is of a tokenizer that was trained on the corpus: a model takes its size, which must be said when the
    tokenizer comes from a folder.
    """
    documents, tokens = (sum(getattr(file, what) for file in made.files) for what in ("rows", "tokens"))
    mean = f"{tokens / max(documents, 1):.1f} tokens a document"
    size = f"{sum(sum(sizes_of(file, made.dtype)) for file in made.files):,} bytes in {len(made.files)} files"
    logger.info("%s: %s", folder, f"{documents:,} documents, {tokens:,} tokens, {mean}, {size}")
    bad_rows: dict[str, list[int]] = {}
    for file in made.files:
        for origin, row in map(file.origin, file.bad_rows):
            bad_rows.setdefault(f"{origin.source}:{origin.shard}", []).append(row)
    for name, rows in bad_rows.items():
        shown = list_first(rows, _SHOWN_ROWS)
        logger.warning("%s: %d unreadable, now empty documents: rows %s", name, len(rows), shown)
    overrides = ["data=tokens", f"data.sources.tokens.path={folder}", f"model.tokenizer.name={folder / TOKENIZER}"]
    if vocab_size is not None:
        overrides.append(f"model.config.vocab_size={vocab_size}")
    logger.info("train on them with: hfdist pretrain model=... %s", shlex.join(overrides))


class _Job:
    """The token files that a folder is to hold."""

    def __init__(
        self, shards: Sequence[_NamedShard], tokenizer: PreTrainedTokenizerBase, folder: Path, chat: ChatConfig
    ) -> None:
        self._folder, self._tokenizer, self._encoders = folder, tokenizer, Encoders(tokenizer, chat)
        self._digest = self._encoders.digest(examples=False)
        has_examples = any(shard.gives_examples for _, shard in shards)
        self._encoding = self._encoders.digest(examples=has_examples)
        self.dtype = token_dtype(tokenizer, examples=has_examples)
        self._files = _group(shards)

    def is_done(self) -> bool:
        """Whether all files are there; raises a ConfigError if the folder holds other tokens."""
        if not (self._folder / META).is_file():
            return False
        meta = read_meta(self._folder)
        others = self._others(meta.tokenizer_digest, meta.encoding)
        if [file.origins for file in meta.files] != [_origins(shards) for shards in self._files]:
            others.append("corpus")
        if not others:
            return True
        what = f"the folder holds the tokens of another {' and another '.join(others)}"
        hint = "another run.name, or delete the folder"
        allowed = "a new folder, or one of the same files, tokenizer and data.chat"
        raise ConfigError(what, where="run.dir", found=str(self._folder), allowed=allowed, hint=hint)

    @property
    def num_files(self) -> int:
        """Number of token files."""
        return len(self._files)

    def write_files(self, numbers: Sequence[int], workers: int, on_bad_rows: BadRows, progress: bool) -> None:
        """Write those of some files that are missing."""
        records = {number: record for number in numbers if (record := self._find(number)) is not None}
        missing = {
            number: _split([shard for _, shard in self._files[number]]) for number in numbers if number not in records
        }
        chunks = [chunk for chunks in missing.values() for chunk in chunks]
        made = _make_tokens(chunks, self._encoders, self.dtype, workers, on_bad_rows)
        with tqdm(
            total=sum(_num_rows(self._files[number]) for number in numbers),
            initial=sum(record.rows for record in records.values()),
            desc="tokenize",
            unit="doc",
            disable=not progress,
            file=sys.stderr,
            dynamic_ncols=True,
        ) as bar:
            shown = _show(made, bar)
            for number, of_file in missing.items():
                # Shares of another number have locks of other names, and some of the same files.
                with FileLock(self._lock_path(number), timeout=0):
                    self._write(number, islice(shown, len(of_file)))

    def finish(self) -> int:
        """Write the tokenizer and meta.json, unless files are missing; give how many are.

        DataError: another share has made a file of something else.
        """
        if (self._folder / META).is_file():
            return 0
        records = []
        for number in range(len(self._files)):
            if (record := self._find(number)) is not None:
                records.append(record)
            elif self._record_path(number).is_file():
                raise self._of_another(number)
        if len(records) == len(self._files):
            self._save_tokenizer()
            meta = Meta(self._digest, self.dtype, records, self._encoding)
            _write_json(self._folder / META, {"version": VERSION, **asdict(meta)})
            for number in range(len(records)):
                self._record_path(number).unlink(missing_ok=True)
                self._lock_path(number).unlink(missing_ok=True)
        return len(self._files) - len(records)

    def _others(self, digest: str, encoding: str) -> list[str]:
        """Name what differs where rows became tokens by a tokenizer and an encoding of these digests.

        The tokenizer alone where it differs: the encoding of examples follows from it.
        """
        if digest != self._digest:
            return ["tokenizer"]
        if (digest == encoding) != (self._digest == self._encoding):
            return ["data.format"]
        return ["data.chat or chat template"] if encoding != self._encoding else []

    def _of_another(self, number: int) -> DataError:
        """Make the error of a file that is there, but not as this process would make it."""
        record, ours = read_json(self._record_path(number)), self._made_by(number)
        theirs = record.get("made_by") if isinstance(record, dict) else None
        if not isinstance(theirs, list) or len(theirs) != len(ours) or theirs[0] != VERSION:
            others = ["version"]
        else:
            # The type of the tokens follows from the tokenizer and from whether they are examples.
            _, digest, _, encoding, contents = theirs
            others = self._others(digest, encoding) + ["contents of its files"] * (contents != ours[-1])
            others = others or ["names or sizes of its files"]
        return DataError(
            "another share has made this token file of something else",
            where=str(self._folder / name_of(number)),
            found=f"other: {', '.join(others)}",
            allowed="what this share would make",
            hint="the same overrides, files and hfdist for all shares; those that differ again, or another run.name",
        )

    def _write(self, number: int, chunks: Iterator[_Made]) -> None:
        """Write one token file, and last its record."""
        tokens_path, index_path, digests_path = paths_of(self._folder, name_of(number))
        lengths, digests, bad_rows = array("q", [0]), array("Q"), list[int]()
        digest = hashlib.blake2b(digest_size=16)

        def write_tokens(file: BinaryIO) -> None:
            for chunk in chunks:
                bad_rows.extend(len(digests) + place for place in chunk.bad)
                lengths.extend(chunk.lengths)
                digests.extend(chunk.digests)
                file.write(chunk.tokens.data)
                digest.update(chunk.tokens.data)

        _write(tokens_path, write_tokens)
        offsets = np.cumsum(np.asarray(lengths), dtype="<i8")
        for path, values in ((index_path, offsets), (digests_path, np.asarray(digests).astype("<u8"))):
            _write(path, partial(np.save, arr=values, allow_pickle=False))
            digest.update(values.data)
        origins = _origins(self._files[number])
        record = FileRecord(name_of(number), len(digests), int(offsets[-1]), digest.hexdigest(), origins, bad_rows)
        _write_json(self._record_path(number), {"made_by": self._made_by(number), "record": asdict(record)})

    def _find(self, number: int) -> FileRecord | None:
        """The record of a file that another call has completed."""
        path = self._record_path(number)
        try:
            values = read_json(path)
            record = parse_record(values["record"], number)
            present = [file.stat().st_size for file in paths_of(self._folder, record.name)]
            is_ours = values["made_by"] == self._made_by(number) and record.origins == _origins(self._files[number])
        except (DataError, KeyError, TypeError, ValueError, OSError):
            return None
        return record if is_ours and present == list(sizes_of(record, self.dtype)) else None

    def _made_by(self, number: int) -> list[object]:
        """Give what decides the tokens of a file; its origins know no more of their files than sizes and ends."""
        contents = [digests_of(shard.contents) for _, shard in self._files[number]]
        return [VERSION, self._digest, self.dtype, self._encoding, contents]

    def _record_path(self, number: int) -> Path:
        return self._folder / f"{name_of(number)}.json"

    def _lock_path(self, number: int) -> Path:
        return self._folder / f".lock-{name_of(number)}"

    def _save_tokenizer(self) -> None:
        folder = self._folder / TOKENIZER
        self._tokenizer.save_pretrained(folder)
        try:
            is_same = tokenizer_digest(load_saved(folder)) == self._digest
        except DataError:
            is_same = False
        if not is_same:
            reason = "does not give the tokenizer as it was, such as one with code of its own"
            logger.warning("%s %s; train with the same model.tokenizer.name as now", folder, reason)


def _show(made: Iterator[_Made], bar: tqdm[object]) -> Iterator[_Made]:
    num_tokens, began = 0, time.monotonic()
    for chunk in made:
        num_tokens += len(chunk.tokens)
        bar.set_postfix({"tok/s": f"{num_tokens / (time.monotonic() - began):,.0f}"}, refresh=False)
        bar.update(len(chunk.lengths))
        yield chunk


def _group(shards: Sequence[_NamedShard]) -> list[list[_NamedShard]]:
    """Group shards by file, in order: large ones have a file of their own."""
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


def _write(path: Path, content: bytes | Callable[[BinaryIO], None]) -> None:
    """Write a file whole; the folder's lock is held, so what a killed process has left of it can go."""
    remove_unfinished(path)
    write_atomically(path, content)


def _write_json(path: Path, values: Mapping[str, object]) -> None:
    _write(path, json.dumps(values).encode())


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Explain what is wrong with the folder."""
    try:
        yield
    except Timeout as error:
        raise ConfigError(
            "another process writes these token files",
            where="run.dir",
            found=str(folder),
            hint="another run.name, or a data.shard of its own for each process",
        ) from error
    except OSError as error:
        reason = error.strerror or error
        if is_full_disk(error):
            raise ResourceError(
                f"the token files do not fit: {reason}",
                where="run.dir",
                found=str(folder),
                hint="make room; the same command goes on from the files that are finished",
            ) from error
        raise ConfigError(f"the folder cannot be used: {reason}", where="run.dir", found=str(folder)) from error


class _Made(NamedTuple):
    """Some rows as tokens."""

    tokens: NDArray[np.integer]
    """All documents end to end."""
    lengths: list[int]
    digests: list[int]
    bad: dict[int, DataError]
    """Errors of rows that cannot be read, by their place among the rows."""


def _split(shards: Sequence[Shard]) -> list[_Chunk]:
    """Split all rows of some shards, in order, into chunks."""
    chunks: list[_Chunk] = []
    for shard in shards:
        most_rows = max(_CHUNK_ROWS, _CHUNK_READS * shard.rows_at_once)
        first = 0
        for num_rows in shard.runs:
            stop = first + num_rows
            chunks += [(shard, range(start, min(start + most_rows, stop))) for start in range(first, stop, most_rows)]
            first = stop
    return chunks


def _make_tokens(
    chunks: Sequence[_Chunk], encoders: Encoders, dtype: str, workers: int, on_bad_rows: BadRows
) -> Iterator[_Made]:
    """Give chunks as tokens, in order."""
    tokenizes = _Tokenizes(chunks, encoders, dtype)
    registry = WorkerRegistry(workers, lambda _: "which tokenizes")
    num_bad = 0
    for chunk in map_in_workers(tokenizes, len(chunks), registry, ahead=_CHUNKS_AHEAD):
        for error in chunk.bad.values():
            if on_bad_rows is BadRows.error:
                error.hint = error.hint or "data.on_bad_rows=skip makes such rows empty documents"
                raise error
            num_bad += 1
            if num_bad <= _SHOWN_BAD_ROWS:
                logger.warning("%s: %s, so it becomes an empty document", error.where, error.what)
        yield chunk


class _Tokenizes:
    """Tokenizes a chunk, by its number."""

    def __init__(self, chunks: Sequence[_Chunk], encoders: Encoders, dtype: str) -> None:
        self._chunks, self._encoders = chunks, encoders
        self._dtype = np.dtype(dtype).newbyteorder("<")

    def __call__(self, number: int) -> _Made:
        shard, rows = self._chunks[number]
        found, digests = iter(shard.read(rows)), list[int]()
        made: list[NDArray[np.int32] | BadRow] = []
        for start in range(0, len(rows), _ENCODED_ROWS):
            texts = list(islice(found, _ENCODED_ROWS))
            digests += [text_digest("" if isinstance(text, BadRow) else text) for text in texts]
            made += self._encode(shard, rows[start : start + _ENCODED_ROWS], texts)
        bad = {place: row.error for place, row in enumerate(made) if isinstance(row, BadRow)}
        documents = [_NOTHING if isinstance(row, BadRow) else row for row in made]
        lengths = [len(tokens) for tokens in documents]
        return _Made(np.concatenate(documents).astype(self._dtype), lengths, digests, bad)

    def _encode(self, shard: Shard, rows: range, texts: Sequence[str | BadRow]) -> Iterator[NDArray[np.int32] | BadRow]:
        good = {row: text for row, text in zip(rows, texts, strict=True) if isinstance(text, str)}
        made = iter(self._encoders.encode(shard, list(good), list(good.values())))
        return (text if isinstance(text, BadRow) else next(made) for text in texts)
