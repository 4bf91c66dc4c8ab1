"""Losses of embeddings: a query should be nearer to its positive than to other texts.

            d1   d2   d3   n1   n2        d: positives, n: negatives, of all queries of a step
    q1      +    -    -    -    -         infonce: cross entropy of each row, at its own positive
    q2      -    +    -    -    -         infonce_both: half of it, and half of that of the columns d1, d2, d3
    q3      -    -    +    -    -         triplet: each query with its own negatives alone

cosent has scored pairs of texts: log(1 + sum of exp(scale x (s1 - s2))) over all two pairs of which the
first has the lower score; s is the similarity of a pair (Su, 2022; CoSENTLoss of sentence-transformers).

So each text is a negative of the queries that it does not belong to (van den Oord et al., arXiv 1807.03748; in-batch
negatives: Henderson et al., arXiv 1705.00652). The first dimensions of an embedding may be trained to be one by
themselves (Kusupati et al., arXiv 2205.13147).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch.nn.functional import cross_entropy, normalize
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig

from hfdist.config.task import TaskConfig, TaskLoss
from hfdist.errors import ConfigError

_EQUAL = 1e-5
"""Difference of similarities that are equal but for rounding, relative where they are above 1."""
_MOST_SCORES = 2**24
"""Similarities that are there at a time: 64 MiB."""
QUERY, POSITIVE, NEGATIVE = range(3)
"""What a text is; each query is followed by its positive, then by its negatives."""


@dataclass(frozen=True)
class Texts:
    """Embeddings of the texts of a step or of a held-out set, in order."""

    embeddings: torch.Tensor
    """Shape [texts, width]."""
    kinds: torch.Tensor
    """QUERY, POSITIVE or NEGATIVE; shape [texts]."""
    numbers: torch.Tensor | None = None
    """Equal texts have the same number, from 0 on; shape [texts]. None: no text is left out for being equal."""

    scores: torch.Tensor | None = None
    """How alike each query and its positive are; shape [queries]. None: pairs have no score."""

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
    def documents(self) -> torch.Tensor:
        """All positives, in order, then all negatives; shape [documents, width]."""
        return torch.cat([self.positives, self.negatives])

    @property
    def pairs(self) -> torch.Tensor | None:
        """Numbers of each query and of its positive; shape [queries, 2]."""
        if self.numbers is None:
            return None
        return torch.stack([self.numbers[self.kinds == kind] for kind in (QUERY, POSITIVE)], 1)

    @property
    def document_pairs(self) -> torch.Tensor | None:
        """The same of each document, -1 where a negative has no query; shape [documents, 2]."""
        if self.numbers is None or self.pairs is None:
            return None
        negatives = self.numbers[self.kinds == NEGATIVE]
        return torch.cat([self.pairs, torch.stack([torch.full_like(negatives, -1), negatives], 1)])

    @property
    def owners(self) -> torch.Tensor:
        """The query of each negative; shape [negatives]."""
        return ((self.kinds == QUERY).cumsum(0) - 1)[self.kinds == NEGATIVE]


def _infonce(texts: Texts, task: TaskConfig) -> torch.Tensor:
    return _losses_of_rows(_rows_of(texts), task.scale)


def _infonce_both(texts: Texts, task: TaskConfig) -> torch.Tensor:
    back = _Rows(texts.positives, texts.queries, texts.pairs, texts.pairs)
    return (_infonce(texts, task) + _losses_of_rows(back, task.scale)) / 2


def _triplet(texts: Texts, task: TaskConfig) -> torch.Tensor:
    queries, owners = texts.queries, texts.owners
    near = _distances(queries, texts.positives)[owners]
    losses = torch.relu(near - _distances(queries[owners], texts.negatives) + task.margin)
    number = torch.bincount(owners, minlength=len(queries)).clamp(min=1)
    return losses.new_zeros(len(queries)).index_add(0, owners, losses) / number


def _cosent(texts: Texts, task: TaskConfig) -> torch.Tensor:
    assert texts.scores is not None  # the format of the rows
    similarities = task.scale * (texts.queries * texts.positives).sum(-1)
    scores, order = texts.scores.sort()
    similarities = similarities[order]
    num_lower = torch.searchsorted(scores, scores)
    has_lower = num_lower > 0
    # The logarithm of the sum over all pairs below each pair: a table of pairs x pairs may be too large.
    sums_below = similarities.logcumsumexp(0)[num_lower[has_lower] - 1]
    differences = sums_below - similarities[has_lower]
    loss = torch.logsumexp(torch.cat([differences.new_zeros(1), differences]), 0)
    # All pairs have one loss. Each query gets it, so that the mean over queries is this loss.
    return loss.expand(len(similarities))


LOSSES: Mapping[TaskLoss, Callable[[Texts, TaskConfig], torch.Tensor]] = MappingProxyType(
    {
        TaskLoss.infonce: _infonce,
        TaskLoss.infonce_both: _infonce_both,
        TaskLoss.triplet: _triplet,
        TaskLoss.cosent: _cosent,
    }
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


def check_sizes(task: TaskConfig, architecture: PreTrainedConfig) -> None:
    """Raise a ConfigError if `task.matryoshka` has a size above the width of the model's hidden states."""
    if task.matryoshka and max(task.matryoshka) > (width := architecture.get_text_config().hidden_size):
        fitting = [size for size in task.matryoshka if size < width]
        raise ConfigError(
            "embeddings of this model have fewer dimensions",
            where="task.matryoshka",
            found=f"{task.matryoshka}, and the model's hidden states have {width}",
            allowed=f"numbers <= {width}",
            hint=f"task.matryoshka={str([*fitting, width]).replace(' ', '')}",
        )


