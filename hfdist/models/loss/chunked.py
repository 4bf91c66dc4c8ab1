"""The loss of hidden states without whole logits: a chunk of rows at a time, with its gradients in the same forward.

    for each chunk:   hidden [rows, width]  ->  logits [rows, vocabulary]  ->  losses [rows]
                                                        |
                                             gradient by the logits        ->  gradient by the chunk's hidden states
                                                                           ->  gradient by the head, added up
    kept for the backward: the two gradients on the right; the logits and their gradient are freed with the chunk

A backward only multiplies what is kept by the gradient of the sum. What is kept is float32, rounded after that and not
before: 8 bits times a number such as 1/1025, rounded to 8 bits again, are too large by a thousandth throughout. Hidden
states and head have nodes of their own in the graph, so that a pipeline schedule can run their backwards apart.

Where the loss is not the sum of the rows' losses but another function of them, the losses are computed first, and each
row's gradients are multiplied by the function's gradient. Where the rows of the head lie on several ranks, each rank
has the logits of its own, and the ranks add up what all need.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple
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
"""Logits of a chunk, by the kind of device: on a CPU little memory, on a GPU enough for a full-speed product."""

LEAST_ROWS = 128
"""Least rows of a chunk, for any vocabulary: each chunk reads and writes the gradient of the whole head."""

TENSORS_OF_DIVERGENCE = 8
"""Tensors of a chunk's size that exist at a time where the loss is the divergence from a teacher."""

_LossesAndGradient = Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
"""Takes logits [rows, vocabulary], targets [rows] and the index of rows without a target; gives the token losses [rows]
and the gradient of their sum by the logits."""


class _Computed(NamedTuple):
    """The losses of all rows, and the gradients of their sum, or of a weighted sum."""

    losses: torch.Tensor
    """Loss of each row, not weighted; float32 of shape [rows]."""
    row_gradients: torch.Tensor | None
    """Gradients by the hidden states, float32 of shape [rows, width]; None: not asked for."""
    parameter_gradients: list[torch.Tensor | None]
    """Gradients by the head's trained parameters, float32."""


class ChunkedLoss:
    """The sum of token losses of deferred rows, computed chunk by chunk: a `SumOfLosses`.

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
        num_rows = len(rows.targets)
        kept: slice | torch.Tensor = slice(None)
        if rows.hidden.device.type == "cpu":
            # Rows without a target are left out: most of a fine-tuning batch may be prompts. On a GPU, the host would
            # have to wait for their number.
            kept = rows.targets != rows.ignore_index
            rows = rows.part(kept)
        hidden = rows.hidden
        parameters = [p for p in module.parameters() if p.requires_grad and torch.is_grad_enabled()]
        shard = shared_vocabulary.vocabulary_shard_of(module)
        detached = rows._replace(hidden=hidden.detach())
        chunk_rows = self._chunk_rows(detached, shard)
        with torch.no_grad():
            run = self._run_linear if type(module) is nn.Linear else self._run_by_autograd
            total, factors = None, None
            if rows.reduce is not None:
                losses = run(detached, [], chunk_rows, None, wants_rows=False).losses
                all_losses = losses.new_zeros(num_rows)
                all_losses[kept] = losses
                if not (parameters or hidden.requires_grad):
                    return rows.reduce(all_losses)
                total, all_factors = _differentiated(rows.reduce, all_losses)
                factors = all_factors[kept]
            computed = run(detached, parameters, chunk_rows, factors, wants_rows=hidden.requires_grad)
            if total is None:
                total = computed.losses.sum()
            row_gradients = computed.row_gradients
            # A head of another class runs its own forward, whose backward has added up over the ranks.
            if shard is not None and row_gradients is not None and type(module) is nn.Linear:
                dist.all_reduce(row_gradients, group=shard.group)
        if row_gradients is not None:
            total = _RowsPart.apply(hidden, total, row_gradients)
        if parameters:
            kept_gradients = _KeptGradients(computed.parameter_gradients, [p.dtype for p in parameters])
            total = total + _HeadPart.apply(kept_gradients, *parameters)
        return total

    def _chunk_rows(self, rows: DeferredRows, shard: shared_vocabulary.VocabularyShard | None) -> int:
        """Give the number of rows of each chunk. All have one size, since a GPU keeps memory for each size apart."""
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
        factors: torch.Tensor | None,
        *,
        wants_rows: bool,
    ) -> _Computed:
        """Compute the loss of a head that is a weight and perhaps a bias; their gradients are summed in float32.

        Args:
            rows: the rows, without a graph.
            parameters: those of the head whose gradients are asked for.
            chunk_rows: number of rows of a chunk.
            factors: what the gradient of each row's loss is multiplied by, [rows]; None: by 1.
            wants_rows: whether gradients by the hidden states are asked for.
        """
        module = cast_type(nn.Linear, rows.head.module)
        dtype = compute_dtype(rows.hidden)
        with torch.autocast(rows.hidden.device.type, enabled=False):
            weight = module.weight.to(dtype)
            bias = None if module.bias is None else module.bias.to(dtype)
            sums = {id(p): torch.zeros_like(p, dtype=torch.float32) for p in parameters}
            row_gradients = torch.empty_like(rows.hidden, dtype=torch.float32) if wants_rows else None
            losses = rows.hidden.new_zeros(len(rows.hidden), dtype=torch.float32)
            # One tensor for the logits of all chunks: the system clears large memory each time that it gives it.
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
                if row_gradients is None and not sums and shared_vocabulary.vocabulary_shard_of(module) is None:
                    losses[part] = _losses_alone(logits, chunk)
                    continue
                losses[part], gradient = self._of_logits(logits, chunk)
                if factors is not None:
                    gradient.mul_(factors[part, None])
                if row_gradients is not None:
                    row_gradients[part] = _multiply(gradient, weight, is_wide=self._is_wide)
                if id(module.weight) in sums:
                    _accumulate(sums[id(module.weight)], gradient.T, hidden, is_wide=self._is_wide)
                if bias is not None and id(module.bias) in sums:
                    sums[id(module.bias)] += gradient.sum(0, dtype=torch.float32)
                # It is freed before the next chunk's is made.
                del gradient
        return _Computed(losses, row_gradients, [sums[id(p)] for p in parameters])

    def _of_logits(self, logits: torch.Tensor, rows: DeferredRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Give the losses of rows, and the gradient of their sum by the head's logits, in the type of the logits."""
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
        factors: torch.Tensor | None,
        *,
        wants_rows: bool,
    ) -> _Computed:
        """Compute the loss of a head of any class, such as one with an adapter: autograd runs it chunk by chunk.

        The arguments are those of `_run_linear`.
        """
        sums: list[torch.Tensor | None] = [None] * len(parameters)
        row_gradients = torch.zeros_like(rows.hidden, dtype=torch.float32) if wants_rows else None
        losses = rows.hidden.new_zeros(len(rows.hidden), dtype=torch.float32)
        # The loop runs at least once, since gradients of no rows are zeros, and not None.
        for begin in range(0, max(1, len(rows.hidden)), chunk_rows):
            part = slice(begin, begin + chunk_rows)
            with torch.enable_grad():
                chunk = rows.part(part)
                hidden = chunk.hidden.requires_grad_(wants_rows)
                chunk_losses = _losses(rows.head.forward(hidden), chunk)
                total = chunk_losses.sum() if factors is None else chunk_losses @ factors[part]
                inputs = [hidden, *parameters] if wants_rows else parameters
                gradients = list(torch.autograd.grad(total, inputs, allow_unused=True)) if inputs else []
            losses[part] = chunk_losses.detach()
            if row_gradients is not None:
                chunk_gradient = gradients.pop(0)
                if chunk_gradient is not None:
                    row_gradients[part] = chunk_gradient
            for number, gradient in enumerate(gradients):
                summed = sums[number]
                if summed is not None:
                    summed += gradient
                elif gradient is not None:
                    sums[number] = gradient.float()
        return _Computed(losses, row_gradients, sums)


