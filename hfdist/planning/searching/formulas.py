"""Memory and costs of a rank in any layout, in closed form from the constants of the model.

The formulas rank layouts; the best few are traced. They fall when any degree, any sharding or recomputation grows, and
grow with micro batches, so that a part of the search can be left out whole. What a pipeline's rank holds are the bytes
of its own blocks; with blocks in equal shares (`even_loads`) they are the least that any split of them can have.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hfdist.config.strategy import ONE_F_ONE_B, Offload, Schedule, Sharding
from hfdist.planning.costs import MemoryUse, OpCosts, Phase, RankCosts, StageCosts
from hfdist.planning.searching.constants import Growth, ModelConstants, PartCosts, ShareOfParts
from hfdist.planning.searching.layouts import Layout
from hfdist.strategies.base import ShardFractions
from hfdist.strategies.deepspeed.buckets import bucket_elements

_LIVE_ELEMENTS = 1e9
"""The most elements of weights that ZeRO-3 gathers and keeps at a time: `stage3_max_live_parameters`."""
_SPLIT = 1 / 3
"""Share of a block's parameters whose gradients a rank of ZeRO-1 and 2 keeps whole, though it steps only a part."""
_COPIES_OF_GRADIENTS, _COPIES_OF_STATE = 7, 6
"""How often DeepSpeed reads or writes each gradient more than autograd does, on its way through a bucket to its owner,
and each element of a rank's own part more than the optimizer does: by traces of ZeRO-1, -2 and -3."""
_SUM_ELEMENTS = 16 * 1024 * 1024
"""Elements that are added up over ranks at a time (strategies/gradients/reduction.py)."""


@dataclass(frozen=True, slots=True)
class Load:
    """What one stage runs. Fractions stand for an even split."""

    blocks: tuple[float, ...]
    """Number of blocks of each kind."""
    prologue: float = 1.0
    epilogue: float = 1.0


def whole_load(model: ModelConstants) -> Load:
    """All of the model."""
    return Load(tuple(float(model.kind_of_block.count(kind)) for kind in range(len(model.kinds))))


def even_loads(model: ModelConstants, layout: Layout) -> list[Load]:
    """The stages of a rank if all shared alike."""
    stages = layout.pipeline * layout.stages_per_rank
    one = Load(tuple(number / stages for number in whole_load(model).blocks), 1 / stages, 1 / stages)
    return [one] * layout.stages_per_rank


def loads_of(model: ModelConstants, stages: Sequence[range], rank_of_stage: Sequence[int], rank: int) -> list[Load]:
    """The stages of one pipeline rank, whose blocks are given."""
    found = []
    for stage, blocks in enumerate(stages):
        if rank_of_stage[stage] == rank:
            kinds = [model.kind_of_block[block] for block in blocks]
            counts = tuple(float(kinds.count(kind)) for kind in range(len(model.kinds)))
            found.append(Load(counts, float(stage == 0), float(stage == len(stages) - 1)))
    return found


def live_stages(layout: Layout, rank: int) -> int:
    """The most micro batches whose activations a rank of a pipeline holds at a time, counted once for each stage."""
    ranks, per_rank = layout.pipeline, layout.stages_per_rank
    most = layout.num_microbatches * per_rank
    if layout.pipeline == 1:
        return 1
    match layout.schedule:
        case Schedule.gpipe:
            return most
        case schedule if schedule is ONE_F_ONE_B:
            return min(most, ranks - rank)
        case Schedule.interleaved_1f1b:
            return min(most, 2 * (ranks - rank - 1) + (per_rank - 1) * ranks + 1)
        case Schedule.dualpipev:
            return min(most, 2 * ranks + 1)
    return min(most, ranks * per_rank)


@dataclass(frozen=True, slots=True)
class _Moment:
    """What a rank holds at one moment, in bytes."""

    phase: Phase
    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers


