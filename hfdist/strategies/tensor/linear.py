"""Linear layers and embeddings of which each tensor rank has a part, on plain tensors.

    style                   a rank's part        input            output
    colwise                 rows of the weight   whole            its part
    rowwise                 columns              its part         whole, a sum over the ranks
    colwise_gather_output   rows                 whole            whole, gathered
    embedding_rowwise       rows                 tokens           whole, a sum over the ranks

These are transformers' styles. transformers runs them on DTensors, whose overhead is a quarter of the CPU time of a
small Llama's step; plain tensors have none, and their parts may be uneven.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

# Not public; a compiler takes these collectives alone. Elsewhere they cost more than torch.distributed's.
import torch.distributed._functional_collectives as _collectives
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.func import functional_call
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from hfdist.collectives import all_gather_single
from hfdist.errors import first_line

logger = logging.getLogger(__name__)

GATHERED, LOOKED_UP = "colwise_gather_output", "embedding_rowwise"
"""The two styles that hfdist gives to layers itself."""


def split_dimensions(module: nn.Module, style: str) -> dict[str, int]:
    """Give the dimension along which each parameter of a layer is divided, by name; empty: not done here."""
    if style == LOOKED_UP and isinstance(module, nn.Embedding) and module.max_norm is None:
        return {"weight": 0}
    is_linear, is_conv1d = _is_linear(module), type(module) is Conv1D
    if is_linear and style == "rowwise":
        return {"weight": 1}
    if (is_linear and style in ("colwise", GATHERED)) or (is_conv1d and style == GATHERED):
        of_bias = {} if module.bias is None else {"bias": 0}
        return {"weight": 1 if is_conv1d else 0} | of_bias
    return {}


@unset_fake_temporarily()
@torch.no_grad()
def _is_linear(module: object) -> bool:
    """Whether a layer computes what torch's does. A subclass is run and compared: some, such as routers, do not."""
    if type(module) is nn.Linear:
        return True
    if not isinstance(module, nn.Linear) or module.weight is None:
        return False
    # Not the module's weights: a model is partitioned before they are drawn, and planned without any values. Few, in
    # float32: they take no time of a real layer, and rounding, which differs between machines, decides nothing.
    rows, columns = (min(size, 64) for size in module.weight.shape)
    weight = torch.linspace(-1, 1, rows * columns, device="cpu", dtype=torch.float32).view(rows, columns)
    given = {"weight": weight} | ({} if module.bias is None else {"bias": weight[:, 0]})
    value = torch.linspace(-1, 1, columns, device="cpu", dtype=torch.float32)[None]
    try:
        found: object = functional_call(module, given, value)
        return isinstance(found, torch.Tensor) and torch.allclose(found, functional.linear(value, **given), rtol=1e-4)
    except Exception as error:  # of a class of any kind
        logger.debug("%s does not run as a linear layer: %s", type(module).__name__, first_line(error))
        return False


def shard_range(size: int, num_ranks: int, rank: int) -> tuple[int, int]:
    """Give the first index of a rank's part and one past the last; the first ranks have one more if it is uneven."""
    least, more = divmod(size, num_ranks)
    return rank * least + min(rank, more), (rank + 1) * least + min(rank + 1, more)


class SharedInputs:
    """Sums the gradient of a tensor over the ranks once for all layers that read it.

    The layers of queries, keys and values read one, and so do those of gate and up.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._input: weakref.ref[torch.Tensor] | None = None
        self._shared: torch.Tensor | None = None

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        """Give the same numbers, with the gradient summed over the ranks."""
        if torch.compiler.is_compiling():
            # A compiler cannot follow what is kept between layers.
            alone: torch.Tensor = _SumGradient.apply(value, self._group)
            return alone
        shared = self._shared
        has_graph = torch.is_grad_enabled() and value.requires_grad
        if shared is None or self._input is None or self._input() is not value or shared.requires_grad != has_graph:
            shared = self._shared = _SumGradient.apply(value, self._group)
            self._input = weakref.ref(value, self._forget)
        return shared

    def _forget(self, dead: weakref.ref[torch.Tensor]) -> None:
        if dead is self._input:
            self._input = self._shared = None


class OfSequence(Protocol):
    """What layers of a tensor region ask of `sequence.SequenceParallel`."""

    def linear(self, value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Give a layer's product with what was gathered."""

    def reduce_scatter(self, value: torch.Tensor) -> torch.Tensor:
        """Give this rank's part of the sum over the ranks."""


