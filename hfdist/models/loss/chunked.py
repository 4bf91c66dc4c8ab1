"""Cross entropy of a head's logits, a chunk of rows at a time; gradients are computed on the way, as all is at hand.

    rows     [rows, width]      chunk by chunk: logits, their loss, their gradient, and from it the gradients of
    weight   [vocabulary, width]                the chunk's rows and of the head, which are kept; logits are not

Where the loss is not the sum but another function of the rows' losses, these are computed first, and the rows'
gradients are multiplied by what the function's gradient is.

A backward only multiplies what is kept by the gradient of the sum. What is kept is float32, rounded after that and not
before: 8 bits times a number such as 1/1025, rounded to 8 bits again, are too large by a thousandth throughout. Rows
and head have nodes of their own in the graph, so that a pipeline schedule can run them apart.

Where the rows of the head lie on several ranks, each has the logits of its own, and the ranks add up what they must.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from typing import cast as cast_type

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from hfdist.models.blocks import why_not_compiled
from hfdist.models.loss import shared_vocabulary
from hfdist.models.loss.deferred_rows import DeferredRows, Reduce, cast
from hfdist.models.loss.teacher_rows import divergences

logger = logging.getLogger(__name__)

CHUNK_LOGITS = {"cpu": 2**23, "cuda": 2**28}
"""Logits of a chunk: on a CPU little memory, on a GPU enough for a full-speed product."""

LEAST_ROWS = 128
"""A chunk has at least as many, however large the vocabulary: each reads and writes the gradient of the whole head."""

TENSORS_OF_DIVERGENCE = 8
"""Tensors of a chunk's size that exist at a time where the loss is the divergence from a teacher."""

_LossesAndGradient = Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]


