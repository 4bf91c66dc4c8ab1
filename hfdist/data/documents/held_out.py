"""The held-out set: documents that training skips, or sources of their own, packed once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Dataset
from transformers import PreTrainedTokenizerBase

from hfdist.config.data import DataConfig, cache_dir
from hfdist.data.cache import cached_array, digest_of
from hfdist.data.documents.corpus import Corpus, open_corpus
from hfdist.data.documents.held_out_images import HeldOutImages, ImageRow, write_rows
from hfdist.data.documents.nothing_held_out import HeldOutCounts, explain_nothing
from hfdist.data.documents.token_reader import Documents, open_token_cache
from hfdist.data.order.lane_state import Place
from hfdist.data.order.records import numbers_of
from hfdist.data.packing import windows
from hfdist.data.packing.concat import concat
from hfdist.data.packing.sequence import (
    IGNORED,
    LABELS,
    NAMES,
    ORIGINS,
    POSITION_IDS,
    PackedSequence,
    Shape,
)
from hfdist.data.packing.windows import RULE
from hfdist.data.sources.document_batch import DocumentBatch
from hfdist.data.tokenization.encoders import Encoders, check_token_sources
from hfdist.data.tokenization.image_tokens import ImageTokens

_FORMAT = 4
"""Raise it when the same documents are packed in another way: sets in the cache are made anew."""


class HeldOut(Dataset[dict[str, torch.Tensor]]):
    """Packed sequences; item k holds input_ids, position_ids and labels of shape [sequence_length].

    With `one_each` it also holds its document as its only origin (`ORIGINS`); it has the number k.
    """

    def __init__(self, sequences: NDArray[np.int32], corpus: Corpus, *, one_each: bool = False) -> None:
        self._sequences, self._corpus, self._has_one_each = sequences, corpus, one_each

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        rows = torch.from_numpy(self._sequences[index][: len(NAMES)].astype(np.int64))
        item = dict(zip(NAMES, rows, strict=True))
        if self._has_one_each:
            # The filling begins where positions restart.
            begins = (rows[POSITION_IDS] == 0).nonzero().flatten()
            length = int(begins[1]) if len(begins) > 1 else rows.shape[1]
            # The item's number stands for a document: it is the same in every evaluation.
            item[ORIGINS] = torch.tensor([[index, 0, 0, length]])
        return item

    def columns(self, index: int) -> Iterator[Mapping[str, object]]:
        """Give the other columns of the row of each document of an item; nothing at all without them."""
        for numbers in self._sequences[index][len(NAMES) :]:
            documents = numbers[numbers >= 0].tolist()
            found = self._corpus.columns(documents)
            yield from (found[number] for number in documents)


HeldOutSet = HeldOut | HeldOutImages


class HeldOutSources(ConcatDataset[dict[str, torch.Tensor]]):
    """Several held-out sets, one after the other."""

    def __init__(self, parts: Mapping[str, HeldOutSet]) -> None:
        super().__init__(parts.values())
        self.parts = parts
        """Held-out sets by the names of their sources."""


def build_held_out(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    images: ImageTokens | None = None,
    *,
    one_each: bool = False,
) -> HeldOutSet | None:
    """Pack held-out documents into at most `data.eval_sequences` sequences; None where `data.eval_fraction` is 0.

    Text goes end to end, whatever `data.packing` is for training, without a last sequence that does not fill up (unless
    all documents are held out); examples stay whole. With `one_each` a sequence is one document, filled up; with
    `images` it is one, too, with its images.

    Raises:
        DataError: the held-out documents do not fill one sequence.
    """
    if config.eval_fraction == 0:
        return None
    encoders = Encoders.of(tokenizer, config, images)
    path = cache_dir(config) / "held_out" / f"{_cache_key(corpus, encoders, config, one_each)}.npy"
    if images is not None:
        rows = cached_array(path, lambda: _take_each(corpus, encoders, config))
        return HeldOutImages(rows, corpus, images, config)
    return HeldOut(cached_array(path, lambda: _pack(corpus, encoders, config, one_each)), corpus, one_each=one_each)


def _cache_key(corpus: Corpus, encoders: Encoders, config: DataConfig, one_each: bool) -> str:
    """Hash all that decides a set. Sets that an older version has cached keep their keys: new settings come last."""
    settings = [config.sequence_length, config.eval_sequences, sorted(corpus.quarantined), config.too_long.value]
    if corpus.has_examples:
        settings.append(RULE)
    if config.keep_columns and corpus.has_examples:
        settings.append("documents")
    if one_each:
        settings.append("one each")
    tokens = encoders.digest(examples=corpus.has_examples)
    return digest_of([_FORMAT, corpus.local_fingerprint, tokens, *settings])


def open_held_out_sources(
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    images: ImageTokens | None = None,
    *,
    one_each: bool = False,
) -> HeldOutSources:
    """Open and pack `data.eval_sources`; arguments as of `build_held_out`.

    Raises:
        ConfigError, DataError: one is missing, unreadable or empty.
    """
    check_token_sources(config.eval_sources, Encoders.of(tokenizer, config))
    parts = {}
    for name, source in config.eval_sources.items():
        alone = replace(
            config, sources={name: source}, eval_sources={}, eval_fraction=1.0, anneal=[], quarantine=[], lanes=1
        )
        corpus = open_corpus(alone, section="data.eval_sources")
        held_out = build_held_out(corpus, tokenizer, alone, images, one_each=one_each)
        assert held_out is not None
        parts[name] = held_out
    return HeldOutSources(parts)


def _read(corpus: Corpus, encoders: Encoders, config: DataConfig, counts: HeldOutCounts) -> Iterator[DocumentBatch]:
    """Give the held-out documents, which are counted as they are read."""
    documents = Documents(corpus, encoders, open_token_cache(config), config, held_out=True)
    return (counts.add(chunk) for block in corpus.mixed_blocks() for chunk in documents.chunks(np.array(block)))


def _take_each(corpus: Corpus, encoders: Encoders, config: DataConfig) -> NDArray[np.int32]:
    """Give the first documents that have tokens, a row each."""
    counts = HeldOutCounts()
    rows = (
        ImageRow(document, tokens)
        for chunk in _read(corpus, encoders, config, counts)
        for document, tokens in zip(chunk.numbers.tolist(), chunk.views(), strict=True)
        if len(tokens)
    )
    found = list(islice(rows, config.eval_sequences))
    if not found:
        raise explain_nothing(corpus, config, counts)
    return write_rows(found)


def _pack(corpus: Corpus, encoders: Encoders, config: DataConfig, one_each: bool) -> NDArray[np.int32]:
    counts = HeldOutCounts()
    chunks = _read(corpus, encoders, config, counts)
    shape = Shape(config.longest_row, fill_id=0)
    takes_all = config.eval_fraction == 1
    placed = ((Place(0, int(chunk.numbers[0])), chunk) for chunk in chunks)
    if one_each:
        alone = (one.rows for one in windows.one_each(placed, 0, shape, ("held out",)))
        packed = (_filled_up(rows, shape) for rows in alone if (rows[LABELS] != IGNORED).any())
    elif corpus.has_examples:
        fitted = ((one, one.rows) for one in windows.best_fit(placed, 0, shape, ("held out",)))
        packed = (_with_documents(one, rows, config) for one, rows in fitted if (rows[LABELS] != IGNORED).any())
    else:
        ends = concat(placed, shape)
        packed = (one.rows for one in ends if one.num_tokens == shape.length or (takes_all and one.num_tokens))
    sequences = list(islice(packed, config.eval_sequences))
    if not sequences:
        raise explain_nothing(corpus, config, counts)
    return np.stack(sequences)


def _filled_up(rows: NDArray[np.int32], shape: Shape) -> NDArray[np.int32]:
    """Fill the rows of one document up to the length of a sequence, as a document of its own."""
    filled = np.full((len(rows), shape.length), shape.fill_id, dtype=np.int32)
    filled[:, : rows.shape[1]] = rows
    filled[LABELS, rows.shape[1] :] = IGNORED
    filled[POSITION_IDS, rows.shape[1] :] = np.arange(shape.length - rows.shape[1])
    return filled


def _with_documents(sequence: PackedSequence, rows: NDArray[np.int32], config: DataConfig) -> NDArray[np.int32]:
    """Add a row that begins with the numbers of the documents, in their order; -1 after them."""
    if not config.keep_columns:
        return rows
    documents = numbers_of(sequence.records)
    filled = np.pad(documents, (0, rows.shape[1] - len(documents)), constant_values=-1)
    return np.vstack([rows, filled]).astype(np.int32)
