"""The loss of a head of which each rank has some rows of the vocabulary, and all ranks have the same hidden states.

    rank 0   weight [own rows, width]   its logits   largest, sum of exponentials, the target's logit   ) combined over
    rank 1   weight [own rows, width]   its logits   largest, sum of exponentials, the target's logit   ) the ranks

No rank has a whole row of logits. Each gives the gradient by its own logits; a gradient by the hidden states is the sum
over the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from hfdist.models.loss.deferred_rows import DeferredRows
from hfdist.models.loss.teacher_rows import Columns


@dataclass(frozen=True, kw_only=True)
class VocabularyShard:
    """The range of a head's rows, which are tokens of the vocabulary, that this rank has."""

    group: dist.ProcessGroup
    """The ranks that have the rows of the head together."""
    start: int
    """The first row of the range."""
    stop: int
    """One past the last row of the range."""
    num_rows: int
    """Rows of the whole head, of all ranks together."""

    @property
    def most_rows(self) -> int:
        """The most rows of the head that any rank has."""
        return -(-self.num_rows // self.group.size())

    def __deepcopy__(self, memo: object) -> VocabularyShard:
        # Stages of a pipeline run copies of the head, and a process group has none.
        return self


def mark_shared(head: nn.Module, shard: VocabularyShard) -> None:
    """Note on a head, an `nn.Linear`, that it has only the rows of `shard`."""
    head.vocabulary_shard = shard  # type: ignore[assignment]  # no parameter, but a plain attribute


def vocabulary_shard_of(head: nn.Module) -> VocabularyShard | None:
    """Give what `mark_shared` has noted; None: the head is whole."""
    return getattr(head, "vocabulary_shard", None)


def losses_and_gradient(
    logits: torch.Tensor, rows: DeferredRows, shard: VocabularyShard
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the losses of rows, float32 and the same on all ranks, and the gradient of their sum by this rank's logits.

    A collective over the group of the shard, whose ranks call it with the same targets.

    Args:
        logits: [rows, own rows of the vocabulary], as the head gives them; they are overwritten.
        rows: the targets, the operations on logits, and how losses are counted.
        shard: the rows of the vocabulary that this rank has.
    """
    values = logits
    with torch.enable_grad():
        if rows.per_row:
            values = logits.requires_grad_()
        for step in rows.per_row:
            values = step.of_columns(shard.start, shard.stop, shard.num_rows)(values)
    # A copy, since autograd keeps tensors of the steps, which must not be overwritten.
    wide = values.detach().to(torch.float32, copy=values is not logits)
    compute = _cross_entropy if rows.teacher is None else _divergences
    losses, gradient = compute(wide, rows, shard)
    if values is not logits:
        (gradient,) = torch.autograd.grad(values, logits, gradient.to(values.dtype))
    return losses, gradient.to(logits.dtype)


def _divergences(wide: torch.Tensor, rows: DeferredRows, shard: VocabularyShard) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the divergences of rows from the teacher, and their gradient by this rank's logits.

    Each rank knows the teacher's distribution over all tokens, and takes the part of its own columns.
    """
    assert rows.teacher is not None  # the caller has seen to it

    def add_up(sums: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(sums, group=shard.group)
        return sums

    largest = wide.amax(-1, keepdim=True)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=shard.group)
    student = wide.sub_(largest)
    student.sub_(add_up(student.exp().sum(-1)).log_()[:, None])
    columns = Columns(start=shard.start, stop=shard.stop, vocabulary=shard.num_rows, add_up=add_up)
    return rows.teacher.compare(student, rows.targets != rows.ignore_index, columns)


def _cross_entropy(wide: torch.Tensor, rows: DeferredRows, shard: VocabularyShard) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the cross entropies of rows, and their gradient by this rank's logits, which takes the memory of `wide`."""
    targets = rows.targets
    is_target = targets != rows.ignore_index
    places = targets - shard.start
    is_own = is_target & (places >= 0) & (places < shard.stop - shard.start)
    places = places.masked_fill(~is_own, 0)[:, None]
    largest = wide.amax(-1, keepdim=True)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=shard.group)
    logits = wide.sub_(largest)
    # Chosen, not multiplied by zero: an ignored row need not be finite.
    of_target = logits.gather(1, places)[:, 0].masked_fill(~is_own, 0)
    smoothing = rows.label_smoothing
    of_all = logits.sum(-1) if smoothing else torch.zeros_like(of_target)
    gradient = logits.exp_()
    sums = torch.stack([gradient.sum(-1), of_target, of_all])
    dist.all_reduce(sums, group=shard.group)
    exponentials, of_target, of_all = sums.unbind()
    losses = exponentials.log() - (1 - smoothing) * of_target - smoothing / shard.num_rows * of_all
    gradient.div_(exponentials[:, None]).sub_(smoothing / shard.num_rows)
    gradient.scatter_add_(1, places, (smoothing - 1) * is_own[:, None].float())
    gradient.masked_fill_(~is_target[:, None], 0)
    return losses.masked_fill(~is_target, 0), gradient
