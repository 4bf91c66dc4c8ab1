"""Where DeepSpeed's ZeRO optimizers keep their pieces: runs of flattened groups, cut over the data ranks.

DeepSpeed has helpers to read them (`safe_get_full_*`), but those gather, and hang or give wrong data in several
layouts, so its fields are read directly; tests/distributed/test_checkpoint_zero.py fails where one moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from hfdist.checkpoint.piece import MASTER, STEP, WEIGHT, Piece
from hfdist.strategies.pieces_replicated import MOMENTS, make_state, named_buffers, whole


class _Run(NamedTuple):
    """Elements of one parameter inside one of the optimizer's flat tensors."""

    parameter: nn.Parameter
    start: int
    """In the flattened parameter."""
    flat: torch.Tensor
    offset: int
    """In the flat tensor."""
    length: int


def list_pieces(model: nn.Module, engine: Any) -> list[Piece]:
    """This rank's runs of every parameter and its optimizer state; what is not cut is listed whole."""
    optimizer = engine.optimizer
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    pieces = [whole(name, WEIGHT, tensor) for name, tensor in named_buffers(model)]
    has_copies = next(model.parameters()).dtype != torch.float32
    trained = set()
    for run in _runs(optimizer):
        trained.add(id(run.parameter))
        state = optimizer.optimizer.state[run.flat]
        make_state(state, run.flat)
        name, shape = names[id(run.parameter)], _shape(run.parameter)
        pieces.append(Piece(name=name, key=STEP, shape=(), start=0, view=state[STEP]))
        if run.length > 0:
            # Without half precision the optimizer's copy is the weight itself, and is saved as such.
            tensors = {MASTER if has_copies else WEIGHT: run.flat, **{key: state[key] for key in MOMENTS}}
            for key, flat in tensors.items():
                view = flat.detach().narrow(0, run.offset, run.length)
                pieces.append(Piece(name=name, key=key, shape=shape, start=run.start, view=view))
    for name, parameter in model.named_parameters():
        if has_copies or id(parameter) not in trained:
            pieces += _computed_weight(name, parameter)
    return pieces


def after_load(model: nn.Module, engine: Any) -> None:
    """Copy the optimizer's float32 values into the weights that the model computes with. A collective."""
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() < 3:
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
        optimizer.update_lp_params()
        return
    for group in range(len(optimizer.fp32_partitioned_groups_flat)):
        optimizer._reassign_or_swap_out_partitioned_parameters(group)
    # Small parameters stay whole on every rank between steps.
    if optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)


def _runs(optimizer: Any) -> Iterator[_Run]:
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return _runs_zero3(optimizer)
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        return _runs_zero1_and_2(optimizer)
    return _runs_bf16(optimizer)


def _runs_zero1_and_2(optimizer: Any) -> Iterator[_Run]:
    for group, flat in enumerate(optimizer.single_partition_of_fp32_groups):
        first = dist.get_rank(optimizer.real_dp_process_group[group]) * flat.numel()
        last = first + flat.numel()
        placed = zip(optimizer.round_robin_bit16_groups[group], optimizer.round_robin_bit16_offsets[group], strict=True)
        for parameter, offset in placed:
            low, high = max(first, offset), min(last, offset + parameter.numel())
            if low < high:
                yield _Run(parameter, low - offset, flat, low - first, high - low)


def _runs_bf16(optimizer: Any) -> Iterator[_Run]:
    """Of ZeRO-1 with bfloat16 and float32 gradients, for which DeepSpeed takes another class."""
    for group, flat in zip(optimizer.bf16_groups, optimizer.fp32_groups_flat_partition, strict=True):
        for parameter in group:
            mapping = parameter._hp_mapping
            if mapping is not None:
                here = mapping.hp_fragment_address
                yield _Run(parameter, mapping.lp_fragment_address.start, flat, here.start, here.numel)


def _runs_zero3(optimizer: Any) -> Iterator[_Run]:
    rank = dist.get_rank(optimizer.dp_process_group)
    for group in optimizer.fp16_groups:
        for parameter in group:
            number, offset, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
            start = min(rank * length, parameter.ds_numel)
            # The last shares are filled up to equal length.
            held = min(length, parameter.ds_numel - start)
            yield _Run(parameter, start, optimizer.fp32_partitioned_groups_flat[number], offset, held)


def _computed_weight(name: str, parameter: nn.Parameter) -> list[Piece]:
    if not hasattr(parameter, "ds_tensor"):
        return [whole(name, WEIGHT, parameter.data)]
    share = parameter.ds_tensor.detach()
    start = min(dist.get_rank(parameter.ds_process_group) * share.numel(), parameter.ds_numel)
    held = min(share.numel(), parameter.ds_numel - start)
    if held == 0:
        return []
    return [Piece(name=name, key=WEIGHT, shape=_shape(parameter), start=start, view=share.narrow(0, 0, held))]


def _shape(parameter: nn.Parameter) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))
