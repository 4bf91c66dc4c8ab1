"""A model sharded by FSDP2 in place: which modules are units, and how gradients are reduced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hfdist.collectives import broadcast
from hfdist.config.strategy import Offload, StrategyConfig
from hfdist.errors import ConfigError
from hfdist.models.blocks import calls_blocks, find_block_parts
from hfdist.models.image_text import reads_images
from hfdist.models.packed_weights import hold_as_floats
from hfdist.models.probing import unused_parameters
from hfdist.strategies.base import check_no_scalars
from hfdist.strategies.parts import ModelParts


def shard_model(
    model: nn.Module,
    mesh: DeviceMesh,
    config: StrategyConfig,
    parts: ModelParts | None = None,
    *,
    axis: str = "sharded",
) -> frozenset[str]:
    """Shard a model, as `shard_by_blocks`; it is its own root, and its class keeps its name."""
    check_no_scalars(model, "FSDP2")
    name = type(model).__name__
    unused = shard_by_blocks(model, model, mesh, config, parts, axis=axis)
    # Exported configs name the class, and the Trainer knows causal models by it.
    type(model).__name__ = name
    return unused


def shard_by_blocks(
    model: nn.Module,
    root: nn.Module,
    mesh: DeviceMesh,
    config: StrategyConfig,
    parts: ModelParts | None = None,
    *,
    axis: str = "sharded",
) -> frozenset[str]:
    """Shard a model in place over the ranks of `axis`: a unit a block, the rest with `root`, which is or has the model.

    Experts that ranks share are units of their own, sharded over the ranks that hold the same.

    Returns:
        The kinds of names of parameters that a step may not use (`unused_parameters`), as far as that is known.

    Raises:
        ConfigError: a parameter that FSDP2 cannot shard.
    """
    unused = unused_parameters(cast(PreTrainedModel, model))
    units = list(_list_units(cast(PreTrainedModel, model)))
    axes = _with_replicas(mesh, axis)
    offloads = config.offload is Offload.cpu
    policy = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if offloads else OffloadPolicy()
    for experts in () if parts is None else parts.list_experts(model):
        _shard(experts, _with_replicas(mesh, "sharded_experts"), config.frees_after_forward, policy)
    for unit in units:
        _shard(unit, axes, config.frees_after_forward, policy)
    _prefetch(cast(list[FSDPModule], units), config.prefetch)
    # The backward begins with what the forward ends with.
    _shard(root, axes, False, policy)
    if offloads:
        # Whoever prepares a model for training moves it to the device, and shards must stay where they are.
        cast(Any, root).to = lambda *_, **__: root
    # transformers reads here that every rank must take part in each forward, and that micro batches accumulate.
    cast(Any, model)._is_fsdp_managed_module = True
    if reads_images(model):
        # Features of images are an output, too. Where no loss is one, their gradient alone would let the root gather
        # the last block ahead, after its backward, on ranks with images only.
        cast(FSDPModule, root).set_modules_to_backward_prefetch([cast(FSDPModule, root)])
    if unused is None or unused or reads_images(model):
        # Ranks that use other parameters would otherwise reduce buffers of other sizes.
        cast(FSDPModule, root).set_reduce_scatter_unused_params(True)
    return unused or frozenset()


def _list_units(model: PreTrainedModel) -> Iterator[nn.Module]:
    """List what is gathered besides the root, which has the rest: blocks that share no parameter with others."""
    try:
        blocks = [part for parts in find_block_parts(model) for part in parts]
    except (AttributeError, ConfigError):  # no config, or no blocks
        return
    if not calls_blocks(model):
        return
    num_names = _count_names(model)
    for block in blocks:
        # A block without parameters is on another stage of a pipeline.
        of_block = _count_names(block)
        if of_block and all(num_names[parameter] == count for parameter, count in of_block.items()):
            yield block


def _count_names(module: nn.Module) -> Counter[nn.Parameter]:
    return Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))


def _prefetch(units: list[FSDPModule], count: int) -> None:
    """Let each unit gather the `count` next ones while it computes, in the forward and in the backward."""
    for index, unit in enumerate(units if count > 0 else []):
        unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + count])
        unit.set_modules_to_backward_prefetch(units[max(0, index - count) : index][::-1])


def _with_replicas(mesh: DeviceMesh, axis: str) -> DeviceMesh:
    return mesh["replicate", axis] if mesh["replicate"].size() > 1 else mesh[axis]


def _shard(unit: nn.Module, axes: DeviceMesh, reshards: bool, policy: OffloadPolicy) -> None:
    _prepare(unit, axes)
    # Any: the class that the reduction must have for torch is private.
    sharded: Any = fully_shard(unit, mesh=axes, reshard_after_forward=reshards, offload_policy=policy)
    if axes.device_type == "cpu":
        sharded.set_custom_reduce_scatter(_ExchangedSums())


class _ExchangedSums:
    """A reduce-scatter for CPUs: ranks exchange shares and add up what they get. gloo's own sends twice as much."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Give memory for what is sent, or for a sum; called by FSDP."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        **_: object,
    ) -> None:
        """Reduce at once; called by FSDP."""
        assert op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG), op
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        torch.sum(received.view(group.size(), -1), 0, out=output_tensor)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())


def _prepare(unit: nn.Module, mesh: DeviceMesh) -> None:
    """Start from the weights of the first rank of a mesh, as DDP does: ranks may have drawn their own.

    Called for one unit at a time, so that no more is whole on the device.
    """
    scales = hold_as_floats(unit, mesh.device_type)
    # A DTensor belongs to a unit within this one.
    unsharded = [(name, p) for name, p in unit.named_parameters() if not isinstance(p, DTensor)]
    trained = {p.dtype: name for name, p in unsharded if p.requires_grad}
    if len(trained) > 1:
        what = "FSDP2 reduces the gradients of a block together, so its trained parameters must be of one type"
        found = ", ".join(f"{name}: {dtype}" for dtype, name in trained.items())
        hint = "model.dtype=float32, with train.precision=bf16 for its arithmetic"
        raise ConfigError(what, where="strategy.sharding, model.dtype", found=found, hint=hint)
    for tensor in (*(p for _, p in unsharded), *unit.buffers(), *scales):
        tensor.data = tensor.data.to(mesh.device_type).contiguous()
        for group in mesh.get_all_groups():
            broadcast(tensor.data, group)
