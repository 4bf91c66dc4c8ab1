"""What a model reads of one sequence of `train.global_batch_size`, as far as a config says it: rows, and their tokens.

Nothing is known of the run's texts, so each is as long as it may be: longer ones hold more.

    next tokens, scores     one row of data.sequence_length tokens
    labels                  one text; to rerank, a query with two texts, a row each
    embeddings              queries and positives as long as data.texts.max_tokens, or as half a sequence: packed, or,
                            where texts of a row would see each other, a row each
    hidden tokens           one document
    sources and targets     as data.pairs cuts them, else half a sequence each; of span corruption one document
"""

from __future__ import annotations

from dataclasses import dataclass

from hfdist.config.run import RunConfig
from hfdist.config.task import Head, TaskName

_NUM_TEXTS = 2
"""Texts of a pair; and to rerank, of a query: its positive, and one negative."""


@dataclass(frozen=True, kw_only=True)
class RowSizes:
    """What a model reads of one sequence."""

    rows: int = 1
    """Rows of a forward."""
    tokens: int
    """Tokens of a row; of an encoder-decoder, of its source."""
    targets: int = 0
    """Tokens of a target that a decoder writes; 0: there is none."""
    texts: int = 0
    """Texts that become embeddings."""
    text_tokens: int = 0
    """Tokens of each of them."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the model reads of a sequence."""
        return self.rows * (self.tokens + self.targets)


def row_sizes(config: RunConfig, *, is_apart: bool) -> RowSizes:
    """Find them. `is_apart`: whether each text has a row of its own (`takes_texts_apart`)."""
    length, head = config.data.sequence_length, config.task.name.traits.head
    if head is Head.none:
        return _of_texts(length, config.data.texts.max_tokens, is_apart=is_apart)
    if head.gives_labels:
        rows = _NUM_TEXTS if config.task.name is TaskName.rerank else 1
        return RowSizes(rows=rows, tokens=min(length, config.data.texts.max_tokens or length))
    if head is Head.targets:
        return _of_targets(config)
    return RowSizes(tokens=length)


def _of_texts(length: int, most: int | None, *, is_apart: bool) -> RowSizes:
    tokens = max(1, min(most or length, length // _NUM_TEXTS))
    texts = _NUM_TEXTS * max(1, length // (_NUM_TEXTS * tokens))
    if is_apart:
        return RowSizes(rows=texts, tokens=tokens, texts=texts, text_tokens=tokens)
    return RowSizes(tokens=length, texts=texts, text_tokens=tokens)


def _of_targets(config: RunConfig) -> RowSizes:
    length, task, pairs = config.data.sequence_length, config.task, config.data.pairs
    if task.name is TaskName.span_corruption:
        # A sentinel for each span in the source and in the target, and an end in both.
        num_noise, num_spans = task.count_spans(length)
        return RowSizes(tokens=length - num_noise + num_spans + 1, targets=num_noise + num_spans + 1)
    most = pairs.max_source_tokens, pairs.max_target_tokens
    target = min(length - 1, most[1] or (length // 2 if most[0] is None else max(1, length - most[0])))
    return RowSizes(tokens=min(length - target, most[0] or length), targets=target)
