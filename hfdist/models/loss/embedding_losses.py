"""Losses of embeddings: a query should be nearer to its positive than to other texts.

            d1   d2   d3   n1   n2        d: positives, n: negatives, of all queries of a step
    q1      +    -    -    -    -         infonce: cross entropy of each row, at its own positive
    q2      -    +    -    -    -         infonce_both: the mean of infonce and of the same for columns d1, d2, d3
    q3      -    -    +    -    -         triplet: each query with its own negatives alone

So each text is a negative of the queries that it does not belong to (van den Oord et al., arXiv 1807.03748; in-batch
negatives: Henderson et al., arXiv 1705.00652).

cosent learns from pairs of texts that have scores. Its loss is log(1 + sum of exp(scale x (s1 - s2))) over all two
pairs of which the first has the lower score; s1 and s2 are the similarities of their texts (Su, 2022; CoSENTLoss of
sentence-transformers).

The first dimensions of an embedding may be trained to be an embedding by themselves (Kusupati et al., arXiv
2205.13147).
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
"""The largest difference of similarities that counts as rounding; it is relative for similarities above 1."""
_MOST_SCORES = 2**24
"""The most similarities that are in memory at a time: 64 MiB of float32."""
QUERY, POSITIVE, NEGATIVE = range(3)
"""Kinds of texts; each query is followed by its positive, then by its negatives."""


@dataclass(frozen=True)
class Texts:
    """Embeddings of the texts of a step or of a held-out set, in order."""

    embeddings: torch.Tensor
    """Embedding of each text; shape [texts, width]."""
    kinds: torch.Tensor
    """QUERY, POSITIVE or NEGATIVE for each text; shape [texts]."""
    numbers: torch.Tensor | None = None
    """Number of each text, from 0 on; equal texts have the same; shape [texts]. None: equal texts are not known."""
    scores: torch.Tensor | None = None
    """How alike each query and its positive are, by the data; shape [queries]. None: pairs have no score."""

    @property
    def queries(self) -> torch.Tensor:
        """Embedding of each query; shape [queries, width]."""
        return self.embeddings[self.kinds == QUERY]

    @property
    def positives(self) -> torch.Tensor:
        """Embedding of each query's positive; shape [queries, width]."""
        return self.embeddings[self.kinds == POSITIVE]

    @property
    def negatives(self) -> torch.Tensor:
        """Embedding of each negative; shape [negatives, width]."""
        return self.embeddings[self.kinds == NEGATIVE]

    @property
    def documents(self) -> torch.Tensor:
        """Embeddings of all positives, in order, then of all negatives; shape [documents, width]."""
        return torch.cat([self.positives, self.negatives])

    @property
    def pairs(self) -> torch.Tensor | None:
        """Numbers of each query and of its positive; shape [queries, 2]. None: equal texts are not known."""
        if self.numbers is None:
            return None
        return torch.stack([self.numbers[self.kinds == QUERY], self.numbers[self.kinds == POSITIVE]], 1)

    @property
    def document_pairs(self) -> torch.Tensor | None:
        """Numbers of each document's query, -1 for a negative, and of the document; shape [documents, 2]."""
        if self.numbers is None or self.pairs is None:
            return None
        negatives = self.numbers[self.kinds == NEGATIVE]
        return torch.cat([self.pairs, torch.stack([torch.full_like(negatives, -1), negatives], 1)])

    @property
    def owners(self) -> torch.Tensor:
        """Number of the query, among the queries, to which each negative belongs; shape [negatives]."""
        return ((self.kinds == QUERY).cumsum(0) - 1)[self.kinds == NEGATIVE]

    @property
    def pair_similarities(self) -> torch.Tensor:
        """Product of the embeddings of each query and its positive; shape [queries]."""
        return (self.queries * self.positives).sum(-1)


def _infonce(texts: Texts, task: TaskConfig) -> torch.Tensor:
    return _losses_of_rows(_rows_of(texts), task.scale)


def _infonce_both(texts: Texts, task: TaskConfig) -> torch.Tensor:
    columns = _Rows(texts.positives, texts.queries, texts.pairs, texts.pairs)
    return (_infonce(texts, task) + _losses_of_rows(columns, task.scale)) / 2


def _triplet(texts: Texts, task: TaskConfig) -> torch.Tensor:
    queries, owners = texts.queries, texts.owners
    to_positives = _distances(queries, texts.positives)[owners]
    to_negatives = _distances(queries[owners], texts.negatives)
    losses = torch.relu(to_positives - to_negatives + task.margin)
    # The mean over the negatives of each query.
    num_negatives = torch.bincount(owners, minlength=len(queries)).clamp(min=1)
    return losses.new_zeros(len(queries)).index_add(0, owners, losses) / num_negatives


def _cosent(texts: Texts, task: TaskConfig) -> torch.Tensor:
    assert texts.scores is not None  # the config asks for rows with scores
    scores, order = texts.scores.sort()
    similarities = task.scale * texts.pair_similarities[order]
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
"""Functions that give the loss of each query, shape [queries], by `task.loss`."""


