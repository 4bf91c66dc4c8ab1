"""Pieces of what a rank holds under DeepSpeed's ZeRO: of flat buffers, and of working weights."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from hfdist.checkpoint.piece import MASTER, WEIGHT, Piece
from hfdist.errors import CheckpointError
from hfdist.models.partitioning import whole_shape
from hfdist.strategies.deepspeed.flat_buffers import held_weight, list_flat_buffers
from hfdist.strategies.optimizer_state import Kept, StateReader
from hfdist.strategies.pieces import list_buffers
from hfdist.strategies.whole import WholeSteps

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def list_pieces(model: nn.Module, engine: DeepSpeedEngine, wholes: WholeSteps | None = None) -> Iterator[Piece]:
    """List what this rank holds of weights, masters, optimizer state and persistent buffers.

    Without half precision what the optimizer steps is listed as the weight. State that the optimizer has not made
    yet is made first, as zeros.

    Args:
        model: the Hugging Face model that the engine wraps; its names are used.
        engine: a DeepSpeed engine with ZeRO 1, 2 or 3, with or without the optimizer on the CPU.
        wholes: the parameters that are stepped whole, as `hook_steps` gives them.

    Raises:
        CheckpointError: an optimizer that keeps what is neither a number nor a tensor, parameters swapped to disk, or
            weights that are not what the optimizer steps, rounded (something else has written to them, so one of the
            two is wrong).
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    stepped_as_weights = set()
    reader = StateReader(engine.optimizer.optimizer)
    for flat in list_flat_buffers(engine.optimizer):
        is_replaced = wholes is not None and wholes.replaces(flat.stepped)
        kept = Kept(numbers=[], tensors={}) if is_replaced else reader.kept_for(flat.options, flat.stepped)
        buffers = dict(kept.tensors)
        if flat.parameters[0].dtype == flat.stepped.dtype:
            stepped_as_weights |= {id(parameter) for parameter in flat.parameters}
            buffers[WEIGHT] = flat.stepped.detach()
        else:
            buffers[MASTER] = flat.stepped.detach()
        for run in flat.runs:
            name, shape = names[id(run.parameter)], whole_shape(run.parameter)
            part = slice(run.offset, run.offset + run.weight.numel())
            _check_not_drifted(name, flat.stepped.detach()[part], run.weight)
            yield from kept.numbers_of(name)
            for key, buffer in buffers.items():
                yield Piece(name=name, key=key, shape=shape, start=run.start, view=buffer[part])
    for named in () if wholes is None else wholes.named():
        yield from reader.pieces_of(*named)
    yield from list_weights(model, but=stepped_as_weights)


def list_weights(model: nn.Module, but: Collection[int] = ()) -> Iterator[Piece]:
    """List what this rank holds of the weights that the model computes with, and of persistent buffers.

    Without the parameters of the identities `but`.
    """
    for name, parameter in model.named_parameters():
        if id(parameter) not in but:
            start, view = held_weight(name, parameter)
            yield Piece(name=name, key=WEIGHT, shape=whole_shape(parameter), start=start, view=view)
    yield from list_buffers(model)


def whole_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """List the working weights that every data rank holds whole between steps."""
    for name, parameter in model.named_parameters():
        if not hasattr(parameter, "ds_status") or parameter.ds_status.name == "AVAILABLE":
            yield name, parameter


def after_load(model: nn.Module, engine: DeepSpeedEngine) -> None:
    """Copy what the optimizer steps into the weights that the model computes with. A collective."""
    zero = engine.optimizer
    if not hasattr(zero, "fp32_partitioned_groups_flat"):
        zero.update_lp_params()
        # DeepSpeed links fragments of the state to parameters once; they may be tensors from before.
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()
        return
    for group in range(len(zero.fp32_partitioned_groups_flat)):
        zero._reassign_or_swap_out_partitioned_parameters(group)
    if zero.persistent_parameters:
        # Small parameters stay whole on every rank between steps, frozen ones too: those copies are of before.
        zero.persistent_parameters[0].partition(zero.persistent_parameters)
        zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


def _check_not_drifted(name: str, stepped: torch.Tensor, weight: torch.Tensor) -> None:
    rounded = stepped.to(device=weight.device, dtype=weight.dtype)
    if rounded.data_ptr() == weight.data_ptr() or torch.equal(rounded, weight):
        return
    # Equal tensors that hold NaN come here too.
    if not torch.allclose(rounded, weight, rtol=0, atol=0, equal_nan=True):
        raise CheckpointError(
            "weights and the copies that the optimizer steps have drifted apart",
            where=name,
            hint="change weights only before training starts, never between steps",
        )
