"""Where DeepSpeed's ZeRO optimizers keep their pieces. They step a few flat buffers, of which a rank holds one run:

    stage 1, 2      | a a a a a b|b b c c c -|        one buffer a parameter group, split evenly over the ranks
                    |   rank 0   |   rank 1  |
    stage 3         rank 0: a a|b b|c   rank 1: a a|b -|c    every parameter split evenly, then put in a row

DeepSpeed has helpers to read them (`safe_get_full_*`), but those gather, and hang or give wrong data in several
layouts, so its fields are read directly; tests/distributed/test_checkpoint_zero.py fails where one moves.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from hfdist.checkpoint.piece import MASTER, WEIGHT, Piece
from hfdist.collectives import device_of
from hfdist.errors import CheckpointError
from hfdist.models.partitioning import whole_shape
from hfdist.models.probing import kind_of_name, unused_parameters
from hfdist.optim.joined import Group
from hfdist.optim.probe import groups_of_wholes
from hfdist.strategies.optimizer_state import Kept, StateReader
from hfdist.strategies.pieces import list_buffers
from hfdist.strategies.whole import Place, Places, ShardedParameter, WholeSteps

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    ZeroOptimizer: TypeAlias = DeepSpeedZeroOptimizer | BF16_Optimizer | DeepSpeedZeroOptimizer_Stage3


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Elements of one parameter in this rank's part of a flat buffer."""

    parameter: nn.Parameter
    start: int
    """First element, counted in the flattened parameter."""
    offset: int
    """First element, counted in the rank's part of the buffer."""
    weight: torch.Tensor
    """The same elements among the weights that the model computes with. 1-D, may be empty."""


@dataclass(frozen=True, kw_only=True)
class _Flat:
    """One flat buffer, as this rank holds it."""

    stepped: torch.Tensor
    """What the optimizer steps: a copy of the weights, in float32 where they are not."""
    options: Group
    """The inner optimizer's parameter group."""
    parameters: list[nn.Parameter]
    """All that the buffer holds over all ranks."""
    runs: list[_Run]
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


def list_pieces(model: nn.Module, engine: DeepSpeedEngine, wholes: WholeSteps | None = None) -> Iterator[Piece]:
    """List what this rank holds of weights, masters, optimizer state and persistent buffers.

    Without half precision what the optimizer steps is listed as the weight. State that the optimizer has not made
    yet is made first, as zeros.

    Args:
        model: the Hugging Face model that the engine wraps; its names are used.
        engine: a DeepSpeed engine with ZeRO 1, 2 or 3, with or without the optimizer on the CPU.
        wholes: from `hook_steps`.

    Raises:
        CheckpointError: an optimizer that keeps what is neither a number nor a tensor, parameters swapped to disk, or
            weights that are not what the optimizer steps, rounded (something else has written to them, so one of the
            two is wrong).
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    stepped_as_weights = set()
    reader = StateReader(engine.optimizer.optimizer)
    for flat in _flats(engine.optimizer):
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


def hook_steps(model: nn.Module, whole: PreTrainedModel, zero: ZeroOptimizer) -> WholeSteps | None:
    """Let the optimizer step as on one process: whole parameters where it needs them, and none that is unused.

    By hooks of the inner optimizer: its gradients are reduced, unscaled and clipped then.

    Args:
        model: of this rank; its names are used.
        whole: tells what may be unused.
        zero: of DeepSpeed.

    Returns:
        The steps of whole parameters; None: the optimizer needs none.
    """
    unused = _Unused(whole, zero)
    # It looks at what DeepSpeed steps, before whole parameters stand there, and has the last word.
    zero.optimizer.register_step_pre_hook(unused.keep)
    wholes = _step_wholes(model, zero)
    zero.optimizer.register_step_post_hook(unused.put_back)
    return wholes


def _step_wholes(model: nn.Module, zero: ZeroOptimizer) -> WholeSteps | None:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    of_wholes = set(map(id, groups_of_wholes(zero.optimizer, zero.optimizer.param_groups)))
    places: dict[ShardedParameter, Places] = {}
    for flat in _flats(zero):
        # Once: experts that are modules are thousands of parameters.
        runs = {id(run.parameter): run for run in flat.runs}
        for parameter in flat.parameters if id(flat.options) in of_wholes else ():
            one = _sharded(flat, parameter, runs.get(id(parameter)), names[id(parameter)])
            places[one] = [[Place(*span)] * (span[0] < span[1]) for span in flat.spans(parameter)]
    return WholeSteps(zero.optimizer, places) if places else None


def _sharded(flat: _Flat, parameter: nn.Parameter, run: _Run | None, name: str) -> ShardedParameter:
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


class _Unused:
    """Lets the optimizer change no parameter that no rank has a gradient for, as in one process.

    A flat buffer has zeros there, with which weight decay would move it. What may be unused a small model tells
    (`unused_parameters`); an optimizer's state of such zeros stays zeros by itself.
    """

    def __init__(self, model: PreTrainedModel, zero: ZeroOptimizer) -> None:
        self._suspects: list[tuple[_Flat, list[nn.Parameter]]] = []
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        kinds = unused_parameters(model) or frozenset()
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for flat in _flats(zero) if kinds else ():
            suspected = [p for p in flat.parameters if kind_of_name(names[id(p)]) in kinds]
            if suspected:
                self._suspects.append((flat, suspected))

    def keep(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Keep what is unused of the flat buffers that are stepped now. A collective where there may be any."""
        now = {id(held) for group in optimizer.param_groups for held in group["params"] if held.grad is not None}
        for flat, suspected in self._suspects:
            stepped, group = flat.stepped, flat.group
            # Offloaded, those that are not stepped now have gradients, too.
            if id(stepped) not in now:
                continue
            assert stepped.grad is not None
            parts = {id(run.parameter): slice(run.offset, run.offset + run.weight.numel()) for run in flat.runs}
            counts = [stepped.grad[parts.get(id(p), slice(0))].count_nonzero() for p in suspected]
            used = torch.stack(counts).to(device_of(group))
            dist.all_reduce(used, group=group)
            for parameter, count in zip(suspected, used.tolist(), strict=True):
                if not count and id(parameter) in parts:
                    part = stepped.data[parts[id(parameter)]]
                    self._kept.append((part, part.clone()))

    def put_back(self, *_: object) -> None:
        """Undo what the step has done to it."""
        for part, before in self._kept:
            part.copy_(before)
        self._kept.clear()


