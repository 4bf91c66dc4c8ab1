"""Hooks of the inner optimizer of DeepSpeed's ZeRO, by which it steps as on one process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from hfdist.checkpoint.piece import WEIGHT, Piece
from hfdist.collectives import device_of
from hfdist.models.partitioning import whole_shape
from hfdist.models.probing import kind_of_name, unused_parameters
from hfdist.optim.probe import groups_of_wholes
from hfdist.strategies.deepspeed.flat_buffers import FlatBuffer, Run, list_flat_buffers
from hfdist.strategies.whole import Region, Regions, ShardedParameter, WholeSteps

if TYPE_CHECKING:
    from hfdist.strategies.deepspeed.flat_buffers import ZeroOptimizer


def hook_steps(model: nn.Module, whole: PreTrainedModel, zero: ZeroOptimizer) -> WholeSteps | None:
    """Let the optimizer step as on one process: whole parameters where it needs them, and none that is unused.

    The hooks are those of the inner optimizer: when they run, gradients are reduced, unscaled and clipped.

    Args:
        model: this rank's model; its names are used.
        whole: tells what may be unused.
        zero: DeepSpeed's optimizer.

    Returns:
        The steps of whole parameters; None: the optimizer needs none.
    """
    unused = _UnusedParameters(whole, zero)
    # Hooks run in order. `keep` comes first: it looks at DeepSpeed's buffers, in whose place whole parameters are put
    # then. `put_back` comes last.
    zero.optimizer.register_step_pre_hook(unused.keep)
    wholes = _step_wholes(model, zero)
    zero.optimizer.register_step_post_hook(unused.put_back)
    return wholes


def _step_wholes(model: nn.Module, zero: ZeroOptimizer) -> WholeSteps | None:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    of_wholes = set(map(id, groups_of_wholes(zero.optimizer, zero.optimizer.param_groups)))
    regions: dict[ShardedParameter, Regions] = {}
    for flat in list_flat_buffers(zero):
        # A table, as experts may be thousands of parameters.
        runs = {id(run.parameter): run for run in flat.runs}
        for parameter in flat.parameters if id(flat.options) in of_wholes else ():
            shard = _sharded(flat, parameter, runs.get(id(parameter)), names[id(parameter)])
            spans = flat.spans(parameter)
            regions[shard] = [[Region(start, stop)] if start < stop else [] for start, stop in spans]
    return WholeSteps(zero.optimizer, regions) if regions else None


def _sharded(flat: FlatBuffer, parameter: nn.Parameter, run: Run | None, name: str) -> ShardedParameter:
    shape = whole_shape(parameter)

    def own_pieces(held: torch.Tensor) -> list[Piece]:
        if run is None or not run.weight.numel():
            return []
        view = held.detach()[run.offset : run.offset + run.weight.numel()]
        return [Piece(name=name, key=WEIGHT, shape=shape, start=run.start, view=view)]

    return ShardedParameter(
        name=name,
        held=flat.stepped,
        options=flat.options,
        shape=shape,
        group=flat.group,
        own_pieces=own_pieces,
    )


class _UnusedParameters:
    """Keeps a step from changing parameters for which no rank has a gradient: in one process they stay as they are.

    In a flat buffer their gradients are zeros, and weight decay would move them. A small model tells which parameters
    may be unused (`unused_parameters`). The optimizer's state of such parameters stays zeros by itself.
    """

    def __init__(self, model: PreTrainedModel, zero: ZeroOptimizer) -> None:
        self._suspects: list[tuple[FlatBuffer, list[nn.Parameter]]] = []
        """Flat buffers, and the parameters in each that a step may not use."""
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Unused parts of the flat buffers that are stepped, and their values before the step."""
        kinds = unused_parameters(model) or frozenset()
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for flat in list_flat_buffers(zero) if kinds else ():
            suspected = [p for p in flat.parameters if kind_of_name(names[id(p)]) in kinds]
            if suspected:
                self._suspects.append((flat, suspected))

    def keep(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Copy the unused parameters of the flat buffers that are stepped now. A collective if any may be unused."""
        held = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        stepped_ids = {id(tensor) for tensor in held if tensor.grad is not None}
        for flat, suspected in self._suspects:
            stepped = flat.stepped
            # With offload, buffers that are not stepped now have gradients, too.
            if id(stepped) not in stepped_ids:
                continue
            assert stepped.grad is not None
            parts = {id(run.parameter): slice(run.offset, run.offset + run.weight.numel()) for run in flat.runs}
            counts = [stepped.grad[parts.get(id(p), slice(0))].count_nonzero() for p in suspected]
            used = torch.stack(counts).to(device_of(flat.group))
            dist.all_reduce(used, group=flat.group)
            for parameter, count in zip(suspected, used.tolist(), strict=True):
                if not count and id(parameter) in parts:
                    part = stepped.data[parts[id(parameter)]]
                    self._kept.append((part, part.clone()))

    def put_back(self, *_: object) -> None:
        """Give unused parameters the values that they had before the step."""
        for part, before in self._kept:
            part.copy_(before)
        self._kept.clear()
