"""Which schedule `strategy.schedule=auto` takes."""

import logging

import pytest

from hfdist.config.strategy import ONE_F_ONE_B, Schedule
from hfdist.errors import PartitionError
from hfdist.pipeline import choose_schedule as module
from hfdist.pipeline.block_times import BlockTimes, PartTime
from hfdist.pipeline.choose_schedule import choose_schedule
from hfdist.pipeline.costs import Costs
from hfdist.pipeline.instructions import computations
from hfdist.pipeline.partition import partition
from hfdist.strategies.step_memory import ShardFractions

ZERO_BUBBLE = {Schedule.interleaved_zero_bubble, Schedule.zbv, Schedule.dualpipev}
WHOLE = ShardFractions()
PARAMETERS = Costs(blocks=(100.0,) * 8, prologue=0.0, epilogue=0.0)


def choose(
    half=1.0,
    num_ranks=2,
    num_microbatches=16,
    usable_bytes=1e9,
    splits_backward=True,
    parameters=PARAMETERS,
    fractions=WHOLE,
):
    """Blocks of one second for a forward and two for a backward."""
    block = PartTime(1.0, 2.0, half, half, kept_bytes=1000.0)
    times = BlockTimes((block,) * len(parameters.blocks), PartTime(), PartTime())
    return choose_schedule(
        times,
        parameters,
        lambda ranks: partition(parameters, ranks),
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        usable_bytes=usable_bytes,
        state_bytes=fractions.of_adam(4),
        splits_backward=splits_backward,
    )


def test_a_split_backward_is_taken_where_it_costs_less_than_waiting():
    assert choose().schedule in ZERO_BUBBLE
    assert choose(half=1.5).schedule not in ZERO_BUBBLE
    assert choose().seconds < choose(half=1.5).seconds


def test_a_run_that_splits_no_backward_takes_no_schedule_for_that():
    assert choose(splits_backward=False) == choose(half=100.0)


def test_where_little_is_won_the_simplest_is_taken():
    assert choose(num_microbatches=1000).schedule is ONE_F_ONE_B


def test_a_schedule_that_runs_no_such_number_of_micro_batches_is_left_out():
    assert choose(num_ranks=4, num_microbatches=3).schedule not in {ONE_F_ONE_B, Schedule.dualpipev}


def test_stages_have_blocks():
    few = Costs(blocks=(100.0,) * 3, prologue=0.0, epilogue=0.0)
    assert choose(parameters=few).stages_per_rank == 1
    with pytest.raises(PartitionError):
        choose(parameters=few, num_ranks=4)


def test_what_does_not_fit_in_memory_is_not_taken(caplog):
    # Four blocks of 100 parameters with 16 bytes each; two micro batches of four blocks of 1,000 bytes.
    fits = 4 * 1600 + 2 * 4000
    with caplog.at_level(logging.INFO):
        choice = choose(half=1.1, num_microbatches=4, usable_bytes=fits / 0.9)
    assert choice.most_bytes <= fits
    assert "gpipe 60 s but more memory" in caplog.text
    assert f"auto takes {choice.schedule.value}:" in caplog.text
    # A layout that shares out its state has room for the fastest, or with half of its bytes.
    shared = ShardFractions(weights=0.25, gradients=0.25, optimizer=0.25)
    free = choose(half=1.1, num_microbatches=4)
    assert choose(half=1.1, num_microbatches=4, usable_bytes=fits / 0.9).seconds > free.seconds
    assert choose(half=1.1, num_microbatches=4, usable_bytes=fits / 0.9, fractions=shared).most_bytes < fits
    # Where nothing fits, the least is taken.
    assert choose(usable_bytes=0.0).most_bytes <= fits


@pytest.mark.parametrize("way", module._CANDIDATES)
def test_a_long_step_takes_what_the_list_of_all_its_micro_batches_does(way, monkeypatch):
    simulated = []

    def simulate(schedule, seconds, number, **more):
        simulated.append(number)
        return real(schedule, seconds, number, **more)

    real = module.simulate
    monkeypatch.setattr(module, "simulate", simulate)
    monkeypatch.setattr(module, "_CANDIDATES", (way,))
    found = choose(half=1.3, num_ranks=4, num_microbatches=40)
    assert max(simulated) == 16
    assert computations.cache_info().currsize == 0
    monkeypatch.setattr(module, "_MOST_SIMULATED", 10)
    whole = choose(half=1.3, num_ranks=4, num_microbatches=40)
    assert simulated[-1] == 40
    assert (found.seconds, found.most_bytes) == pytest.approx((whole.seconds, whole.most_bytes))
