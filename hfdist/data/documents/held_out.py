"""The held-out set: documents that training skips, or sources of their own, packed once."""

from __future__ import annotations

from collections import Counter
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
from hfdist.data.documents.first_examples import explain_no_targets
from hfdist.data.documents.token_reader import Documents, open_token_cache
from hfdist.data.order.cursor import Place
from hfdist.data.order.records import Status, numbers_of
from hfdist.data.packing.concat import concat
from hfdist.data.packing.sequence import IGNORED, LABELS, NAMES, Sequence, Shape
from hfdist.data.packing.windows import RULE, best_fit
from hfdist.data.sources.document_batch import DocumentBatch
from hfdist.data.tokenization.encoders import Encoders, check_token_sources
from hfdist.errors import DataError

_FORMAT = 4
"""To be counted up when the same documents are packed into other sequences."""
_SHARE = "data.eval_fraction"
_EVALUATE_NOTHING = f"{_SHARE}=0, which evaluates nothing"
_LIKELY_DOCUMENTS = 10
"""A share of so many documents on average holds some."""
_LARGEST_SHARE = 0.5


class HeldOut(Dataset[dict[str, torch.Tensor]]):
    """Packed sequences; item k holds input_ids, position_ids and labels of shape [sequence_length]."""

    def __init__(self, sequences: NDArray[np.int32], corpus: Corpus) -> None:
        self._sequences, self._corpus = sequences, corpus

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        rows = torch.from_numpy(self._sequences[index][: len(NAMES)].astype(np.int64))
        return dict(zip(NAMES, rows, strict=True))

    def columns(self, index: int) -> Iterator[Mapping[str, object]]:
        """Give the other columns of the row of each document of an item; nothing at all without them."""
        for numbers in self._sequences[index][len(NAMES) :]:
            documents = numbers[numbers >= 0].tolist()
            found = self._corpus.columns(documents)
            yield from (found[number] for number in documents)


class HeldOutSources(ConcatDataset[dict[str, torch.Tensor]]):
    """Several held-out sets, one after the other."""

    def __init__(self, parts: dict[str, HeldOut]) -> None:
        super().__init__(parts.values())
        self.parts = parts
        """Held-out sets by the names of their sources."""


