"""The held-out set: documents that training skips, or sources of their own, packed once; and prompts from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Dataset
from transformers import PreTrainedTokenizerBase

from hfdist.config.data import DataConfig, cache_dir
from hfdist.data.cache import digest_of, load_array, write_once
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

_FEWEST_TOKENS = 4
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
    key = digest_of([4, corpus.local_fingerprint, tokens, *settings])
    path = cache_dir(config) / "held_out" / f"{key}.npy"
    write_once(path, lambda file: np.save(file, _pack(corpus, tokenizer, config), allow_pickle=False))
    return HeldOut(load_array(path), corpus)


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
        """Count it, and give it on."""
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
    takes_all, none = config.eval_fraction == 1, "data.eval_fraction=0, which evaluates nothing"
    where = (
        ", ".join(f"data.eval_sources.{name}" for name in corpus.source_names) if takes_all else "data.eval_fraction"
    )
    if takes_all or (corpus.has_examples and tally.num_drawn):
        what = "there is nothing to learn in the held-out documents"
        found = f"{corpus.num_documents if takes_all else tally.num_drawn:,} documents: {tally}"
        hint: str | None
        if tally.fates[Status.too_long]:
            hint = "a larger data.sequence_length"
        elif tally.fates[Status.no_target]:
            roles, hint = explain_no_targets(corpus, config)
            found = f"{found}; {roles}" if roles else found
        else:
            hint = None if takes_all else none
        return DataError(what, where=where, found=found, hint=hint)
    if not tally.num_drawn:
        what = "no document was drawn for the held-out set"
        found = f"{config.eval_fraction:g} of {corpus.num_documents:,} documents"
        if tally.fates[Status.bad]:
            found = f"{found}, of which {tally.fates[Status.bad]:,} were left out as bad"
            if tally.fates[Status.bad] == corpus.num_documents:
                return DataError(what, where=where, found=found, hint="data.on_bad_rows=error shows what is wrong")
        elif corpus.num_documents and not corpus.has_examples and not corpus.text(0).strip():
            return DataError("the documents are empty", where=where, found=found, allowed="documents with text")
        elif corpus.searches_held_out:
            found = f"{found}, which are all alike or empty" if corpus.num_documents > 1 else found
            return DataError(what, where=where, found=found, allowed="documents that differ", hint=none)
        wanted = _LIKELY_DOCUMENTS / max(corpus.num_documents, 1)
        allowed = "a share that holds some documents; 0: no held-out set"
    else:
        what = "the held-out documents do not fill one sequence"
        found = f"{tally.num_drawn:,} documents of {tally.num_tokens:,} tokens"
        wanted = 2 * config.eval_fraction * config.sequence_length / max(tally.num_tokens, 1)
        allowed = f"data.sequence_length={config.sequence_length:,} tokens or more; 0: no held-out set"
    hint = f"data.eval_fraction={min(wanted, _LARGEST_SHARE):.1g}, or {none}"
    if wanted > _LARGEST_SHARE:
        hint = f"a smaller data.sequence_length, or {none}" if tally.num_drawn else none
    return DataError(what, where=where, found=found, allowed=allowed, hint=hint)


@dataclass(frozen=True, kw_only=True)
class Example:
    """Token ids of a prompt, and of its continuation in the data."""

    prompt: list[int]
    reference: list[int]
    columns: Mapping[str, object] = field(default_factory=dict)
    """The other columns of its row, where they are kept."""


def take_examples(held_out: object, num_examples: int) -> list[Example]:
    """Give the first examples of a held-out set; of several sources about equally many of each.

    Items have `input_ids` and `labels` of shape [tokens], and `position_ids` where they hold several documents.
    """
    parts = list(held_out.parts.values()) if isinstance(held_out, HeldOutSources) else [held_out]
    shares = [num_examples // len(parts) + (place < num_examples % len(parts)) for place in range(len(parts))]
    return [example for part, share in zip(parts, shares, strict=True) for example in islice(_examples(part), share)]


def _examples(items: Any) -> Iterator[Example]:
    for index in range(len(items)):
        columns = items.columns(index) if isinstance(items, HeldOut) else iter(())
        for ids, labels in documents_of(items[index]):
            example, own = split_document(ids, labels), next(columns, {})
            if example is not None:
                yield replace(example, columns=own)


def documents_of(item: Mapping[str, torch.Tensor]) -> Iterator[tuple[list[int], list[int]]]:
    """Give token ids and labels of each document of an item: where positions restart, one begins."""
    ids, labels = item["input_ids"].tolist(), item["labels"].tolist()
    positions = item["position_ids"].tolist() if "position_ids" in item else [0] + [1] * (len(ids) - 1)
    starts = [place for place, position in enumerate(positions) if position == 0]
    for start, stop in zip(starts, [*starts[1:], len(ids)], strict=True):
        yield ids[start:stop], labels[start:stop]


def split_document(ids: Sequences[int], labels: Sequences[int]) -> Example | None:
    """Give what comes before the first target as the prompt, and the first run of targets as the reference.

    Of a document of which all is to be learned, as of plain text: its first half, and its second. None: it has no
    target, or hardly any tokens.
    """
    targets = [place for place, label in enumerate(labels) if label != IGNORED]
    if not targets or len(ids) < _FEWEST_TOKENS:
        return None
    first = targets[0]
    if first <= 1:
        # The very first token is never a target.
        first = len(ids) // 2
    stop = next((place for place in range(first, len(ids)) if labels[place] == IGNORED), len(ids))
    return Example(prompt=list(ids[:first]), reference=list(ids[first:stop])) if stop > first else None
