"""Span corruption: spans of a document are left out, and a decoder writes them (T5, arXiv 1910.10683).

    document      a b c d e f g h </s>      drawn by (seed, document, epoch)
    left out          - -     -             spans of `mean_noise_span_length` tokens, a share `noise_density` of all
    source        a b <0> e f <1> h </s>    a sentinel, another one for each span, stands in the place of a span
    target        <0> c d <1> g </s>        each sentinel, and what it stands for

The number of tokens left out, and of spans, are rounded as in T5's own code; lengths of spans and of what is between
them are drawn so that each way to part the tokens is as likely as any other. A document begins with what is kept.
"""

from __future__ import annotations

import re
from bisect import bisect_right

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hfdist.config.task import TaskConfig
from hfdist.errors import ConfigError
from hfdist.models.target_loss import pad_pairs
from hfdist.strategies.engine import Batch
from hfdist.tune.drawn_documents import Ids, drawn_documents
from hfdist.tune.seq2seq import SequenceToSequence

_SENTINEL = re.compile(r"<extra_id_([0-9]{1,6})>")
_LEAST_TOKENS = 2
"""Tokens of the shortest document of which one can be left out and one kept."""


def find_sentinels(tokenizer: PreTrainedTokenizerBase, task: TaskConfig, sequence_length: int) -> Ids:
    """Give the ids of sentinels, in the order in which spans take them.

    Raises:
        ConfigError: the tokenizer has fewer than the spans of the longest document.
    """
    found = sorted(
        (int(match[1]), number) for token, number in tokenizer.get_vocab().items()
        if (match := _SENTINEL.fullmatch(token))
    )  # fmt: skip
    _, needed = task.count_spans(max(sequence_length, _LEAST_TOKENS))
    if len(found) < needed:
        # Longer documents have as many spans or more.
        fits = (
            bisect_right(range(sequence_length), len(found), lo=_LEAST_TOKENS, key=lambda n: task.count_spans(n)[1]) - 1
        )
        raise ConfigError(
            "the tokenizer has fewer sentinels (<extra_id_0> ...) than spans are left out of the longest sequence",
            where="model.tokenizer.name, data.sequence_length",
            found=f"{len(found)} sentinels, {needed} spans of {sequence_length:,} tokens",
            allowed="a tokenizer with a sentinel for each span, such as T5's with 100",
            hint=f"data.sequence_length={fits}" if found else "a tokenizer such as that of t5-small",
        )
    return np.array([number for _, number in found], dtype=np.int64)


def draw_spans(num_tokens: int, task: TaskConfig, generator: np.random.Generator) -> list[tuple[int, int]]:
    """Draw where the spans that are left out begin and end; at least two tokens."""
    num_noise, num_spans = task.count_spans(num_tokens)
    lengths = np.stack([_part(num_tokens - num_noise, num_spans, generator), _part(num_noise, num_spans, generator)], 1)
    borders = lengths.flatten().cumsum()
    return list(zip(borders[0::2].tolist(), borders[1::2].tolist(), strict=True))


def _part(num_items: int, num_parts: int, generator: np.random.Generator) -> Ids:
    """Part items into parts of at least one each, every way as likely as any other; shape [num_parts]."""
    borders = np.sort(generator.permutation(num_items - 1)[: num_parts - 1]) + 1
    return np.diff([0, *borders, num_items])


class SpanCorruption(SequenceToSequence):
    """The objective of span corruption; its items are the tokens of targets: sentinels, spans and ends.

    Args:
        task: `task.*` of the run.
        seed: of the spans.
        tokenizer: ends texts with its end token, and has sentinels.
        sequence_length: tokens of the longest document.
    """

    def __init__(self, task: TaskConfig, seed: int, tokenizer: PreTrainedTokenizerBase, sequence_length: int) -> None:
        super().__init__()
        self._task, self._seed, self._end = task, seed, tokenizer.eos_token_id
        self._sentinels = find_sentinels(tokenizer, task, sequence_length)

    def prepare(self, batch: Batch) -> Batch:
        """Leave spans out; each document, or piece of one, becomes a row of its own."""
        drawn = [self.corrupt(ids, generator) for ids, generator in drawn_documents(batch, self._seed)]
        # A batch of nothing is read, too, as ranks take part in each forward.
        rows = drawn or [(np.zeros(1, dtype=np.int64), np.zeros(0, dtype=np.int64))]
        return pad_pairs([[torch.from_numpy(side) for side in row] for row in rows])

    def corrupt(self, ids: Ids, generator: np.random.Generator) -> tuple[Ids, Ids]:
        """Give the source and the target of a document, each of shape [tokens]; a very short one has no target."""
        end = np.array([self._end], dtype=np.int64)
        text = ids[:-1] if len(ids) and ids[-1] == self._end else ids
        if len(text) < _LEAST_TOKENS:
            return np.concatenate([text, end]), end[:0]
        source, target, kept = [], [], 0
        spans = draw_spans(len(text), self._task, generator)
        for sentinel, (start, stop) in zip(self._sentinels[: len(spans), None], spans, strict=True):
            source += [text[kept:start], sentinel]
            target += [sentinel, text[start:stop]]
            kept = stop
        return np.concatenate([*source, text[kept:], end]), np.concatenate([*target, end])
