"""Rerankers (cross-encoders): a model reads a query together with a text, and scores how well the text answers it.

A query has its own text first, and others after it. The losses of `task.loss`:

bce       cross entropy of each pair of query and text: the target is 1 for the query's own text, 0 for others
ranknet   -log sigmoid(score of the own text - score of another), the mean over the others (Burges et al., 2005)
softmax   cross entropy of the scores of a query's texts, at its own text
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, logsigmoid
from transformers import PreTrainedTokenizerBase

from hfdist.config.task import TaskConfig, TaskLoss
from hfdist.strategies.engine import Batch
from hfdist.tune.classify import TextsWithLabels
from hfdist.tune.labelled_texts import LABELS, have_labels


class Ranking(TextsWithLabels):
    """Ranks the texts of queries. An item is a pair with `bce`; with other losses a query that has other texts."""

    names = ("recall_at_1", "mrr")
    """Share of queries whose own text is first, and the mean of 1 / the place of the own text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, task: TaskConfig) -> None:
        super().__init__(tokenizer)
        self._loss = task.loss

    def count(self, batch: Batch) -> torch.Tensor:
        """Count the items."""
        batch = self.prepare(batch)
        is_pair = have_labels(batch)
        if self._loss is TaskLoss.bce:
            return is_pair.sum()
        return (torch.bincount(_Pairs.of(batch, is_pair).queries) > 1).sum()

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Sum the losses of the items of a prepared batch."""
        is_pair = have_labels(batch)
        scores = self.read(model, batch)[is_pair].squeeze(-1)
        pairs = _Pairs.of(batch, is_pair)
        self._note_places(scores.detach(), pairs)
        if self._loss is TaskLoss.bce:
            return binary_cross_entropy_with_logits(scores, pairs.is_own.to(scores), reduction="sum")
        if self._loss is TaskLoss.softmax:
            by_query = _by_query(scores, pairs.queries, -torch.inf)
            # The own text is the first. A query without others has the loss 0.
            return cross_entropy(by_query, pairs.queries.new_zeros(len(by_query)), reduction="sum")
        is_other = ~pairs.is_own
        losses = -logsigmoid((pairs.own_scores(scores) - scores)[is_other])
        queries = pairs.queries[is_other]
        num_others = torch.bincount(queries, minlength=int(pairs.is_own.sum()))
        return (losses / num_others[queries]).sum()

    def _note_places(self, scores: torch.Tensor, pairs: _Pairs) -> None:
        """Note the place of each query's own text among its texts; one with the same score comes before it."""
        is_before = scores >= pairs.own_scores(scores)  # the own text counts itself, so that places begin with 1
        places = torch.zeros_like(scores[pairs.is_own]).index_add(0, pairs.queries, is_before.to(scores))
        ones = torch.ones_like(places, dtype=torch.bool)
        self._note(ones, {"recall_at_1": (places == 1).float(), "mrr": 1 / places.clamp(min=1)})


class _Pairs(NamedTuple):
    """The pairs of query and text in a batch, in order; both tensors have the shape [pairs]."""

    is_own: torch.Tensor
    """Whether the text belongs to the query: it is the query's first."""
    queries: torch.Tensor
    """Number of the query, from 0 on."""

    @classmethod
    def of(cls, batch: Batch, is_pair: torch.Tensor) -> _Pairs:
        """Find the pairs of a batch, where `is_pair` says that there is one; shape [rows, texts]."""
        is_own = batch[LABELS][..., 0][is_pair] == 1
        return cls(is_own, is_own.long().cumsum(0) - 1)

    def own_scores(self, scores: torch.Tensor) -> torch.Tensor:
        """Give for each pair the score of its query's own text; shape [pairs]."""
        return scores[self.is_own][self.queries]


def _by_query(scores: torch.Tensor, queries: torch.Tensor, fill: float) -> torch.Tensor:
    """Put the scores of each query in a row, its own text first; shape [queries, most texts]."""
    num_texts = torch.bincount(queries)
    most_texts = int(num_texts.max()) if len(num_texts) else 1
    firsts = num_texts.cumsum(0) - num_texts
    places = torch.arange(len(queries), device=queries.device) - firsts[queries]
    return scores.new_full((len(num_texts), most_texts), fill).index_put((queries, places), scores)
