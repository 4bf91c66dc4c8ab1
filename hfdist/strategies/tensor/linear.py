"""Linear layers and embeddings of which each tensor rank has a part, on plain tensors.

    style                   a rank's part        input            output
    colwise                 rows of the weight   whole            its part
    rowwise                 columns              its part         whole, a sum over the ranks
    colwise_gather_output   rows                 whole            whole, gathered
    embedding_rowwise       rows                 tokens           whole, a sum over the ranks

These are transformers' styles, whose DTensors take a quarter of the CPU time of a small Llama's step; here parts may
also be uneven.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist

# Not public; a compiler takes these collectives alone. Elsewhere they cost more than torch.distributed's.
import torch.distributed._functional_collectives as _collectives
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

GATHERED, LOOKED_UP = "colwise_gather_output", "embedding_rowwise"


def split_dimensions(module: nn.Module, style: str) -> dict[str, int]:
    """Give the dimension along which each parameter of a layer is divided, by name; empty: not done here."""
    if style == LOOKED_UP and isinstance(module, nn.Embedding) and module.max_norm is None:
        return {"weight": 0}
    is_linear, is_conv = _is_linear(module), type(module) is Conv1D
    if is_linear and style == "rowwise":
        return {"weight": 1}
    if (is_linear and style in ("colwise", GATHERED)) or (is_conv and style == GATHERED):
        of_bias = {} if module.bias is None else {"bias": 0}
        return {"weight": 1 if is_conv else 0} | of_bias
    return {}


@torch.no_grad()
def _is_linear(module: object) -> bool:
    """Whether a layer computes what torch's does. A subclass is run and compared: some, such as routers, do not."""
    if type(module) is nn.Linear or not isinstance(module, nn.Linear):
        return type(module) is nn.Linear
    # Numbers of its own: a model is partitioned before its weights are drawn.
    weight = torch.linspace(-1, 1, module.weight.numel()).to(module.weight).view_as(module.weight)
    given = {"weight": weight} | ({} if module.bias is None else {"bias": weight[:, 0]})
    value = torch.linspace(-1, 1, module.in_features).to(weight)[None]
    try:
        return torch.allclose(functional_call(module, given, value), functional.linear(value, **given), rtol=1e-4)
    except Exception:  # of a class of any kind
        return False


def shard_range(size: int, num_ranks: int, rank: int) -> tuple[int, int]:
    """Give the first index of a rank's part and one past the last; the first ranks have one more if it is uneven."""
    least, more = divmod(size, num_ranks)
    return rank * least + min(rank, more), (rank + 1) * least + min(rank + 1, more)


class SharedInputs:
    """What layers of one model read. Those that read one tensor add up its gradient over the ranks once, together.

    So do the layers of queries, keys and values, and those of gate and up.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._read: weakref.ref[torch.Tensor] | None = None
        self._given: torch.Tensor | None = None

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        """Give the same numbers, with the gradient summed over the ranks."""
        if torch.compiler.is_compiling():
            # A compiler cannot follow what is kept between layers.
            alone: torch.Tensor = _SumGradient.apply(value, self._group)
            return alone
        given = self._given
        has_graph = torch.is_grad_enabled() and value.requires_grad
        if given is None or self._read is None or self._read() is not value or given.requires_grad != has_graph:
            given = self._given = _SumGradient.apply(value, self._group)
            self._read = weakref.ref(value, self._forget)
        return given

    def _forget(self, read: weakref.ref[torch.Tensor]) -> None:
        if read is self._read:
            self._read = self._given = None


def run_locally(module: Any, style: str, group: dist.ProcessGroup, inputs: SharedInputs) -> None:
    """Let a layer that has only its rank's part give what `style` says."""

    def colwise(value: torch.Tensor) -> torch.Tensor:
        weight = module.weight.T if type(module) is Conv1D else module.weight
        return functional.linear(inputs(value), weight, module.bias)

    def rowwise(value: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = _Sum.apply(functional.linear(value, module.weight), group)
        return total if module.bias is None else total + module.bias

    def gather(value: torch.Tensor) -> torch.Tensor:
        size = module.nf if type(module) is Conv1D else module.out_features
        whole: torch.Tensor = _Gather.apply(colwise(value), size, group)
        return whole

    module.forward = (
        _looking_up(module, group)
        if style == LOOKED_UP
        else {"colwise": colwise, "rowwise": rowwise, GATHERED: gather}[style]
    )


def _looking_up(module: nn.Embedding, group: dist.ProcessGroup) -> object:
    start, stop = shard_range(module.num_embeddings, group.size(), group.rank())
    padding = module.padding_idx
    # The row that gets no gradient.
    module.padding_idx = None if padding is None or not start <= padding < stop else padding - start
    run = module.forward

    def look_up(tokens: torch.Tensor) -> torch.Tensor:
        is_elsewhere = (tokens < start) | (tokens >= stop)
        # As the class does it, which may scale.
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
        return gradients[0], None


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
            dist.all_gather_into_tensor(gathered.view(-1), sent.view(-1), group=group)
        ends = [shard_range(size, num_ranks, other) for other in range(num_ranks)]
        return torch.cat([gathered[other][..., : stop - start] for other, (start, stop) in enumerate(ends)], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        start, stop = ctx.own
        return gradients[0][..., start:stop], None, None


def _sum_compiled(value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    total: torch.Tensor = _collectives.wait_tensor(_collectives.all_reduce(value.contiguous(), "sum", group))
    return total
