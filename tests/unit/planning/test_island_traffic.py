"""What the ranks of an island exchange together."""

from dataclasses import replace

from hfdist.planning.island_traffic import exchanged_elements
from hfdist.strategies.traffic import StepSizes

SIZES = StepSizes(
    parameters=1000, blocks=800, num_blocks=2, hidden=8, queries=8, keys=8, head_size=4, embedding=200, experts=600
)


def exchanged(sizes, *, pipeline=1, expert=1, is_sharded=False):
    return exchanged_elements(sizes, pipeline=pipeline, expert=expert, is_sharded=is_sharded)


def test_what_ranks_hold_alike_beside_other_parts_travels_once_a_rank():
    tied = replace(SIZES, is_tied=True)
    assert exchanged(tied) == 1000
    assert exchanged(tied, pipeline=2) == 1000 + 200
    assert exchanged(SIZES, pipeline=2) == 1000
    assert exchanged(SIZES, expert=3) == 1000 + 2 * 400
    assert exchanged(SIZES, expert=3, is_sharded=True) == 1000
    # Neither is trained.
    assert exchanged(replace(tied, trained_share=0.01), pipeline=2) == 10