def peak_bytes(
    model: ModelConstants, layout: Layout, fractions: ShardFractions, loads: Sequence[Load], live: int
) -> float:
    """Give the most that a rank holds, without what a process holds without a model."""
    return max(moment.total for moment in _moments(model, layout, fractions, loads, live))


def peak_use(
    model: ModelConstants, layout: Layout, fractions: ShardFractions, loads: Sequence[Load], live: int
) -> tuple[Phase, MemoryUse]:
    """Give when a rank holds most, and what."""
    worst = max(_moments(model, layout, fractions, loads, live), key=lambda moment: moment.total)
    use = MemoryUse(
        weights=worst.weights,
        gradients=worst.gradients,
        optimizer=worst.optimizer,
        activations=worst.activations,
        buffers=worst.buffers,
    )
    return worst.phase, use


def _moments(
    model: ModelConstants, layout: Layout, fractions: ShardFractions, loads: Sequence[Load], live: int
) -> Iterator[_Moment]:
    """The moments at which a step may hold most."""
    shares = model.shares[layout.tensor, layout.expert]
    elements, trained = _held(model, layout, shares, loads)
    weights, gradients, optimizer = _state(
        model, layout, fractions, *_held(model, layout, _state_shares(model, layout), loads)
    )
    kept, working, of_head = _activations(model, layout, shares, loads, live)
    if layout.sharding.is_deepspeed and layout.pipeline == 1:
        held = _Moment(Phase.forward, weights, gradients, optimizer, kept, 0.0)
        yield from _zero_moments(model, layout, fractions, held, elements, trained, working=working, of_head=of_head)
        return
    gathered, reduced, after = _buffers(model, layout, fractions, shares, elements, trained)
    before = gradients if layout.num_microbatches > 1 else 0.0
    if _is_ddp(layout):
        # Its buckets are there all the time; gradients of earlier micro batches beside them, of the last one in them.
        before += gradients
    yield _Moment(Phase.forward, weights, before, optimizer, kept + of_head, gathered)
    # Gradients of the last blocks come while all activations are still there.
    yield _Moment(Phase.backward, weights, before, optimizer, kept + working, gathered + reduced)
    # At its end all gradients are there, and the activations of a block.
    yield _Moment(Phase.backward, weights, gradients, optimizer, working, gathered + reduced)
    yield _Moment(Phase.optimizer, weights, gradients, optimizer, 0.0, after)


def _zero_moments(
    model: ModelConstants,
    layout: Layout,
    fractions: ShardFractions,
    held: _Moment,
    elements: float,
    trained: float,
    *,
    working: float,
    of_head: float,
) -> Iterator[_Moment]:
    """Likewise, of DeepSpeed: what a rank holds after a forward, elements of the model, and bytes that come besides."""
    half = model.half_bytes or model.gradient_bytes
    accumulates, is_here = layout.num_microbatches > 1, layout.offload is Offload.none
    # The largest parameter is that of an end, or little beside all.
    largest = max(model.prologue.trained, model.epilogue.trained)
    bucket = bucket_elements(trained, largest)
    share = trained * fractions.optimizer
    in_forward, in_backward = held.activations + of_head, held.activations + working
    stepped = share * 4.0 * is_here
    if layout.sharding is Sharding.zero3:
        # Gradients have a place that stays.
        buffers = (min(elements, _LIVE_ELEMENTS) + bucket) * half
        yield replace(held, activations=in_forward, buffers=buffers)
        yield replace(held, phase=Phase.backward, activations=in_backward, buffers=buffers + bucket * half)
        yield replace(held, phase=Phase.optimizer, activations=0.0, buffers=bucket * half + stepped)
        return
    own = stepped
    if model.half_bytes is None and fractions.optimizer < 1:
        # A rank keeps gradients whole, also of what it steps in part.
        split = _SPLIT * max(part.trained for part in model.kinds)
        # Where the largest one ends, a rank keeps it with the rest of its own part.
        own = (share * max(1, math.ceil(largest / share)) + split) * 4.0 * is_here if share else 0.0
    is_first = layout.sharding is Sharding.zero1
    # ZeRO-1 of bfloat16 has none.
    buckets = 0.0 if is_first and model.half_bytes is not None else 2 * bucket * half
    before = (trained * 4.0 if is_first else own) if accumulates else 0.0
    # ZeRO-1 lets its buckets go after the last micro batch only.
    waiting = buckets if is_first and accumulates else 0.0
    yield replace(held, gradients=before, activations=in_forward, buffers=waiting)
    yield replace(held, phase=Phase.backward, gradients=before, activations=in_backward, buffers=buckets)
    at_end = own if is_first else before + own
    sent = buckets + min(bucket, share) * half
    yield replace(held, phase=Phase.backward, gradients=at_end, activations=working, buffers=sent)
    yield replace(held, phase=Phase.optimizer, gradients=own, activations=0.0, buffers=stepped)