def losses_of(texts: Texts, task: TaskConfig) -> torch.Tensor:
    """Give the loss of each query, with `task.matryoshka` the sum over all sizes; shape [queries].

    Args:
        texts: texts whose embeddings may have any length: they are normalized here if the task asks.
        task: `task.*` of the run: the loss and its settings.
    """
    sizes = task.matryoshka or [texts.embeddings.shape[1]]
    losses = [LOSSES[task.loss](first_dimensions(texts, size, task), task) for size in sizes]
    return torch.stack(losses).sum(0)


def check_sizes(task: TaskConfig, architecture: PreTrainedConfig) -> None:
    """Check the sizes of `task.matryoshka`.

    Raises:
        ConfigError: one is above the width of the model's hidden states.
    """
    if not task.matryoshka:
        return
    width = architecture.get_text_config().hidden_size
    if max(task.matryoshka) <= width:
        return
    fitting = [size for size in task.matryoshka if size < width]
    # An override of a list has no spaces.
    override = str([*fitting, width]).replace(" ", "")
    raise ConfigError(
        "embeddings of this model have fewer dimensions",
        where="task.matryoshka",
        found=f"{task.matryoshka}, and the model's hidden states have {width}",
        allowed=f"numbers <= {width}",
        hint=f"task.matryoshka={override}",
    )


def first_dimensions(texts: Texts, size: int, task: TaskConfig) -> Texts:
    """Give the texts with the first `size` dimensions of their embeddings, of length 1 if the task asks."""
    embeddings = texts.embeddings[:, :size]
    if task.normalize:
        embeddings = normalize(embeddings, dim=-1)
    return replace(texts, embeddings=embeddings)


def ranks_of_positives(texts: Texts) -> torch.Tensor:
    """Give the rank of each query's positive among all documents, from 1 on; shape [queries].

    Documents that are as similar come before the positive. So a model that gives all texts the same embedding finds
    nothing, and rounding does not change a rank.
    """
    rows, ranks = _rows_of(texts), []
    with torch.no_grad():
        for part in rows.parts():
            similarities = rows.similarities(part)
            of_positive = similarities.diagonal(part.start)[:, None]
            rounding = _EQUAL * of_positive.abs().clamp(min=1)
            ranks.append((similarities >= of_positive - rounding).sum(1))
    return torch.cat(ranks)


def rank_correlation(texts: Texts) -> float:
    """Give Spearman's correlation of the similarities of pairs with their scores.

    It is 0 for fewer than two pairs, and where all similarities or all scores are alike.
    """
    assert texts.scores is not None  # the config asks for rows with scores
    if len(texts.scores) < 2:
        return 0.0
    ranks = torch.stack([_ranks(texts.pair_similarities.detach()), _ranks(texts.scores)])
    return float(torch.corrcoef(ranks)[0, 1].nan_to_num())


def _ranks(values: torch.Tensor) -> torch.Tensor:
    """Give the rank of each value, equal ones their mean; shape [values], float64."""
    _, inverse, counts = values.unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2).double()[inverse]


@dataclass(frozen=True)
class _Rows:
    """The table of similarities of texts to others, made for some rows at a time; text i belongs to other i."""

    texts: torch.Tensor
    """Embeddings; shape [texts, width]."""
    others: torch.Tensor
    """Embeddings of what the texts are compared with; shape [others, width]."""
    pairs: torch.Tensor | None
    """Numbers of the query and the positive of each text; shape [texts, 2]. None: equal texts are not known."""
    other_pairs: torch.Tensor | None
    """Numbers of the query, -1: none, and of the document of each other; shape [others, 2]."""

    def parts(self) -> list[range]:
        """Give the rows in parts that have few enough similarities; one part is empty where there is no text."""
        num_rows = max(_MOST_SCORES // max(len(self.others), 1), 1)
        rows = range(len(self.texts))
        return [rows[first : first + num_rows] for first in range(0, max(len(rows), 1), num_rows)]

    def similarities(self, part: range) -> torch.Tensor:
        """Give the rows of a part, -inf for others that equal the text or its own; shape [rows of the part, others]."""
        rows = slice(part.start, part.stop)
        similarities = self.texts[rows] @ self.others.T
        if self.pairs is None or self.other_pairs is None:
            return similarities
        # An equal text is no negative: the query, or the document, of both pairs is the same.
        is_equal = (self.pairs[rows, None] == self.other_pairs).any(-1)
        is_equal.diagonal(part.start).fill_(False)
        return similarities.masked_fill(is_equal, -torch.inf)


def _rows_of(texts: Texts) -> _Rows:
    return _Rows(texts.queries, texts.documents, texts.pairs, texts.document_pairs)


def _losses_of_rows(rows: _Rows, scale: float) -> torch.Tensor:
    """Give the cross entropy of each text at the other that belongs to it; shape [texts]."""

    def losses(part: range) -> torch.Tensor:
        targets = torch.arange(part.start, part.stop, device=rows.texts.device)
        return cross_entropy(scale * rows.similarities(part), targets, reduction="none")

    # Similarities are computed in the backward pass again, so that they never exist for all texts.
    return torch.cat([checkpoint(losses, part, use_reentrant=False) for part in rows.parts()])


def _distances(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Give the Euclidean distance of each row of one tensor to the same row of the other; shape [rows]."""
    return torch.linalg.vector_norm(first - second, dim=-1)
