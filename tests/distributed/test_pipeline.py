"""A pipeline trains as one process does, whatever the schedule, the replicas and the sharding."""

import pytest

from hfdist.config.pipeline import ONE_F_ONE_B, Schedule
from hfdist.verify.parity import compare_runs
from tests.distributed.parity import BOUND, Case, all_cases, run_case, run_single

pytestmark = pytest.mark.distributed

# `make parity` runs them all.
CASES = [
    *(Case(schedule, 2) for schedule in Schedule),
    *(Case(schedule, 4, tied=True) for schedule in Schedule),
    Case(ONE_F_ONE_B, 2, data=2),
    Case(Schedule.zbv, 2, data=2, tied=True),
    Case(ONE_F_ONE_B, 2, data=2, sharding="zero1", tied=True),
    Case(Schedule.interleaved_zero_bubble, 2, data=2, sharding="zero1"),
    Case(Schedule.dualpipev, 4, data=2, sharding="zero1", tied=True),
]


@pytest.fixture(scope="module")
def single(tmp_path_factory, cache_dir):
    """One process, with the head tied and untied."""
    return {tied: run_single(tmp_path_factory.mktemp("single"), tied=tied) for tied in (False, True)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_same_losses_gradients_and_weights_as_one_process(single, tmp_path, case):
    for row in compare_runs(run_case(tmp_path, case), single[case.tied], BOUND):
        assert row.passed, row


def test_the_cases_here_are_among_those_of_the_table():
    assert set(CASES) <= set(all_cases())
    assert len(set(all_cases())) == 2 * 3 * 2 * len(Schedule)