def build_held_out(corpus: Corpus, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> HeldOut | None:
    """Pack held-out documents into at most `data.eval_sequences` sequences; None where `data.eval_fraction` is 0.

    Text goes end to end, whatever `data.packing` is for training, without a last sequence that does not fill up (unless
    all documents are held out); examples stay whole.

    Raises:
        DataError: the held-out documents do not fill one sequence.
    """
    if config.eval_fraction == 0:
        return None
    settings = [config.sequence_length, config.eval_sequences, sorted(corpus.quarantined), config.too_long.value]
    if corpus.has_examples:
        settings.append(RULE)
    if config.keep_columns:
        settings.append("documents")
    tokens = Encoders(tokenizer, config.chat).digest(examples=corpus.has_examples)
    key = digest_of([_FORMAT, corpus.local_fingerprint, tokens, *settings])
    path = cache_dir(config) / "held_out" / f"{key}.npy"
    return HeldOut(cached_array(path, lambda: _pack(corpus, tokenizer, config)), corpus)


def open_held_out_sources(tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> HeldOutSources:
    """Open and pack `data.eval_sources`; ConfigError or DataError where one is missing, unreadable or empty."""
    check_token_sources(config.eval_sources, Encoders(tokenizer, config.chat))
    parts = {}
    for name, source in config.eval_sources.items():
        alone = replace(
            config, sources={name: source}, eval_sources={}, eval_fraction=1.0, anneal=[], quarantine=[], lanes=1
        )
        held_out = build_held_out(open_corpus(alone, section="data.eval_sources"), tokenizer, alone)
        assert held_out is not None
        parts[name] = held_out
    return HeldOutSources(parts)


def _pack(corpus: Corpus, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> NDArray[np.int32]:
    encoders = Encoders(tokenizer, config.chat)
    documents = Documents(corpus, encoders, open_token_cache(config), config, held_out=True)
    tally = _Tally()
    chunks = (tally.add(chunk) for block in corpus.mixed_blocks() for chunk in documents.chunks(np.array(block)))
    shape = Shape(config.sequence_length, fill_id=0)
    takes_all = config.eval_fraction == 1
    placed = ((Place(0, int(chunk.numbers[0])), chunk) for chunk in chunks)
    if corpus.has_examples:
        fitted = ((one, one.rows) for one in best_fit(placed, 0, shape, ("held out",)))
        packed = (_with_documents(one, rows, config) for one, rows in fitted if (rows[LABELS] != IGNORED).any())
    else:
        ends = concat(placed, shape)
        packed = (one.rows for one in ends if one.num_tokens == shape.length or (takes_all and one.num_tokens))
    sequences = list(islice(packed, config.eval_sequences))
    if not sequences:
        raise _nothing_held_out(corpus, config, tally)
    return np.stack(sequences)


def _with_documents(sequence: Sequence, rows: NDArray[np.int32], config: DataConfig) -> NDArray[np.int32]:
    """Add a row that begins with the numbers of the documents, in their order; -1 after them."""
    if not config.keep_columns:
        return rows
    documents = numbers_of(sequence.records)
    filled = np.pad(documents, (0, rows.shape[1] - len(documents)), constant_values=-1)
    return np.vstack([rows, filled]).astype(np.int32)


class _Tally:
    """What became of the documents that were read for a held-out set."""

    def __init__(self) -> None:
        self.fates: Counter[int] = Counter()
        self.num_tokens = 0

    def add(self, chunk: DocumentBatch) -> DocumentBatch:
        """Count the documents of a chunk, and give the chunk on."""
        self.fates.update(chunk.fates.tolist())
        self.num_tokens += int(chunk.lengths.sum())
        return chunk

    @property
    def num_drawn(self) -> int:
        """Documents on this side of the split that have a text; nobody knows the side of a bad one."""
        return self.fates.total() - sum(self.fates[fate] for fate in (Status.held_out, Status.empty, Status.bad))

    def __str__(self) -> str:
        """Name the reasons for which documents are left out."""
        reasons = {Status.no_target: "without a target", Status.too_long: "too long", Status.bad: "bad",
                   Status.empty: "empty", Status.quarantined: "quarantined"}  # fmt: skip
        counted = [f"{self.fates[fate]:,} {words}" for fate, words in reasons.items() if self.fates[fate]]
        return ", ".join(counted) or f"{self.num_tokens:,} tokens"


def _nothing_held_out(corpus: Corpus, config: DataConfig, tally: _Tally) -> DataError:
    """Say why there is no sequence, by what was found, and what changes that."""
    if config.eval_fraction == 1 or (corpus.has_examples and tally.num_drawn):
        return _nothing_to_learn(corpus, config, tally)
    if not tally.num_drawn:
        return _none_drawn(corpus, config, tally)
    return _too_few_tokens(config, tally)


def _nothing_to_learn(corpus: Corpus, config: DataConfig, tally: _Tally) -> DataError:
    """Say why no held-out document has a target: of examples, or of sources that are held out as a whole."""
    takes_all = config.eval_fraction == 1
    found = f"{corpus.num_documents if takes_all else tally.num_drawn:,} documents: {tally}"
    hint: str | None = None if takes_all else _EVALUATE_NOTHING
    if tally.fates[Status.too_long]:
        hint = "a larger data.sequence_length"
    elif tally.fates[Status.no_target]:
        roles, hint = explain_no_targets(corpus, config)
        found = f"{found}; {roles}" if roles else found
    sources = ", ".join(f"data.eval_sources.{name}" for name in corpus.source_names)
    return DataError(
        "there is nothing to learn in the held-out documents",
        where=sources if takes_all else _SHARE,
        found=found,
        hint=hint,
    )


def _none_drawn(corpus: Corpus, config: DataConfig, tally: _Tally) -> DataError:
    """Say why no document stands on the held-out side."""
    what = "no document was drawn for the held-out set"
    found = f"{config.eval_fraction:g} of {corpus.num_documents:,} documents"
    if tally.fates[Status.bad]:
        found = f"{found}, of which {tally.fates[Status.bad]:,} were left out as bad"
        if tally.fates[Status.bad] == corpus.num_documents:
            return DataError(what, where=_SHARE, found=found, hint="data.on_bad_rows=error shows what is wrong")
    elif corpus.num_documents and not corpus.has_examples and not corpus.text(0).strip():
        return DataError("the documents are empty", where=_SHARE, found=found, allowed="documents with text")
    elif corpus.searches_held_out:
        found = f"{found}, which are all alike or empty" if corpus.num_documents > 1 else found
        return DataError(what, where=_SHARE, found=found, allowed="documents that differ", hint=_EVALUATE_NOTHING)
    return DataError(
        what,
        where=_SHARE,
        found=found,
        allowed="a share that holds some documents; 0: no held-out set",
        hint=_hint_of_share(_LIKELY_DOCUMENTS / max(corpus.num_documents, 1), _EVALUATE_NOTHING),
    )


def _too_few_tokens(config: DataConfig, tally: _Tally) -> DataError:
    """Say that the text of the held-out documents is shorter than a sequence."""
    wanted = 2 * config.eval_fraction * config.sequence_length / max(tally.num_tokens, 1)
    return DataError(
        "the held-out documents do not fill one sequence",
        where=_SHARE,
        found=f"{tally.num_drawn:,} documents of {tally.num_tokens:,} tokens",
        allowed=f"data.sequence_length={config.sequence_length:,} tokens or more; 0: no held-out set",
        hint=_hint_of_share(wanted, f"a smaller data.sequence_length, or {_EVALUATE_NOTHING}"),
    )


def _hint_of_share(wanted: float, otherwise: str) -> str:
    """Give the share that is wanted, or what helps `otherwise` where the share would be too large."""
    if wanted > _LARGEST_SHARE:
        return otherwise
    return f"data.eval_fraction={wanted:.1g}, or {_EVALUATE_NOTHING}"