def _state_shares(model: ModelConstants, layout: Layout) -> ShareOfParts:
    """Shares of the parameters that are sharded: FSDP2 shards experts the less, the more ranks share them out."""
    expert = 1 if layout.sharding is Sharding.fsdp2 else layout.expert
    return model.shares[layout.tensor, expert]


def _is_half(model: ModelConstants, layout: Layout) -> bool:
    """Whether the model's weights are in the type of the arithmetic; then autocast makes no copies of them."""
    return model.half_bytes is not None and layout.sharding.is_deepspeed and layout.pipeline == 1


def _is_ddp(layout: Layout) -> bool:
    is_replicated = layout.data * layout.context > 1 and not layout.divides_parameters
    return layout.sharding is Sharding.none and is_replicated


def _held(model: ModelConstants, layout: Layout, shares: ShareOfParts, loads: Sequence[Load]) -> tuple[float, float]:
    """Elements that a rank has before they are sharded, all and trained ones."""
    elements = trained = 0.0
    for load in loads:
        parts = [*zip(model.kinds, shares.kinds, load.blocks, strict=True)]
        parts += [(model.prologue, shares.prologue, load.prologue), (model.epilogue, shares.epilogue, load.epilogue)]
        for part, share, number in parts:
            elements += part.parameters * share * number
            trained += part.trained * share * number
        if layout.pipeline > 1 and model.tied_parameters:
            copies = model.tied_parameters * shares.prologue * load.epilogue
            elements += copies
            trained += copies if model.prologue.trained else 0.0
    return elements, trained