def compute_dtype(hidden: torch.Tensor) -> torch.dtype:
    """Give the type in which a head multiplies: autocast's, or that of the hidden states."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def _differentiated(reduce: Reduce, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the loss that `reduce` makes of the losses of rows, and its gradient by each of them, [rows]."""
    with torch.enable_grad(), torch.autocast(losses.device.type, enabled=False):
        total = reduce(losses.requires_grad_())
        (factors,) = torch.autograd.grad(total, losses)
    return total.detach(), factors


def _losses(logits: torch.Tensor, rows: DeferredRows) -> torch.Tensor:
    """Give the losses of a chunk, as torch computes them; shape [rows]."""
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

    `wide` is float32 of [rows, vocabulary]: the logits before, and after it the exponentials of the logits less the
    largest one of their row.
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
    """Give the token losses of logits [rows, vocabulary], and the gradient of their sum by the logits, in their type.

    Logits of float32 are overwritten by the gradient.
    """
    is_target = targets != ignore_index
    gradient = logits.float()
    losses, places, sums = _losses_in_place(gradient, targets, ignore_index)
    gradient.div_(sums)
    gradient.scatter_add_(1, places, torch.full_like(places, -1, dtype=torch.float32))
    # This pass over all logits is left out on a CPU where it changes nothing; on a GPU, to ask would be to wait.
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
    """Compile the loss for this GPU; where its compiler does not work, log that and give the loss uncompiled."""
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
    """Whether this torch can give and add up bfloat16 products in float32 on this device: a small product is tried."""
    total = torch.ones(16, 16, device=device)
    half = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    try:
        _accumulate(total, half, half, is_wide=True)
        product = _multiply(half, half, is_wide=True)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return bool((total == 17).all()) and bool((product == 16).all())


class _KeptGradients:
    """Gradients of the head's parameters, computed in the forward and held until the backward takes them."""

    def __init__(self, gradients: list[torch.Tensor | None], dtypes: list[torch.dtype]) -> None:
        self._gradients: list[torch.Tensor | None] | None = gradients
        self._dtypes = dtypes

    def take(self, factor: torch.Tensor) -> list[torch.Tensor | None]:
        """Give the gradients times the gradient of the sum, in the types of the parameters, and hold them no longer."""
        if self._gradients is None:
            raise RuntimeError(
                "the gradients of the head have been taken: a loss goes backward once, but with model.loss=full"
            )
        gradients, self._gradients = self._gradients, None
        return [
            None if gradient is None else gradient.mul_(factor).to(dtype)
            for gradient, dtype in zip(gradients, self._dtypes, strict=True)
        ]


class _RowsPart(torch.autograd.Function):
    """A node of the graph that gives the sum of losses, and in a backward its gradient by the hidden states."""

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
    """A node of the graph that adds 0 to the sum of losses, and gives in a backward its gradient by the head."""

    @staticmethod
    def forward(ctx: Any, kept: _KeptGradients, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.kept = kept
        return parameters[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *of_total: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.kept.take(of_total[0])