def run_locally(
    module: Any,
    style: str,
    group: dist.ProcessGroup,
    inputs: SharedInputs,
    sequence: OfSequence | None = None,
) -> None:
    """Let a layer that has only its rank's part give what `style` says.

    With `sequence` `colwise` reads what was gathered along the sequence, and of the sum that `rowwise` gives a rank has
    a part of each sequence.
    """

    def colwise(value: torch.Tensor) -> torch.Tensor:
        weight = module.weight.T if type(module) is Conv1D else module.weight
        if sequence is not None:
            # What was gathered has its gradient added up there.
            return sequence.linear(value, weight, module.bias)
        return functional.linear(inputs(value), weight, module.bias)

    def rowwise(value: torch.Tensor) -> torch.Tensor:
        product = functional.linear(value, module.weight)
        total: torch.Tensor = _Sum.apply(product, group) if sequence is None else sequence.reduce_scatter(product)
        return total if module.bias is None else total + module.bias

    def gather(value: torch.Tensor) -> torch.Tensor:
        size = module.nf if type(module) is Conv1D else module.out_features
        whole: torch.Tensor = _Gather.apply(colwise(value), size, group)
        return whole

    forwards = {"colwise": colwise, "rowwise": rowwise, GATHERED: gather}
    module.forward = _divided_lookup(module, group) if style == LOOKED_UP else forwards[style]


def _divided_lookup(module: nn.Embedding, group: dist.ProcessGroup) -> Callable[[torch.Tensor], torch.Tensor]:
    start, stop = shard_range(module.num_embeddings, group.size(), group.rank())
    padding = module.padding_idx
    # The row that gets no gradient.
    module.padding_idx = None if padding is None or not start <= padding < stop else padding - start
    run = module.forward

    def look_up(tokens: torch.Tensor) -> torch.Tensor:
        is_elsewhere = (tokens < start) | (tokens >= stop)
        # By the forward of the class, which may scale embeddings.
        values = run((tokens - start).masked_fill(is_elsewhere, 0))
        total: torch.Tensor = _Sum.apply(values.masked_fill(is_elsewhere[..., None], 0), group)
        return total

    return look_up


class _SumGradient(torch.autograd.Function):
    """Give what each rank uses for its own part: the gradient of the whole is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        # Not a view: that would keep the value as long as it lives itself.
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        [gradient] = gradients
        if torch.compiler.is_compiling():
            return _sum_compiled(gradient, ctx.group), None
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Sum(torch.autograd.Function):
    """Add up what the ranks have computed, in place; all ranks use the sum alike, so each has its gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return _sum_compiled(value, group)
        ctx.mark_dirty(value)
        dist.all_reduce(value, group=group)
        return value

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        [gradient] = gradients
        return gradient, None


class _Gather(torch.autograd.Function):
    """Put the ranks' parts of the last dimension side by side; all ranks use the whole alike."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, size: int, group: dist.ProcessGroup) -> torch.Tensor:
        num_ranks, rank = group.size(), group.rank()
        ctx.own = shard_range(size, num_ranks, rank)
        most = -(-size // num_ranks)
        # A gather needs equal parts.
        sent = functional.pad(part, (0, most - part.shape[-1])).contiguous()
        if torch.compiler.is_compiling():
            gathered = _collectives.wait_tensor(_collectives.all_gather_tensor(sent[None], 0, group))
        else:
            gathered = sent.new_empty(num_ranks, *sent.shape)
            all_gather_single(gathered.view(-1), sent.view(-1), group=group)
        ranges = [shard_range(size, num_ranks, other) for other in range(num_ranks)]
        return torch.cat([gathered[other][..., : stop - start] for other, (start, stop) in enumerate(ranges)], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        [gradient], (start, stop) = gradients, ctx.own
        return gradient[..., start:stop], None, None


def _sum_compiled(value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    total: torch.Tensor = _collectives.wait_tensor(_collectives.all_reduce(value.contiguous(), "sum", group))
    return total
