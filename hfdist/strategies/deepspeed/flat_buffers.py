"""The flat buffers that DeepSpeed's ZeRO optimizers step, of which a rank holds one run:

    stage 1, 2      | a a a a a b|b b c c c -|        one buffer a parameter group, split evenly over the ranks
                    |   rank 0   |   rank 1  |
    stage 3         rank 0: a a|b b|c   rank 1: a a|b -|c    every parameter split evenly, then put in a row

DeepSpeed has helpers to read them (`safe_get_full_*`), but those gather, and hang or give wrong data in several
layouts, so its fields are read directly; tests/distributed/test_checkpoint_zero.py fails where one moves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import nn

from hfdist.errors import CheckpointError
from hfdist.models.partitioning import whole_shape
from hfdist.optim.joined import Group

if TYPE_CHECKING:
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    ZeroOptimizer: TypeAlias = DeepSpeedZeroOptimizer | BF16_Optimizer | DeepSpeedZeroOptimizer_Stage3


@dataclass(frozen=True, kw_only=True)
class Run:
    """Elements of one parameter in this rank's part of a flat buffer."""

    parameter: nn.Parameter
    start: int
    """First element, counted in the flattened parameter."""
    offset: int
    """First element, counted in the rank's part of the buffer."""
    weight: torch.Tensor
    """View of these elements in the weights that the model computes with. 1-D, may be empty."""


@dataclass(frozen=True, kw_only=True)
class FlatBuffer:
    """One flat buffer, as this rank holds it."""

    stepped: torch.Tensor
    """What the optimizer steps: a copy of the weights, in float32 where they are not."""
    options: Group
    """The inner optimizer's parameter group."""
    parameters: list[nn.Parameter]
    """All that the buffer holds over all ranks."""
    runs: list[Run]
    group: dist.ProcessGroup
    """The ranks that share the buffer."""
    offsets: dict[int, int]
    """First element of parameters that lie in a row in it, by identity; ZeRO-3 has parts of each on each rank."""

    def spans(self, parameter: nn.Parameter) -> Iterator[tuple[int, int]]:
        """Give of a parameter the first element that each rank has, and one past the last."""
        num_ranks, part = self.group.size(), self.stepped.numel()
        offset, total = self.offsets.get(id(parameter)), math.prod(whole_shape(parameter))
        if offset is None:
            part, offset = cast(Any, parameter).ds_tensor.ds_numel, 0
        for rank in range(num_ranks):
            start, stop = (min(max(edge * part - offset, 0), total) for edge in (rank, rank + 1))
            yield start, stop


def stepped_buffers(zero: ZeroOptimizer) -> list[torch.Tensor]:
    """Give the flat buffers that the optimizer steps on this rank."""
    return [flat.stepped for flat in list_flat_buffers(zero)]


def list_flat_buffers(zero: ZeroOptimizer) -> Iterator[FlatBuffer]:
    """List the flat buffers of a ZeRO optimizer, as this rank holds them."""
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        yield from _flats_stage_3(zero)
        return
    if hasattr(zero, "single_partition_of_fp32_groups"):
        flats, partitions = zero.single_partition_of_fp32_groups, zero.parallel_partitioned_bit16_groups
        # Round-robin gradients reorder a group; these two lists have the order in the buffer.
        groups, offsets = zero.round_robin_bit16_groups, zero.round_robin_bit16_offsets
    else:
        # Stage 1 with bfloat16 weights and float32 sums of gradients, for which DeepSpeed takes another class.
        flats, partitions, groups = zero.fp32_groups_flat_partition, zero.bf16_partitioned_groups, zero.bf16_groups
        offsets = [list(accumulate((p.numel() for p in group), initial=0))[:-1] for group in groups]
    for index, stepped in enumerate(flats):
        rank = dist.get_rank(zero.real_dp_process_group[index])
        weights = partitions[index][rank].detach()
        runs = _clip(groups[index], offsets[index], weights, first=rank * stepped.numel())
        yield FlatBuffer(
            stepped=stepped,
            options=zero.optimizer.param_groups[index],
            parameters=groups[index],
            runs=runs,
            group=zero.real_dp_process_group[index],
            offsets={id(p): offset for p, offset in zip(groups[index], offsets[index], strict=True)},
        )


def _clip(parameters: list[nn.Parameter], offsets: list[int], weights: torch.Tensor, *, first: int) -> list[Run]:
    """Clip parameters, at their offsets in the whole buffer, to the rank's part `weights` that starts at `first`."""
    runs = []
    for parameter, offset in zip(parameters, offsets, strict=True):
        start, stop = max(offset, first), min(offset + parameter.numel(), first + weights.numel())
        if start < stop:
            weight = weights[start - first : stop - first]
            runs.append(Run(parameter=parameter, start=start - offset, offset=start - first, weight=weight))
    return runs


def _flats_stage_3(zero: ZeroOptimizer) -> Iterator[FlatBuffer]:
    for index, stepped in enumerate(zero.fp32_partitioned_groups_flat):
        runs = []
        for parameter in zero.fp16_groups[index]:
            _, offset, _ = zero.grad_position[zero.get_param_id(parameter)]
            start, weight = held_weight(f"parameter {parameter.ds_id}", parameter)
            runs.append(Run(parameter=parameter, start=start, offset=offset, weight=weight))
        options = zero.optimizer.param_groups[zero.sub_group_to_group_id[index]]
        group, parameters = zero.dp_process_group, zero.fp16_groups[index]
        yield FlatBuffer(stepped=stepped, options=options, parameters=parameters, runs=runs, group=group, offsets={})


def held_weight(name: str, parameter: Any) -> tuple[int, torch.Tensor]:
    """Give the first element and a view of what this rank holds of a parameter; stages 1 and 2 hold it whole.

    Raises:
        CheckpointError: it is swapped out to disk.
    """
    if not hasattr(parameter, "ds_tensor"):
        return 0, parameter.detach()
    share = parameter.ds_tensor
    if share.status.name != "AVAILABLE":
        raise CheckpointError("a parameter is swapped out to disk, where saving cannot read it", where=name)
    # The last shares are filled up to equal length.
    start = min(dist.get_rank(parameter.ds_process_group) * share.ds_numel, parameter.ds_numel)
    return start, share.detach()[: parameter.ds_numel - start]
