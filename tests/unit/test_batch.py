"""All batch arithmetic, and the proposals where numbers do not divide."""

import pytest

from hfdist.config.batch import nearest_multiples, plan_batch
from hfdist.errors import ConfigError


def plan(global_batch_size=32, micro_batch_size=4, data_size=2, sequence_length=128, lanes=48):
    return plan_batch(
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        data_size=data_size,
        sequence_length=sequence_length,
        lanes=lanes,
    )


def test_the_number_of_processes_changes_only_the_accumulation():
    plans = [plan(data_size=size) for size in (1, 2, 4, 8)]
    assert [p.num_microbatches for p in plans] == [8, 4, 2, 1]
    assert {p.tokens_per_step for p in plans} == {32 * 128}


def test_a_global_batch_that_does_not_divide_proposes_the_nearest():
    with pytest.raises(ConfigError) as caught:
        plan(global_batch_size=30, micro_batch_size=4, data_size=2)
    message = str(caught.value)
    assert "train.global_batch_size" in message
    assert "nearest: 24 or 32" in message
    assert "train.micro_batch_size=3" in message


def test_a_global_batch_smaller_than_one_micro_batch_proposes_only_what_is_possible():
    with pytest.raises(ConfigError, match="nearest: 8"):
        plan(global_batch_size=6, micro_batch_size=4, data_size=2)


def test_lanes_that_data_ranks_cannot_share_propose_the_next():
    with pytest.raises(ConfigError, match=r"data\.lanes=50"):
        plan(global_batch_size=40, data_size=5, lanes=48)


def test_nearest_multiples():
    assert nearest_multiples(30, 8) == [24, 32]
    assert nearest_multiples(3, 8) == [8]
