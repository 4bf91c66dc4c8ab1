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

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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
    def owners(self) -> torch.Tensor:
        """The query of each negative; shape [negatives]."""
        return ((self.kinds == QUERY).cumsum(0) - 1)[self.kinds == NEGATIVE]


def _infonce(texts: Texts, task: TaskConfig) -> torch.Tensor:
    return _losses_among(texts.queries, texts.documents, task.scale)


def _infonce_both(texts: Texts, task: TaskConfig) -> torch.Tensor:
    back = _losses_among(texts.positives, texts.queries, task.scale)
    return (_infonce(texts, task) + back) / 2


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
    return Texts(normalize(embeddings, dim=-1) if task.normalize else embeddings, texts.kinds)


def places(texts: Texts) -> torch.Tensor:
    """Give the place of each query's positive among all documents, from 1 on; equal ones come before it.

    So a model that gives all texts the same embedding finds nothing, and rounding does not change a place.

    Args:
        texts: similarities are the products of their embeddings.
    """
    documents, found = texts.documents, []
    for first, queries in _parts(texts.queries, len(documents)):
        scores = queries @ documents.T
        own = scores.diagonal(first)[:, None]
        found.append((scores >= own - _EQUAL * own.abs().clamp(min=1)).sum(1))
    return torch.cat(found)


def _losses_among(texts: torch.Tensor, others: torch.Tensor, scale: float) -> torch.Tensor:
    """Give the cross entropy of each text at the one of `others` with its number; shape [texts].

    Scores are made for some texts at a time, in the backward pass again, so that they are never there for all.
    """
    parts = _parts(texts, len(others))
    losses = [checkpoint(_losses_of_part, part, others, first, scale, use_reentrant=False) for first, part in parts]
    return torch.cat(losses)


def _losses_of_part(part: torch.Tensor, others: torch.Tensor, first: int, scale: float) -> torch.Tensor:
    own = torch.arange(first, first + len(part), device=part.device)
    return cross_entropy(scale * part @ others.T, own, reduction="none")


def _parts(texts: torch.Tensor, num_others: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Give texts in parts that have few enough scores, each with the number of its first one."""
    size = max(_MOST_SCORES // max(num_others, 1), 1)
    for number, part in enumerate(texts.split(size)):
        yield number * size, part


def _distances(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(first - second, dim=-1)
