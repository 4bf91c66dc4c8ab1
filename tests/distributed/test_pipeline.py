"""A pipeline trains as one process does, whatever the schedule, the replicas and the sharding."""

from functools import cache

import pytest

from hfdist.config.strategy import ONE_F_ONE_B, Schedule
from hfdist.verify.compare_runs import compare_runs
from proofs.parity import BOUND, Case, all_cases, run_case, run_single
from tests.marks import many

pytestmark = pytest.mark.distributed

# Every schedule once, where it is most likely to fail; `make parity` runs all layouts, and longer.
CASES = [
    Case(Schedule.gpipe, 2),
    Case(ONE_F_ONE_B, 4, tied=True),
    Case(Schedule.interleaved_1f1b, 2),
    Case(Schedule.interleaved_zero_bubble, 2, data=2, sharding="zero1"),
    Case(Schedule.zbv, 2, tied=True),
    Case(Schedule.dualpipev, 2, data=2, sharding="zero1", tied=True),
]
SHORT = ("train.max_steps=3", "train.global_batch_size=8", "data.sequence_length=32", "data.workers=0")


@pytest.fixture(scope="module")
def single(tmp_path_factory, cache_dir):
    """One process, with the head tied or not."""
    return cache(lambda tied: run_single(tmp_path_factory.mktemp("single"), *SHORT, tied=tied))


OTHERS = {Schedule.gpipe, Schedule.interleaved_1f1b, Schedule.interleaved_zero_bubble, Schedule.zbv}
"""Steps of the last two are compared in test_pipeline_mesh.py."""


@pytest.mark.parametrize("case", [many(case) if case.schedule in OTHERS else case for case in CASES], ids=str)
def test_same_losses_gradients_and_weights_as_one_process(single, tmp_path, case):
    for row in compare_runs(run_case(tmp_path, case, *SHORT), single(case.tied), BOUND):
        assert row.passed, row


def test_the_cases_here_are_among_those_of_the_table():
    assert set(CASES) <= set(all_cases())
    assert {case.schedule for case in CASES} == set(Schedule) - {Schedule.auto}
