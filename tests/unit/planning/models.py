"""Hand-made constants of a model, for tests of what is computed from them."""

from hfdist.config.train import Recompute
from hfdist.pipeline.costs import Costs
from hfdist.planning.searching.constants import MODES, Growth, ModelConstants, PartCosts, ShareOfParts, Work
from hfdist.strategies.traffic import StepSizes, TensorSizes

WIDTH, LENGTH, VOCABULARY, HEADS = 1024, 1024, 32_000, 16
STATES = 4.0 * WIDTH * LENGTH
"""Bytes of the hidden states of a sequence."""
BLOCK = 12.0 * WIDTH**2
"""Elements of a block."""


def make_constants(num_blocks: int = 16, *, degrees: tuple[int, ...] = (1, 2, 4, 8)) -> ModelConstants:
    """A model of equal blocks, in float32."""
    flops = 2 * BLOCK * LENGTH
    kept = {
        None: Growth(whole=6 * STATES, divided=11 * STATES),
        Recompute.cheap: Growth(whole=2 * STATES, divided=3 * STATES),
        Recompute.all: Growth(whole=STATES),
    }
    block = PartCosts(
        parameters=BLOCK,
        trained=BLOCK,
        forward=_work(flops),
        backward={None: _work(2 * flops), Recompute.cheap: _work(2.5 * flops), Recompute.all: _work(3 * flops)},
        kept=kept,
        working={mode: Growth(fixed=4 * BLOCK, whole=STATES, divided=2 * STATES) for mode in MODES},
    )
    embedding = float(WIDTH * VOCABULARY)
    return ModelConstants(
        kinds=(block,),
        kind_of_block=(0,) * num_blocks,
        prologue=_end(embedding, 0.0),
        epilogue=_end(embedding, 2 * embedding * LENGTH),
        sequence_length=LENGTH,
        boundary_bytes=STATES,
        shares={
            (degree, 1): ShareOfParts(prologue=1 / degree, kinds=(1 / degree,), epilogue=1 / degree)
            for degree in degrees
        },
        balance=Costs(blocks=(1.0,) * num_blocks, prologue=0.0, epilogue=1.0),
        flops_per_sequence=6 * (num_blocks * BLOCK + embedding) * LENGTH,
        sizes={degree: _sizes(num_blocks, degree) for degree in degrees},
        sequence_degrees=frozenset(degree for degree in degrees if degree > 1),
    )


def _work(flops: float) -> Work:
    return Work(flops=flops, moved=Growth(fixed=8 * BLOCK, whole=10 * STATES, divided=10 * STATES), kernels=50)


def _end(parameters: float, flops: float) -> PartCosts:
    return PartCosts(
        parameters=parameters,
        trained=parameters,
        forward=_work(flops),
        backward=dict.fromkeys(MODES, _work(2 * flops)),
        kept=dict.fromkeys(MODES, Growth(whole=STATES)),
        working=dict.fromkeys(MODES, Growth(fixed=4 * parameters, whole=STATES)),
    )


def _sizes(num_blocks: int, tensor: int) -> StepSizes:
    blocks, ends = round(num_blocks * BLOCK), 2 * WIDTH * VOCABULARY
    divided = TensorSizes(
        divided=blocks + ends,
        embedded=WIDTH,
        summed=2 * WIDTH * num_blocks,
        summed_backward=2 * WIDTH * num_blocks,
        calls=2 * num_blocks,
    )
    return StepSizes(
        parameters=blocks + ends,
        blocks=blocks,
        num_blocks=num_blocks,
        hidden=WIDTH,
        queries=WIDTH,
        keys=WIDTH,
        head_size=WIDTH // HEADS,
        embedding=WIDTH * VOCABULARY,
        tensor=TensorSizes() if tensor == 1 else divided,
    )