def _state(
    model: ModelConstants, layout: Layout, fractions: ShardFractions, elements: float, trained: float
) -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimizer between steps, on the device."""
    weight_bytes, gradient_bytes, optimizer_bytes = model.weight_bytes, model.gradient_bytes, model.optimizer_bytes
    if layout.sharding.is_deepspeed:
        # It steps float32 copies, and outside of a pipeline computes with half-precision weights.
        optimizer_bytes += 4.0
        gradient_bytes = 4.0
        if _is_half(model, layout):
            weight_bytes = model.half_bytes or weight_bytes
    weights = elements * weight_bytes * fractions.weights
    gradients = trained * gradient_bytes * fractions.gradients
    optimizer = trained * optimizer_bytes * fractions.optimizer
    if layout.offload is Offload.cpu:
        optimizer = 0.0
        if layout.sharding is Sharding.fsdp2:
            weights = gradients = 0.0
        elif layout.sharding is not Sharding.zero1:
            gradients = 0.0
    return weights, gradients, optimizer


def _buffers(
    model: ModelConstants,
    layout: Layout,
    fractions: ShardFractions,
    shares: ShareOfParts,
    elements: float,
    trained: float,
) -> tuple[float, float, float]:
    """Bytes that a layout adds: of gathered weights, of gradients that are reduced meanwhile, and after the blocks."""
    weight, gradient = model.weight_bytes, model.gradient_bytes
    largest = max(part.parameters * share for part, share in zip(model.kinds, shares.kinds, strict=True))
    ends = model.prologue.parameters * shares.prologue + model.epilogue.parameters * shares.epilogue
    match layout.sharding:
        case Sharding.fsdp2 if layout.pipeline > 1:
            return elements * weight, trained * gradient, 0.0
        case Sharding.fsdp2:
            # One block that computes, the next one, and what is outside of blocks, whose gradients come last.
            return (2 * largest + ends) * weight, largest * gradient, ends * (weight + 2 * gradient)
        case Sharding.zero1:
            # Of a pipeline: gradients go through one bucket to the rank's own part.
            return 0.0, 0.0, (bucket_elements(trained, ends) + trained * fractions.optimizer) * gradient
    sums = layout.data * layout.context > 1 and layout.divides_parameters
    return 0.0, 0.0, min(_SUM_ELEMENTS, trained) * gradient if sums else 0.0


def _activations(
    model: ModelConstants, layout: Layout, shares: ShareOfParts, loads: Sequence[Load], live: int
) -> tuple[float, float, float]:
    """Bytes that are kept at the end of the forwards, that a block needs besides, and that the loss needs besides."""
    sequences, tensor, mode = layout.shares_of_sequences, layout.tensor, layout.recompute

    def grown(growth: Growth, held: float) -> float:
        return growth.of(sequences, tensor, held)

    kept = working = of_head = 0.0
    for load in loads:
        for kind, held, number in zip(model.kinds, shares.kinds, load.blocks, strict=True):
            if number:
                # What a block keeps for any number of sequences are copies of its weights.
                kept += number * grown(kind.kept[mode], 0.0 if _is_half(model, layout) else held)
                working = max(working, grown(kind.working[mode], held))
        kept += load.prologue * grown(model.prologue.kept[mode], shares.prologue)
        kept += load.epilogue * grown(model.epilogue.kept[mode], shares.epilogue)
        of_head = max(of_head, load.epilogue * grown(model.epilogue.working[mode], shares.epilogue))
    if layout.pipeline > 1:
        kept *= live / len(loads)
        # What arrives from other stages while this one computes.
        working += 2 * model.boundary_bytes * sequences
    return kept, working, of_head


def rank_costs(model: ModelConstants, layout: Layout, fractions: ShardFractions, loads: Sequence[Load]) -> RankCosts:
    """Give what a rank computes in a step, without its traffic."""
    shares = model.shares[layout.tensor, layout.expert]
    _, trained = _held(model, layout, _state_shares(model, layout), loads)
    stepped = trained * fractions.optimizer
    # Each number is read and written once, gradients are read.
    moved = stepped * (2 * (model.optimizer_bytes + model.weight_bytes) + model.gradient_bytes)
    stages = tuple(_stage_costs(model, layout, shares, load) for load in loads)
    if layout.sharding.is_deepspeed and layout.pipeline == 1:
        moved += _COPIES_OF_STATE * stepped * model.gradient_bytes
        copies = _COPIES_OF_GRADIENTS * trained * (model.half_bytes or model.gradient_bytes)
        if layout.sharding is Sharding.zero1:
            # Gradients of all micro batches are reduced at once.
            moved += copies
        else:
            stages = (replace(stages[0], backward=stages[0].backward + OpCosts(moved_bytes=copies)),)
    return RankCosts(stages=stages, optimizer=OpCosts(moved_bytes=moved, kernels=1))


def _stage_costs(model: ModelConstants, layout: Layout, shares: ShareOfParts, load: Load) -> StageCosts:
    sequences, tensor, mode = layout.shares_of_sequences, layout.tensor, layout.recompute
    parts: list[tuple[PartCosts, float, float]] = [*zip(model.kinds, shares.kinds, load.blocks, strict=True)]
    parts += [(model.prologue, shares.prologue, load.prologue), (model.epilogue, shares.epilogue, load.epilogue)]
    forward = backward = OpCosts()
    for part, held, number in parts:
        if number:
            forward += part.forward.of(sequences, tensor, held) * number
            backward += part.backward[mode].of(sequences, tensor, held) * number
    return StageCosts(forward=forward, backward=backward)