def list_weights(model: nn.Module, but: Collection[int] = ()) -> Iterator[Piece]:
    """List what this rank holds of the weights that the model computes with, and of persistent buffers.

    Without the parameters of the identities `but`.
    """
    for name, parameter in model.named_parameters():
        if id(parameter) not in but:
            start, view = _held_weight(name, parameter)
            yield Piece(name=name, key=WEIGHT, shape=whole_shape(parameter), start=start, view=view)
    yield from list_buffers(model)


def stepped(zero: ZeroOptimizer) -> list[torch.Tensor]:
    """Give the flat buffers that the optimizer steps on this rank."""
    return [flat.stepped for flat in _flats(zero)]


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


def _flats(zero: ZeroOptimizer) -> Iterator[_Flat]:
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
        yield _Flat(
            stepped=stepped,
            options=zero.optimizer.param_groups[index],
            parameters=groups[index],
            runs=runs,
            group=zero.real_dp_process_group[index],
            offsets={id(p): offset for p, offset in zip(groups[index], offsets[index], strict=True)},
        )


def _clip(parameters: list[nn.Parameter], offsets: list[int], weights: torch.Tensor, *, first: int) -> list[_Run]:
    """Clip parameters, at their offsets in the whole buffer, to the rank's part `weights` that starts at `first`."""
    runs = []
    for parameter, offset in zip(parameters, offsets, strict=True):
        start, stop = max(offset, first), min(offset + parameter.numel(), first + weights.numel())
        if start < stop:
            weight = weights[start - first : stop - first]
            runs.append(_Run(parameter=parameter, start=start - offset, offset=start - first, weight=weight))
    return runs


def _flats_stage_3(zero: ZeroOptimizer) -> Iterator[_Flat]:
    for index, stepped in enumerate(zero.fp32_partitioned_groups_flat):
        runs = []
        for parameter in zero.fp16_groups[index]:
            _, offset, _ = zero.grad_position[zero.get_param_id(parameter)]
            start, weight = _held_weight(f"parameter {parameter.ds_id}", parameter)
            runs.append(_Run(parameter=parameter, start=start, offset=offset, weight=weight))
        options = zero.optimizer.param_groups[zero.sub_group_to_group_id[index]]
        group, parameters = zero.dp_process_group, zero.fp16_groups[index]
        yield _Flat(stepped=stepped, options=options, parameters=parameters, runs=runs, group=group, offsets={})


def _held_weight(name: str, parameter: Any) -> tuple[int, torch.Tensor]:
    """First element and view of what this rank holds of a parameter; stages 1 and 2 hold it whole."""
    if not hasattr(parameter, "ds_tensor"):
        return 0, parameter.detach()
    share = parameter.ds_tensor
    if share.status.name != "AVAILABLE":
        raise CheckpointError("a parameter is swapped out to disk, where saving cannot read it", where=name)
    # The last shares are filled up to equal length.
    start = min(dist.get_rank(parameter.ds_process_group) * share.ds_numel, parameter.ds_numel)
    return start, share.detach()[: parameter.ds_numel - start]


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
