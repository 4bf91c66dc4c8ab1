"""Memory and costs of a rank in any layout, in closed form from the constants of the model.

The formulas rank layouts; the best few are traced. They fall when any degree, any sharding or recomputation grows, and
grow with micro batches, so that a part of the search can be left out whole.

    a rank holds     state            elements x bytes x the fraction that its sharding leaves it
                     activations      live micro batches x blocks x what a block keeps; or its input and one whole block
                     working memory   the largest moment of a block, or the head's chunk of logits
    a rank computes  micro batches x (blocks x (forward + backward) + forward again) + head, of the slowest rank

What a pipeline's rank holds are the bytes of its own blocks; with blocks in equal shares (`even_loads`) they are the
least that any split of them can have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hfdist.config.layout import Layout
from hfdist.pipeline.schedule import live_microbatches
from hfdist.planning.costs import OpCosts, RankCosts, StageCosts
from hfdist.planning.searching.constants import Growth, ModelConstants, PartCosts, ShareOfParts
from hfdist.strategies.base import Strategy
from hfdist.strategies.step_memory import MemoryUse, RankSizes, ShardFractions
from hfdist.strategies.traffic import Phase

Ways = Strategy | type[Strategy]
"""How the state of a layout is sharded: a search asks the classes."""


@dataclass(frozen=True, slots=True)
class Load:
    """What one stage runs. Fractions stand for an even split."""

    blocks: tuple[float, ...]
    """Number of blocks of each kind."""
    prologue: float
    epilogue: float


def even_loads(model: ModelConstants, layout: Layout) -> list[Load]:
    """The stages of a rank if all shared alike."""
    stages = layout.pipeline * layout.stages_per_rank
    blocks = tuple(model.kind_of_block.count(kind) / stages for kind in range(len(model.kinds)))
    return [Load(blocks, 1 / stages, 1 / stages)] * layout.stages_per_rank


def loads_of(model: ModelConstants, stages: Sequence[range], rank_of_stage: Sequence[int], rank: int) -> list[Load]:
    """The stages of one pipeline rank, whose blocks are given."""
    found = []
    for stage, blocks in enumerate(stages):
        if rank_of_stage[stage] == rank:
            kinds = [model.kind_of_block[block] for block in blocks]
            counts = tuple(float(kinds.count(kind)) for kind in range(len(model.kinds)))
            found.append(Load(counts, float(stage == 0), float(stage == len(stages) - 1)))
    return found


def rank_sizes(
    model: ModelConstants,
    layout: Layout,
    strategy: Ways,
    fractions: ShardFractions,
    loads: Sequence[Load],
    rank: int = 0,
) -> RankSizes:
    """Give the sizes of a rank of the pipeline that runs these stages, of which a Strategy says what it holds."""
    shares, ends = model.shares[layout.tensor, layout.expert], (model.prologue, model.epilogue)
    whole = model.shares[layout.tensor, 1 if strategy.counts_all_experts else layout.expert]
    elements, trained = _elements(model, layout, shares, loads)
    state_elements, state_trained = _elements(model, layout, whole, loads)
    kept, copies, working, of_head = _activations(model, layout, shares, loads, rank)
    return RankSizes(
        layout=layout,
        fractions=fractions,
        elements=elements,
        trained=trained,
        state_elements=state_elements,
        state_trained=state_trained,
        largest_block=max(part.parameters * share for part, share in zip(model.kinds, shares.kinds, strict=True)),
        ends=model.prologue.parameters * shares.prologue + model.epilogue.parameters * shares.epilogue,
        trained_block=max(part.trained for part in model.kinds),
        trained_end=max(part.trained for part in ends),
        weight_bytes=model.weight_bytes,
        gradient_bytes=model.gradient_bytes,
        optimizer_bytes=model.optimizer_bytes,
        half_bytes=model.half_bytes,
        kept=kept,
        copies=copies,
        working=working,
        of_head=of_head,
        **_frozen(model, layout, strategy, loads),
    )


def _frozen(model: ModelConstants, layout: Layout, strategy: Ways, loads: Sequence[Load]) -> dict[str, float]:
    """What a rank holds of a teacher, which stands beside the last stage."""
    frozen = model.sizes[1].frozen
    if frozen is None:
        return {}
    # A class: what a rank holds at the least.
    num_ranks = layout.data * layout.context * layout.tensor
    if isinstance(strategy, Strategy):
        num_ranks = strategy.ranks_of_frozen(frozen.sharding)
    here = sum(load.epilogue for load in loads)
    gathered = here * frozen.gathered_bytes if num_ranks > 1 else 0.0
    return {"frozen": here * frozen.weight_bytes / num_ranks, "frozen_gathered": gathered}


def peak(strategy: Ways, sizes: RankSizes) -> tuple[Phase, MemoryUse]:
    """Give when a rank holds most, and what, without what a process holds without a model."""
    return max(
        ((phase, _with_frozen(use, sizes, phase)) for phase, use in strategy.held(sizes)),
        key=lambda held: held[1].total,
    )


def _with_frozen(use: MemoryUse, sizes: RankSizes, phase: Phase) -> MemoryUse:
    """Add a teacher, which runs in the forward."""
    if not sizes.frozen:
        return use
    gathered = sizes.frozen_gathered if phase is Phase.forward else 0.0
    return replace(use, weights=use.weights + sizes.frozen, buffers=use.buffers + gathered)


def parts_of(
    model: ModelConstants, shares: ShareOfParts, load: Load, *, sequence: bool = False
) -> list[tuple[PartCosts, float, float]]:
    """Each part of the model, with the share of its parameters that a rank has, and how many the stage runs."""
    return [
        *zip(model.kinds_of_parts if sequence else model.kinds, shares.kinds, load.blocks, strict=True),
        (model.prologue, shares.prologue, load.prologue),
        (model.epilogue, shares.epilogue, load.epilogue),
    ]


def _elements(
    model: ModelConstants, layout: Layout, shares: ShareOfParts, loads: Sequence[Load]
) -> tuple[float, float]:
    """Elements that a rank has before they are sharded, all and trained ones."""
    elements = trained = 0.0
    for load in loads:
        for part, share, number in parts_of(model, shares, load):
            elements += part.parameters * share * number
            trained += part.trained * share * number
        if layout.pipeline > 1 and model.tied_parameters:
            copies = model.tied_parameters * shares.prologue * load.epilogue
            elements += copies
            trained += copies if model.prologue.trained else 0.0
    return elements, trained


def _activations(
    model: ModelConstants, layout: Layout, shares: ShareOfParts, loads: Sequence[Load], rank: int
) -> tuple[float, float, float, float]:
    """Bytes as `RankSizes` has them: kept, copies, working and of_head."""
    sequences, tensor, mode = layout.shares_of_sequences, layout.tensor, layout.recompute
    kinds = model.kinds_of_parts if layout.sequence else model.kinds

    def grown(growth: Growth, held: float) -> float:
        return growth.of(sequences, tensor, held)

    kept = copies = working = of_head = 0.0
    for load in loads:
        for kind, held, number in zip(kinds, shares.kinds, load.blocks, strict=True):
            if number:
                kept += number * grown(kind.kept[mode], 0.0)
                # What a block keeps for any number of sequences.
                copies += number * kind.kept[mode].fixed * held
                working = max(working, grown(kind.working[mode], held))
        kept += load.prologue * grown(model.prologue.kept[mode], shares.prologue)
        kept += load.epilogue * grown(model.epilogue.kept[mode], shares.epilogue)
        of_head = max(of_head, load.epilogue * grown(model.epilogue.working[mode], shares.epilogue))
    if layout.pipeline > 1:
        times = live_microbatches(layout, rank) / len(loads)
        # What arrives from other stages while this one computes.
        arriving = 2 * model.boundary_bytes * sequences / (tensor if layout.sequence else 1)
        return kept * times, copies * times, working + arriving, of_head
    return kept, copies, working, of_head


def rank_costs(model: ModelConstants, strategy: Ways, sizes: RankSizes, loads: Sequence[Load]) -> RankCosts:
    """Give what a rank computes in a step, without its traffic."""
    shares = model.shares[sizes.layout.tensor, sizes.layout.expert]
    stages = [_stage_costs(model, sizes.layout, shares, load).with_passes(model.sizes[1].passes) for load in loads]
    copied = strategy.copied(sizes)
    stages[0] = replace(stages[0], backward=stages[0].backward + OpCosts(moved_bytes=copied.backward))
    # Each number is read and written once, gradients are read.
    moved = sizes.stepped * (2 * (model.optimizer_bytes + model.weight_bytes) + model.gradient_bytes)
    return RankCosts(stages=tuple(stages), optimizer=OpCosts(moved_bytes=moved + copied.optimizer, kernels=1))


def _stage_costs(model: ModelConstants, layout: Layout, shares: ShareOfParts, load: Load) -> StageCosts:
    sequences, tensor, mode = layout.shares_of_sequences, layout.tensor, layout.recompute
    forward = backward = OpCosts()
    for part, held, number in parts_of(model, shares, load, sequence=layout.sequence):
        if number:
            forward += part.forward.of(sequences, tensor, held) * number
            backward += part.backward[mode].of(sequences, tensor, held) * number
    frozen = model.sizes[1].frozen
    if frozen is not None:
        # Tensor ranks each run all of it.
        forward += OpCosts(flops=frozen.sequence_flops * sequences) * load.epilogue
    return StageCosts(forward=forward, backward=backward)
