"""The held-out set: documents that training skips, or those of sources of their own, packed once and cached."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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
"""Version of how documents are packed: with another one, the sets in the cache are made anew."""


class HeldOut(Dataset[dict[str, torch.Tensor]]):
    """Packed sequences of held-out documents.

    An item holds input_ids, position_ids and labels of shape [sequence_length]. With `one_each`, item k is one
    document, and also holds its origin (`ORIGINS`), in which the document has the number k.
    """

    def __init__(self, sequences: NDArray[np.int32], corpus: Corpus, *, one_each: bool = False) -> None:
        """Take `sequences`, shape [items, rows, sequence_length]: rows of `NAMES`, then perhaps document numbers."""
        self._sequences, self._corpus, self._has_one_each = sequences, corpus, one_each

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        rows = torch.from_numpy(self._sequences[index][: len(NAMES)].astype(np.int64))
        item = dict(zip(NAMES, rows, strict=True))
        if self._has_one_each:
            # Positions restart at 0 after the document, where tokens only fill the sequence up.
            starts = (rows[POSITION_IDS] == 0).nonzero().flatten()
            length = int(starts[1]) if len(starts) > 1 else rows.shape[1]
            # The item's number stands for a document: it is the same in every evaluation.
            item[ORIGINS] = torch.tensor([[index, 0, 0, length]])
        return item

    def columns(self, index: int) -> Iterator[Mapping[str, object]]:
        """Give the other columns of each document of an item, in order; none where `data.keep_columns` is off."""
        for numbers in self._sequences[index][len(NAMES) :]:
            documents = numbers[numbers >= 0].tolist()
            found = self._corpus.columns(documents)
            yield from (found[number] for number in documents)


HeldOutSet = HeldOut | HeldOutImages


class HeldOutSources(ConcatDataset[dict[str, torch.Tensor]]):
    """The held-out sets of several sources as one set, one after the other."""

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
    """Pack held-out documents into at most `data.eval_sequences` sequences; None: `data.eval_fraction` is 0.

    Texts go end to end, whatever `data.packing` is for training. A last sequence that is not full is left out, unless
    all documents are held out. Examples stay whole. With `one_each` or `images`, a sequence is a single document.

    Raises:
        DataError: The held-out documents do not fill one sequence, or there is nothing to learn in them.
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
    """Hash all that decides a set. New settings come last, and only where they are used: older sets keep their keys."""
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
    """Open the sources of `data.eval_sources`, and pack all documents of each as `build_held_out` does.

    Raises:
        ConfigError, DataError: A source is missing, unreadable or empty.
    """
    check_token_sources(config.eval_sources, Encoders.of(tokenizer, config))
    parts = {}
    for name, source in config.eval_sources.items():
        alone = replace(
            config, sources={name: source}, eval_sources={}, eval_fraction=1.0, anneal=[], quarantine=[], lanes=1
        )
        corpus = open_corpus(alone, section="data.eval_sources")
        held_out = build_held_out(corpus, tokenizer, alone, images, one_each=one_each)
        assert held_out is not None  # eval_fraction is 1
        parts[name] = held_out
    return HeldOutSources(parts)


def _read(corpus: Corpus, encoders: Encoders, config: DataConfig, counts: HeldOutCounts) -> Iterator[DocumentBatch]:
    """Give the held-out documents in mixed order, and count them while they are read."""
    documents = Documents(corpus, encoders, open_token_cache(config), config, held_out=True)
    for block in corpus.mixed_blocks():
        for chunk in documents.chunks(np.array(block)):
            counts.add(chunk)
            yield chunk


def _take_each(corpus: Corpus, encoders: Encoders, config: DataConfig) -> NDArray[np.int32]:
    """Give the first documents that have tokens as rows of one array; DataError: there is none."""
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
    """Give the first packed sequences, shape [items, rows, sequence_length]; DataError: there is none."""
    counts = HeldOutCounts()
    chunks = _read(corpus, encoders, config, counts)
    shape = Shape(config.longest_row, fill_id=0)
    placed = ((Place(0, int(chunk.numbers[0])), chunk) for chunk in chunks)
    if one_each:
        alone = windows.one_each(placed, 0, shape, ("held out",))
        packed = (_filled_up(rows, shape) for _, rows in _with_targets(alone))
    elif corpus.has_examples:
        fitted = windows.best_fit(placed, 0, shape, ("held out",))
        packed = (_with_documents(sequence, rows, config) for sequence, rows in _with_targets(fitted))
    else:
        fewest = 1 if config.eval_fraction == 1 else shape.length
        packed = (sequence.rows for sequence in concat(placed, shape) if sequence.num_tokens >= fewest)
    sequences = list(islice(packed, config.eval_sequences))
    if not sequences:
        raise explain_nothing(corpus, config, counts)
    return np.stack(sequences)


def _with_targets(sequences: Iterable[PackedSequence]) -> Iterator[tuple[PackedSequence, NDArray[np.int32]]]:
    """Give the sequences in which something is learned, each with its rows."""
    for sequence in sequences:
        # The rows are made when they are asked for.
        rows = sequence.rows
        if (rows[LABELS] != IGNORED).any():
            yield sequence, rows


def _filled_up(rows: NDArray[np.int32], shape: Shape) -> NDArray[np.int32]:
    """Fill the rows of one document up to the length of a sequence; the filling is a document without targets."""
    filled = np.full((len(rows), shape.length), shape.fill_id, dtype=np.int32)
    filled[:, : rows.shape[1]] = rows
    filled[LABELS, rows.shape[1] :] = IGNORED
    filled[POSITION_IDS, rows.shape[1] :] = np.arange(shape.length - rows.shape[1])
    return filled


def _with_documents(sequence: PackedSequence, rows: NDArray[np.int32], config: DataConfig) -> NDArray[np.int32]:
    """Add a row of the numbers of the documents, in their order, -1 after them; only where columns are kept."""
    if not config.keep_columns:
        return rows
    documents = numbers_of(sequence.records)
    filled = np.pad(documents, (0, rows.shape[1] - len(documents)), constant_values=-1)
    return np.vstack([rows, filled]).astype(np.int32)