class ChunkedLoss:
    """Sums token losses of deferred rows; see `SumOfLosses`.

    Args:
        device: the device of hidden states and head.
        chunk_logits: logits that may exist at a time; None: by the kind of device, and of `LEAST_ROWS` at least.
    """

    def __init__(self, device: torch.device, *, chunk_logits: int | None = None) -> None:
        self._chunk_logits = chunk_logits or CHUNK_LOGITS.get(device.type, CHUNK_LOGITS["cuda"])
        self._least_rows = LEAST_ROWS if chunk_logits is None else 1
        is_cuda = device.type == "cuda"
        self._losses_and_gradient = _compiled_if_possible(device) if is_cuda else _losses_and_gradient
        self._is_wide = is_cuda and _has_wide_products(device)

    def __call__(self, rows: DeferredRows) -> torch.Tensor:
        """Give the sum of the losses of all rows with a target, float32; or what `rows.reduce` makes of them.

        A collective where ranks share the vocabulary: they have the same rows, and the gradients of these are whole on
        each.
        """
        module = rows.head.module
        rows = rows._replace(targets=rows.targets.to(rows.hidden.device))
        kept: slice | torch.Tensor = slice(None)
        num_rows = len(rows.targets)
        if rows.hidden.device.type == "cpu":
            # Nothing to wait for here, and a fine-tuning batch may be prompts for the most part.
            kept = rows.targets != rows.ignore_index
            rows = rows.part(kept)
        hidden = rows.hidden
        parameters = [p for p in module.parameters() if p.requires_grad and torch.is_grad_enabled()]
        shard = shared_vocabulary.vocabulary_shard_of(module)
        detached = rows._replace(hidden=hidden.detach())
        chunk_rows = self._chunk_rows(detached, shard)
        with torch.no_grad():
            run = self._run_linear if type(module) is nn.Linear else self._run_by_autograd
            total, weights = None, None
            if rows.reduce is not None:
                losses, *_ = run(detached, [], chunk_rows, None, wants_rows=False)
                all_losses = losses.new_zeros(num_rows)
                all_losses[kept] = losses
                if not (parameters or hidden.requires_grad):
                    return rows.reduce(all_losses)
                total, weights = _differentiated(rows.reduce, all_losses)
                weights = weights[kept]
            losses, of_rows, of_parameters = run(
                detached, parameters, chunk_rows, weights, wants_rows=hidden.requires_grad
            )
            total = losses.sum() if total is None else total
            # Another class runs its own forward, whose backward has summed.
            if shard is not None and of_rows is not None and type(module) is nn.Linear:
                dist.all_reduce(of_rows, group=shard.group)
        if of_rows is not None:
            total = _RowsPart.apply(hidden, total, of_rows)
        if parameters:
            total = total + _HeadPart.apply(_Kept(of_parameters, [p.dtype for p in parameters]), *parameters)
        return total

    def _chunk_rows(self, rows: DeferredRows, shard: shared_vocabulary.VocabularyShard | None) -> int:
        """Rows of each chunk. All chunks have one size, since a GPU keeps the memory of each size."""
        vocabulary, chunk_logits = rows.head.vocabulary, self._chunk_logits
        if shard is not None:
            # A teacher's logits are whole on each rank.
            vocabulary = shard.most_rows if rows.teacher is None else shard.num_rows
        if rows.teacher is not None:
            chunk_logits //= TENSORS_OF_DIVERGENCE
        num_rows = len(rows.hidden)
        num_chunks = max(1, -(-num_rows // max(chunk_logits // vocabulary, self._least_rows)))
        return max(1, -(-num_rows // num_chunks))

    def _run_linear(
        self,
        rows: DeferredRows,
        parameters: list[nn.Parameter],
        chunk_rows: int,
        weights: torch.Tensor | None,
        *,
        wants_rows: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None, list[torch.Tensor | None]]:
        """A weight and perhaps a bias: their gradients are summed in place, in float32."""
        module = cast_type(nn.Linear, rows.head.module)
        dtype = compute_dtype(rows.hidden)
        with torch.autocast(rows.hidden.device.type, enabled=False):
            weight = module.weight.to(dtype)
            bias = None if module.bias is None else module.bias.to(dtype)
            sums = {id(p): torch.zeros_like(p, dtype=torch.float32) for p in parameters}
            of_rows = torch.empty_like(rows.hidden, dtype=torch.float32) if wants_rows else None
            losses = rows.hidden.new_zeros(len(rows.hidden), dtype=torch.float32)
            # One for all chunks: the system clears large memory each time that it gives it.
            memory = torch.empty(chunk_rows, len(weight), dtype=dtype, device=rows.hidden.device)
            for begin in range(0, len(rows.hidden), chunk_rows):
                part = slice(begin, begin + chunk_rows)
                chunk = rows.part(part)
                hidden = chunk.hidden.to(dtype)
                out = memory[: len(hidden)]
                if bias is None:
                    logits = torch.mm(hidden, weight.T, out=out)
                else:
                    logits = torch.addmm(bias, hidden, weight.T, out=out)
                if of_rows is None and not sums and shared_vocabulary.vocabulary_shard_of(module) is None:
                    losses[part] = _losses_alone(logits, chunk)
                    continue
                losses[part], gradient = self._of_logits(logits, chunk)
                if weights is not None:
                    gradient.mul_(weights[part, None])
                if of_rows is not None:
                    of_rows[part] = _multiply(gradient, weight, is_wide=self._is_wide)
                if id(module.weight) in sums:
                    _accumulate(sums[id(module.weight)], gradient.T, hidden, is_wide=self._is_wide)
                if bias is not None and id(module.bias) in sums:
                    sums[id(module.bias)] += gradient.sum(0, dtype=torch.float32)
                # It is freed before the next chunk's is made.
                del gradient
        return losses, of_rows, [sums[id(p)] for p in parameters]

    def _of_logits(self, logits: torch.Tensor, rows: DeferredRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Give the losses of rows, and the gradient of their sum by what the head gave, in that one's type."""
        shard = shared_vocabulary.vocabulary_shard_of(rows.head.module)
        if shard is not None:
            return shared_vocabulary.losses_and_gradient(logits, rows, shard)
        if _is_plain(rows):
            return self._losses_and_gradient(logits, rows.targets, rows.ignore_index)
        with torch.enable_grad():
            losses = _losses(logits.requires_grad_(), rows)
            (gradient,) = torch.autograd.grad(losses.sum(), logits)
        return losses.detach(), gradient

    def _run_by_autograd(
        self,
        rows: DeferredRows,
        parameters: list[nn.Parameter],
        chunk_rows: int,
        weights: torch.Tensor | None,
        *,
        wants_rows: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None, list[torch.Tensor | None]]:
        """Whatever the head is made of, such as an adapter: autograd runs it chunk by chunk."""
        sums: list[torch.Tensor | None] = [None] * len(parameters)
        of_rows = torch.zeros_like(rows.hidden, dtype=torch.float32) if wants_rows else None
        losses = rows.hidden.new_zeros(len(rows.hidden), dtype=torch.float32)
        # The loop runs at least once, since gradients of no rows are zeros, and not None.
        for begin in range(0, max(1, len(rows.hidden)), chunk_rows):
            part = slice(begin, begin + chunk_rows)
            with torch.enable_grad():
                chunk = rows.part(part)
                hidden = chunk.hidden.requires_grad_(wants_rows)
                chunk_losses = _losses(rows.head.forward(hidden), chunk)
                total = chunk_losses.sum() if weights is None else chunk_losses @ weights[part]
                wanting = [*([hidden] if wants_rows else []), *parameters]
                gradients = list(torch.autograd.grad(total, wanting, allow_unused=True)) if wanting else []
            losses[part] = chunk_losses.detach()
            if of_rows is not None and (of_chunk := gradients.pop(0)) is not None:
                of_rows[part] = of_chunk
            for number, gradient in enumerate(gradients):
                summed = sums[number]
                if summed is not None:
                    summed += gradient
                elif gradient is not None:
                    sums[number] = gradient.float()
        return losses, of_rows, sums


def compute_dtype(hidden: torch.Tensor) -> torch.dtype:
    """Give the type in which a head multiplies: autocast's, or that of the hidden states."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def _differentiated(reduce: Reduce, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Give what `reduce` makes of the losses of rows, and its gradient by each of these."""
    with torch.enable_grad(), torch.autocast(losses.device.type, enabled=False):
        total = reduce(losses.requires_grad_())
        (weights,) = torch.autograd.grad(total, losses)
    return total.detach(), weights


def _losses(logits: torch.Tensor, rows: DeferredRows) -> torch.Tensor:
    """Losses of a chunk, as torch computes them; shape [rows]."""
    for step in rows.per_row:
        logits = step(logits)
    logits, targets, ignored = logits.float(), rows.targets, rows.ignore_index
    if rows.teacher is not None:
        return divergences(logits, rows.teacher, targets != ignored)
    return functional.cross_entropy(
        logits, targets, ignore_index=ignored, reduction="none", label_smoothing=rows.label_smoothing
    )


def _is_plain(rows: DeferredRows) -> bool:
    """Whether the losses are cross entropies of the head's own logits."""
    is_exact = rows.label_smoothing == 0.0 and rows.teacher is None
    return is_exact and all(step == cast(torch.float32) for step in rows.per_row)


def _losses_alone(logits: torch.Tensor, rows: DeferredRows) -> torch.Tensor:
    """Give the losses of a chunk of logits, which are overwritten: an evaluation needs no more memory than a step."""
    if not _is_plain(rows):
        return _losses(logits, rows)
    losses, *_ = _losses_in_place(logits.float(), rows.targets, rows.ignore_index)
    return losses


def _losses_in_place(
    wide: torch.Tensor, targets: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Give token losses, the column of each row's target [rows, 1], and the sum of each row's exponentials [rows, 1].

    `wide` is float32, logits [rows, vocabulary] before, and their exponentials (less the largest) after.
    """
    is_target = targets != ignore_index
    places = targets.masked_fill(~is_target, 0)[:, None]
    own, largest = wide.gather(1, places), wide.amax(-1, keepdim=True)
    sums = wide.sub_(largest).exp_().sum(-1, keepdim=True)
    # Chosen, not multiplied by zero: an ignored row need not be finite.
    losses = (largest - own + sums.log())[:, 0].masked_fill(~is_target, 0)
    return losses, places, sums


def _losses_and_gradient(
    logits: torch.Tensor, targets: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the token losses of logits [rows, vocabulary], and the gradient of their sum by them, in their type.

    If that is float32, also in their place.
    """
    is_target = targets != ignore_index
    gradient = logits.float()
    losses, places, sums = _losses_in_place(gradient, targets, ignore_index)
    gradient.div_(sums)
    gradient.scatter_add_(1, places, torch.full_like(places, -1, dtype=torch.float32))
    # A pass over all of it, which a CPU can spare, where nothing waits for an answer.
    if logits.device.type != "cpu" or not is_target.all():
        gradient.masked_fill_(~is_target[:, None], 0)
    return losses, gradient.to(logits.dtype)


def _fusable(logits: torch.Tensor, targets: torch.Tensor, ignore_index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the losses of rows and their gradient by the logits, without writes in place: compiled code fuses it.

    Compiled, it reads the logits once for the losses and once for the gradient.
    """
    is_target = targets != ignore_index
    places = targets.masked_fill(~is_target, 0)[:, None]
    wide = logits.float()
    log_sums = wide.logsumexp(-1, keepdim=True)
    losses = torch.where(is_target, (log_sums - wide.gather(1, places))[:, 0], 0)
    shares = (wide - log_sums).exp()
    is_own = torch.arange(logits.shape[-1], device=logits.device) == places
    return losses, torch.where(is_target[:, None], shares - is_own.float(), 0).to(logits.dtype)


def _compiled_if_possible(device: torch.device) -> _LossesAndGradient:
    """Compile for this GPU, or do without where its compiler does not work, and say so."""
    compiled: _LossesAndGradient = torch.compile(_fusable)
    logits = torch.zeros(2, 8, device=device)
    reason = why_not_compiled(compiled, logits, torch.zeros(2, dtype=torch.int64, device=device), -100)
    if reason is not None:
        logger.warning("the loss is not compiled, since that fails here: %s", reason)
        return _losses_and_gradient
    return compiled


def _accumulate(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, is_wide: bool) -> None:
    """Add a product to a float32 sum, without rounding the product; `is_wide`: at the speed of the factors' type."""
    if is_wide and left.dtype != total.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.float(), right.float())


def _multiply(left: torch.Tensor, right: torch.Tensor, *, is_wide: bool) -> torch.Tensor:
    """Give a float32 product; `is_wide`: at the speed of the factors' type."""
    if is_wide and left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _has_wide_products(device: torch.device) -> bool:
    """Whether this torch gives and adds bfloat16 products in float32 on this device: asked of a small one."""
    total = torch.ones(16, 16, device=device)
    half = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    try:
        _accumulate(total, half, half, is_wide=True)
        product = _multiply(half, half, is_wide=True)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return bool((total == 17).all()) and bool((product == 16).all())


class _Kept:
    """Gradients of parameters, computed in the forward, until the backward takes them."""

    def __init__(self, gradients: list[torch.Tensor | None], dtypes: list[torch.dtype]) -> None:
        self._gradients: list[torch.Tensor | None] | None = gradients
        self._dtypes = dtypes

    def take(self, factor: torch.Tensor) -> list[torch.Tensor | None]:
        if self._gradients is None:
            raise RuntimeError(
                "the gradients of the head have been taken: a loss goes backward once, but with model.loss=full"
            )
        gradients, self._gradients = self._gradients, None
        return [g if g is None else g.mul_(factor).to(dtype) for g, dtype in zip(gradients, self._dtypes, strict=True)]


class _RowsPart(torch.autograd.Function):
    """The sum of losses, and its gradient by the hidden states."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, total: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        ctx.dtype = hidden.dtype
        return total.clone()

    @staticmethod
    def backward(ctx: Any, *of_total: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        of_hidden = torch.empty_like(gradient, dtype=ctx.dtype)
        return torch.mul(gradient, of_total[0], out=of_hidden), None, None


class _HeadPart(torch.autograd.Function):
    """Nothing to add to the sum, and its gradient by the head's parameters."""

    @staticmethod
    def forward(ctx: Any, kept: _Kept, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.kept = kept
        return parameters[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *of_total: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.kept.take(of_total[0])
