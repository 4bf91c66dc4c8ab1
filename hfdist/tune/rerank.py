"""Cross-encoders: a model reads a query with a text, and one number says how well the text answers it.

bce       cross entropy of each pair: 1 for the text that belongs to the query, 0 for others
ranknet   -log sigmoid(score of that text - score of another one), the mean over a query's others (Burges et al., 2005)
softmax   cross entropy of a query's texts, at that text
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, logsigmoid
from transformers import PreTrainedTokenizerBase

from hfdist.config.task import TaskConfig, TaskLoss
from hfdist.strategies.engine import Batch
from hfdist.tune.classify import TextsWithLabels
from hfdist.tune.labelled_texts import LABELS, have_labels


class Ranking(TextsWithLabels):
    """Queries with their texts. An item is a pair with `bce`; with other losses a query that has another text."""

    names = ("recall_at_1", "mrr")

    def __init__(self, tokenizer: PreTrainedTokenizerBase, task: TaskConfig) -> None:
        super().__init__(tokenizer)
        self._loss = task.loss

    def count(self, batch: Batch) -> torch.Tensor:
        """Count the items."""
        batch = self.prepare(batch)
        is_pair = have_labels(batch)
        if self._loss is TaskLoss.bce:
            return is_pair.sum()
        _, queries = _number_queries(batch, is_pair)
        return (torch.bincount(queries) > 1).sum()

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Sum the losses of the items."""
        is_pair = have_labels(batch)
        scores = self.read(model, batch)[is_pair].squeeze(-1)
        is_own, queries = _number_queries(batch, is_pair)
        own = scores[is_own][queries]
        self._note_places(scores, own, is_own, queries)
        if self._loss is TaskLoss.bce:
            return binary_cross_entropy_with_logits(scores, is_own.to(scores), reduction="sum")
        if self._loss is TaskLoss.softmax:
            by_query = _by_query(scores, queries, -torch.inf)
            # A query without others has the loss 0.
            return cross_entropy(by_query, queries.new_zeros(len(by_query)), reduction="sum")
        others = ~is_own
        losses = -logsigmoid((own - scores)[others])
        numbers = torch.bincount(queries[others], minlength=int(is_own.sum()))
        return (losses / numbers[queries[others]]).sum()

    def _note_places(
        self, scores: torch.Tensor, own: torch.Tensor, is_own: torch.Tensor, queries: torch.Tensor
    ) -> None:
        """Note the place of each query's own text among its texts; one with the same score comes before it."""
        places = torch.zeros_like(scores[is_own]).index_add(0, queries, (scores.detach() >= own.detach()).to(scores))
        ones = torch.ones_like(places, dtype=torch.bool)
        self._note(ones, {"recall_at_1": (places == 1).float(), "mrr": 1 / places.clamp(min=1)})


def _number_queries(batch: Batch, is_pair: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Say of each pair whether its text belongs to the query, and number its query; both of shape [pairs]."""
    is_own = batch[LABELS][..., 0][is_pair] == 1
    return is_own, is_own.long().cumsum(0) - 1


def _by_query(scores: torch.Tensor, queries: torch.Tensor, fill: float) -> torch.Tensor:
    """Give the scores of each query in a row, its own text first; shape [queries, most texts]."""
    counts = torch.bincount(queries)
    most = int(counts.max()) if len(counts) else 1
    places = torch.arange(len(queries), device=queries.device) - (counts.cumsum(0) - counts)[queries]
    return scores.new_full((len(counts), most), fill).index_put((queries, places), scores)
