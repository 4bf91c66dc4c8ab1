"""The tokenizing of a corpus into token files, once, on one machine or on many; it goes on where it was interrupted.

While files are written, the folder holds more than at the end:

    NNNNN.json           record of a finished token file, with all that decided its tokens; meta.json takes it over
    .lock-NNNNN          held by the process that writes the token file
    .lock...             held by each process for its share, so that no two processes have one
    .lock-end            held while meta.json is written
"""

from __future__ import annotations

import hashlib
import json
import logging
import shlex
import sys
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from filelock import FileLock, Timeout
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from hfdist.atomic_write import remove_unfinished, write_atomically
from hfdist.config.data import BadRows, ChatConfig
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
from hfdist.data.storage.identity import digests_of
from hfdist.data.tokenization.encoders import Encoders
from hfdist.data.tokenization.text_encoder import token_dtype, tokenizer_digest
from hfdist.data.tokenized_chunks import Chunk, TokenizedChunk, split_into_chunks, tokenize_chunks
from hfdist.errors import ConfigError, DataError, ResourceError
from hfdist.failures import is_full_disk
from hfdist.units import list_first

logger = logging.getLogger(__name__)

_SHARED_FILE_ROWS = 256
"""Rows up to which small shards share a file: a folder of a million texts is not to become three million files."""
_SHOWN_ROWS = 20

_NamedShard = tuple[str, Shard]
"""The name of a source, and a shard of it."""


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
    """Write token files of all documents, and give the content of meta.json; files of an interrupted call are kept.

    Several calls may share the files, each in a process of its own, on any machine that sees the folder. The last one
    writes meta.json. None: other calls have not written all of their files yet.

    Args:
        shards: Shards of the corpus in canonical order, each with the name of its source.
        tokenizer: Tokenizer with an end-of-text token; it is saved beside the files.
        folder: Folder of the token files, which is made where there is none.
        workers: Number of processes that read and tokenize; 0: this process does.
        on_bad_rows: Whether bad rows stop the call, or become empty documents, which meta.json lists.
        chat: The config's section `data.chat`; None: its defaults.
        share: Number of this call from 0 on, and how many calls share the files, as `data.shard` has them.
        progress: Whether a progress bar is shown.

    Raises:
        ConfigError: The folder holds tokens of another corpus or tokenizer, or another process has the same share.
        DataError: A file or a row cannot be read, or another share was made of other files, or by another tokenizer.
        ResourceError: The disk is full, or a worker has died.
    """
    for source, shard in shards:
        if isinstance(shard, TokenFileShard):
            raise ConfigError("the source holds tokens already", where=f"data.sources.{source}.kind", found="tokens")
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        number, count = share
        lock_name = ".lock" if count == 1 else f".lock-{number}-of-{count}"
        with FileLock(folder / lock_name, timeout=0):
            job = _Job(shards, tokenizer, folder, chat or ChatConfig())
            if job.is_done():
                return read_meta(folder)
            job.write_files(range(number, job.num_files, count), workers, on_bad_rows, progress)
            with FileLock(folder / ".lock-end"):
                num_missing = job.finish()
            if num_missing:
                done = "%s: share %d of %d is done; %d files of others are missing"
                logger.info(done, folder, number, count, num_missing)
                return None
            return read_meta(folder)


def report_tokenized(made: Meta, folder: Path, *, vocab_size: int | None) -> None:
    """Log a summary of what `pretokenize` has made in a folder, and how to train on it.

    `vocab_size` is the size of a tokenizer that was trained on the corpus: a model must be told it when the tokenizer
    comes from a folder. None: the tokenizer was there before.
    """
    documents = sum(file.rows for file in made.files)
    tokens = sum(file.tokens for file in made.files)
    mean = f"{tokens / max(documents, 1):.1f} tokens a document"
    num_bytes = sum(sum(sizes_of(file, made.dtype)) for file in made.files)
    size = f"{num_bytes:,} bytes in {len(made.files)} files"
    logger.info("%s: %s", folder, f"{documents:,} documents, {tokens:,} tokens, {mean}, {size}")
    bad_rows: defaultdict[str, list[int]] = defaultdict(list)
    for file in made.files:
        for row_in_file in file.bad_rows:
            origin, row = file.origin(row_in_file)
            bad_rows[f"{origin.source}:{origin.shard}"].append(row)
    for name, rows in bad_rows.items():
        shown = list_first(rows, _SHOWN_ROWS)
        logger.warning("%s: %d unreadable, now empty documents: rows %s", name, len(rows), shown)
    overrides = ["data=tokens", f"data.sources.tokens.path={folder}", f"model.tokenizer.name={folder / TOKENIZER}"]
    if vocab_size is not None:
        overrides.append(f"model.config.vocab_size={vocab_size}")
    logger.info("train on them with: hfdist pretrain model=... %s", shlex.join(overrides))


