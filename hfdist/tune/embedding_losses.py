"""Losses of embeddings: a query should be nearer to its positive than to other texts.

            d1   d2   d3   n1   n2        d: positives, n: negatives, of all queries of a step
    q1      +    -    -    -    -         infonce: cross entropy of each row, at its own positive
    q2      -    +    -    -    -         infonce_both: half of it, and half of that of the columns d1, d2, d3
    q3      -    -    +    -    -         triplet: each query with its own negatives alone

So each text is a negative of the queries that it does not belong to (van den Oord et al., arXiv 1807.03748; in-batch
negatives: Henderson et al., arXiv 1705.00652). The first dimensions of an embedding may be trained to be one by
themselves (Kusupati et al., arXiv 2205.13147).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch.nn.functional import cross_entropy, normalize

from hfdist.config.task import TaskConfig, TaskLoss

_EQUAL = 1e-5
"""Difference of similarities that are equal but for rounding, relative where they are above 1."""
QUERY, POSITIVE, NEGATIVE = range(3)
"""What a text is; each query is followed by its positive, then by its negatives."""


@dataclass(frozen=True)
class Texts:
    """Embeddings of the texts of a step or of a held-out set, in order."""

    embeddings: torch.Tensor
    """Shape [texts, width]."""
    kinds: torch.Tensor
    """QUERY, POSITIVE or NEGATIVE; shape [texts]."""

    @property
    def queries(self) -> torch.Tensor:
        """Shape [queries, width]."""
        return self.embeddings[self.kinds == QUERY]

    @property
    def positives(self) -> torch.Tensor:
        """That of each query; shape [queries, width]."""
        return self.embeddings[self.kinds == POSITIVE]

    @property
    def negatives(self) -> torch.Tensor:
        """Shape [negatives, width]."""
        return self.embeddings[self.kinds == NEGATIVE]

    @property
    def owners(self) -> torch.Tensor:
        """The query of each negative; shape [negatives]."""
        return ((self.kinds == QUERY).cumsum(0) - 1)[self.kinds == NEGATIVE]


def _infonce(texts: Texts, task: TaskConfig) -> torch.Tensor:
    return _losses_at(task.scale * similarities(texts))


def _infonce_both(texts: Texts, task: TaskConfig) -> torch.Tensor:
    scores = task.scale * similarities(texts)
    back = scores[:, : len(scores)].T
    return (_losses_at(scores) + _losses_at(back)) / 2


def _triplet(texts: Texts, task: TaskConfig) -> torch.Tensor:
    queries, owners = texts.queries, texts.owners
    near = _distances(queries, texts.positives)[owners]
    losses = torch.relu(near - _distances(queries[owners], texts.negatives) + task.margin)
    number = torch.bincount(owners, minlength=len(queries)).clamp(min=1)
    return losses.new_zeros(len(queries)).index_add(0, owners, losses) / number


LOSSES: Mapping[TaskLoss, Callable[[Texts, TaskConfig], torch.Tensor]] = MappingProxyType(
    {TaskLoss.infonce: _infonce, TaskLoss.infonce_both: _infonce_both, TaskLoss.triplet: _triplet}
)
"""Each gives the loss of each query; shape [queries]."""


def losses_of(texts: Texts, task: TaskConfig) -> torch.Tensor:
    """Give the loss of each query, with `task.matryoshka` the sum over all sizes; shape [queries].

    Args:
        texts: their embeddings of any length.
        task: the loss and its settings.
    """
    sizes = task.matryoshka or [texts.embeddings.shape[1]]
    losses = [LOSSES[task.loss](first_dimensions(texts, size, task), task) for size in sizes]
    return torch.stack(losses).sum(0)


def first_dimensions(texts: Texts, size: int, task: TaskConfig) -> Texts:
    """Give the texts with the first `size` dimensions of their embeddings, of length 1 if the task asks."""
    embeddings = texts.embeddings[:, :size]
    return Texts(normalize(embeddings, dim=-1) if task.normalize else embeddings, texts.kinds)


def similarities(texts: Texts) -> torch.Tensor:
    """Give the similarity of each query to all positives, in order, then to all negatives; [queries, documents]."""
    return texts.queries @ torch.cat([texts.positives, texts.negatives]).T


def places(scores: torch.Tensor) -> torch.Tensor:
    """Give the place of each query's positive among all documents, from 1 on; equal ones come before it.

    So a model that gives all texts the same embedding finds nothing, and rounding does not change a place.

    Args:
        scores: as `similarities` gives them.
    """
    own = scores.diagonal()[:, None]
    return (scores >= own - _EQUAL * own.abs().clamp(min=1)).sum(1)


def _losses_at(scores: torch.Tensor) -> torch.Tensor:
    return cross_entropy(scores, torch.arange(len(scores), device=scores.device), reduction="none")


def _distances(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(first - second, dim=-1)