def first_dimensions(texts: Texts, size: int, task: TaskConfig) -> Texts:
    """Give the texts with the first `size` dimensions of their embeddings, of length 1 if the task asks."""
    embeddings = texts.embeddings[:, :size]
    return replace(texts, embeddings=normalize(embeddings, dim=-1) if task.normalize else embeddings)


def ranks_of_positives(texts: Texts) -> torch.Tensor:
    """Give the rank of each query's positive among all documents, from 1 on; equal ones come before it.

    So a model that gives all texts the same embedding finds nothing, and rounding does not change a rank.

    Args:
        texts: similarities are the products of their embeddings.
    """
    rows, found = _rows_of(texts), []
    with torch.no_grad():
        for part in rows.parts():
            scores = rows.scores(part)
            own = scores.diagonal(part.start)[:, None]
            found.append((scores >= own - _EQUAL * own.abs().clamp(min=1)).sum(1))
    return torch.cat(found)


def rank_correlation(texts: Texts) -> float:
    """Give Spearman's correlation of the similarities of pairs with their scores; 0 where either are all alike."""
    assert texts.scores is not None
    similarities = (texts.queries * texts.positives).sum(-1).detach()
    ranks = torch.stack([_ranks(similarities), _ranks(texts.scores)])
    return float(torch.corrcoef(ranks)[0, 1].nan_to_num()) if ranks.shape[1] > 1 else 0.0


def _ranks(values: torch.Tensor) -> torch.Tensor:
    """Give the rank of each value, equal ones their mean; shape [values], float64."""
    _, inverse, counts = values.unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2).double()[inverse]


@dataclass(frozen=True)
class _Rows:
    """Similarities of texts to others, of which the one with a text's number belongs to it; made for some at a time."""

    texts: torch.Tensor
    """Shape [texts, width]."""
    others: torch.Tensor
    """Shape [others, width]."""
    pairs: torch.Tensor | None
    """Numbers of the query and the positive of each text; shape [texts, 2]. None: no text is left out."""
    other_pairs: torch.Tensor | None
    """The same of the others; shape [others, 2]."""

    def parts(self) -> list[range]:
        """Give the numbers of texts in parts that have few enough scores; one is empty where there is no text."""
        size = max(_MOST_SCORES // max(len(self.others), 1), 1)
        return [range(len(self.texts))[first : first + size] for first in range(0, max(len(self.texts), 1), size)]

    def scores(self, part: range) -> torch.Tensor:
        """Give the similarities of a part, -inf where a text is left out; shape [texts of the part, others]."""
        own = slice(part.start, part.stop)
        scores = self.texts[own] @ self.others.T
        if self.pairs is None or self.other_pairs is None:
            return scores
        is_equal = (self.pairs[own, None] == self.other_pairs).any(-1)
        is_equal.diagonal(part.start).fill_(False)
        return scores.masked_fill(is_equal, -torch.inf)


def _rows_of(texts: Texts) -> _Rows:
    return _Rows(texts.queries, texts.documents, texts.pairs, texts.document_pairs)


def _losses_of_rows(rows: _Rows, scale: float) -> torch.Tensor:
    """Give the cross entropy of each text at the one that belongs to it; shape [texts]."""

    def losses(part: range) -> torch.Tensor:
        own = torch.arange(part.start, part.stop, device=rows.texts.device)
        return cross_entropy(scale * rows.scores(part), own, reduction="none")

    # Scores are made in the backward pass again, so that they are never there for all texts.
    return torch.cat([checkpoint(losses, part, use_reentrant=False) for part in rows.parts()])


def _distances(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(first - second, dim=-1)