class _MadeBy(NamedTuple):
    """What decides the tokens of a token file, as its record has it: a list in JSON."""

    version: int
    tokenizer_digest: str
    dtype: str
    encoding: str
    contents: list[list[str]]
    """Hashes of what each shard holds: the identities among the origins are of sizes and ends alone."""


class _Job:
    """The token files that a folder is to hold, and the writing of those that are missing."""

    def __init__(
        self, shards: Sequence[_NamedShard], tokenizer: PreTrainedTokenizerBase, folder: Path, chat: ChatConfig
    ) -> None:
        self._folder, self._tokenizer = folder, tokenizer
        self._encoders = Encoders(tokenizer, chat)
        self._digest = self._encoders.digest(examples=False)
        has_examples = any(shard.gives_examples for _, shard in shards)
        self._encoding = self._encoders.digest(examples=has_examples)
        self.dtype = token_dtype(tokenizer, examples=has_examples)
        self._files = _group(shards)

    def is_done(self) -> bool:
        """Whether all files are there already; ConfigError: the folder holds other tokens."""
        if not (self._folder / META).is_file():
            return False
        meta = read_meta(self._folder)
        differences = self._differences(meta.tokenizer_digest, meta.encoding)
        if [file.origins for file in meta.files] != [_origins(shards) for shards in self._files]:
            differences.append("corpus")
        if not differences:
            return True
        what = f"the folder holds the tokens of another {' and another '.join(differences)}"
        hint = "another run.name, or delete the folder"
        allowed = "a new folder, or one of the same files, tokenizer and data.chat"
        raise ConfigError(what, where="run.dir", found=str(self._folder), allowed=allowed, hint=hint)

    @property
    def num_files(self) -> int:
        """Number of token files."""
        return len(self._files)

    def write_files(self, numbers: Sequence[int], workers: int, on_bad_rows: BadRows, progress: bool) -> None:
        """Write the files with some numbers that are not finished; `workers` processes read and tokenize."""
        finished_rows = 0
        missing: dict[int, list[Chunk]] = {}
        for number in numbers:
            record = self._find_record(number)
            if record is None:
                missing[number] = split_into_chunks([shard for _, shard in self._files[number]])
            else:
                finished_rows += record.rows
        chunks = list(chain.from_iterable(missing.values()))
        made = tokenize_chunks(chunks, self._encoders, self.dtype, workers, on_bad_rows)
        with tqdm(
            total=sum(_num_rows(self._files[number]) for number in numbers),
            initial=finished_rows,
            desc="tokenize",
            unit="doc",
            disable=not progress,
            file=sys.stderr,
            dynamic_ncols=True,
        ) as bar:
            shown = _show(made, bar)
            for number, chunks_of_file in missing.items():
                # Another split into shares has locks of other names, and some of the same files.
                with FileLock(self._lock_path(number), timeout=0):
                    self._write(number, islice(shown, len(chunks_of_file)))

    def finish(self) -> int:
        """Write the tokenizer and meta.json, unless files are missing; give the number of missing files.

        DataError: another share has made a file of other rows, or by another tokenizer.
        """
        if (self._folder / META).is_file():
            return 0
        records = []
        for number in range(len(self._files)):
            record = self._find_record(number)
            if record is not None:
                records.append(record)
            elif self._record_path(number).is_file():
                raise self._made_otherwise(number)
        if len(records) == len(self._files):
            self._save_tokenizer()
            meta = Meta(self._digest, self.dtype, records, self._encoding)
            _write_json(self._folder / META, {"version": VERSION, **asdict(meta)})
            for number in range(len(records)):
                self._record_path(number).unlink(missing_ok=True)
                self._lock_path(number).unlink(missing_ok=True)
        return len(self._files) - len(records)

    def _differences(self, digest: str, encoding: str) -> list[str]:
        """Name what a tokenizer and an encoding with these digests have other than this job.

        Where the tokenizer differs, it is named alone, since the encoding follows from it.
        """
        if digest != self._digest:
            return ["tokenizer"]
        if (digest == encoding) != (self._digest == self._encoding):
            return ["data.format"]
        return ["data.chat or chat template"] if encoding != self._encoding else []

    def _made_otherwise(self, number: int) -> DataError:
        """Make the error of a file that is there, but not as this process would make it."""
        record = read_json(self._record_path(number))
        made_by = record.get("made_by") if isinstance(record, dict) else None
        ours = self._made_by(number)
        differences: list[str] = []
        if not isinstance(made_by, list) or len(made_by) != len(ours) or made_by[0] != VERSION:
            differences.append("version")
        else:
            theirs = _MadeBy(*made_by)
            # The type of the tokens follows from the tokenizer and from whether they are examples.
            differences += self._differences(theirs.tokenizer_digest, theirs.encoding)
            if theirs.contents != ours.contents:
                differences.append("contents of its files")
            if not differences:
                differences.append("names or sizes of its files")
        return DataError(
            "another share has made this token file of something else",
            where=str(self._folder / name_of(number)),
            found=f"other: {', '.join(differences)}",
            allowed="what this share would make",
            hint="the same overrides, files and hfdist for all shares; those that differ again, or another run.name",
        )

    def _write(self, number: int, chunks: Iterator[TokenizedChunk]) -> None:
        """Write one token file of its chunks, and last its record."""
        paths = paths_of(self._folder, name_of(number))
        # The first offset is 0, and the others are sums of lengths.
        lengths, digests, bad_rows = array("q", [0]), array("Q"), list[int]()
        file_digest = hashlib.blake2b(digest_size=16)

        def write_tokens(file: BinaryIO) -> None:
            for chunk in chunks:
                bad_rows.extend(len(digests) + place for place in chunk.bad)
                lengths.extend(chunk.lengths)
                digests.extend(chunk.digests)
                file.write(chunk.tokens.data)
                file_digest.update(chunk.tokens.data)

        _write(paths.tokens, write_tokens)
        offsets = np.cumsum(np.asarray(lengths), dtype="<i8")
        for path, values in ((paths.offsets, offsets), (paths.digests, np.asarray(digests).astype("<u8"))):
            _write(path, partial(np.save, arr=values, allow_pickle=False))
            file_digest.update(values.data)
        record = FileRecord(
            name=name_of(number),
            rows=len(digests),
            tokens=int(offsets[-1]),
            digest=file_digest.hexdigest(),
            origins=_origins(self._files[number]),
            bad_rows=bad_rows,
        )
        _write_json(self._record_path(number), {"made_by": self._made_by(number), "record": asdict(record)})

    def _find_record(self, number: int) -> FileRecord | None:
        """Give the record of a file that a call has finished as this job would; None: there is no such file."""
        path = self._record_path(number)
        try:
            values = read_json(path)
            record = parse_record(values["record"], number)
            present = [file.stat().st_size for file in paths_of(self._folder, record.name)]
            is_made_so = values["made_by"] == list(self._made_by(number))
        # Whatever is damaged or missing is made again.
        except (DataError, KeyError, TypeError, ValueError, OSError):
            return None
        is_ours = is_made_so and record.origins == _origins(self._files[number])
        is_whole = present == list(sizes_of(record, self.dtype))
        return record if is_ours and is_whole else None

    def _made_by(self, number: int) -> _MadeBy:
        """Give all that decides the tokens of a file, besides its origins."""
        contents = [digests_of(shard.contents) for _, shard in self._files[number]]
        return _MadeBy(VERSION, self._digest, self.dtype, self._encoding, contents)

    def _record_path(self, number: int) -> Path:
        return self._folder / f"{name_of(number)}.json"

    def _lock_path(self, number: int) -> Path:
        return self._folder / f".lock-{name_of(number)}"

    def _save_tokenizer(self) -> None:
        """Save the tokenizer beside the files, and warn where it comes back as another one."""
        folder = self._folder / TOKENIZER
        self._tokenizer.save_pretrained(folder)
        try:
            is_same = tokenizer_digest(load_saved(folder)) == self._digest
        except DataError:
            is_same = False
        if not is_same:
            reason = "does not give the tokenizer as it was, such as one with code of its own"
            logger.warning("%s %s; train with the same model.tokenizer.name as now", folder, reason)


def _show(chunks: Iterator[TokenizedChunk], bar: tqdm[object]) -> Iterator[TokenizedChunk]:
    """Pass chunks on, and move a progress bar by their rows."""
    num_tokens = 0
    began = time.monotonic()
    for chunk in chunks:
        num_tokens += len(chunk.tokens)
        bar.set_postfix({"tok/s": f"{num_tokens / (time.monotonic() - began):,.0f}"}, refresh=False)
        bar.update(len(chunk.lengths))
        yield chunk


def _group(shards: Sequence[_NamedShard]) -> list[list[_NamedShard]]:
    """Give the shards of each token file, in order: small neighbours share a file, and a large shard has its own."""
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
    """Write a file whole. Its lock is held, so that what a killed process has left of it can be deleted."""
    remove_unfinished(path)
    write_atomically(path, content)


def _write_json(path: Path, values: Mapping[str, object]) -> None:
    _write(path, json.dumps(values).encode())


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turn errors of the folder into those for the user: ConfigError, or ResourceError for a full disk."""
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
