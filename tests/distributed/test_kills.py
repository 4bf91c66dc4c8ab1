"""A run is killed, goes on with another number of ranks, and ends as if nothing had happened."""

import pytest

from tests.distributed.kills import BOUND, run_both

pytestmark = pytest.mark.distributed


def test_a_run_that_is_killed_again_and_again_does_what_the_uninterrupted_run_does(tmp_path, cache_dir):
    comparison = run_both(tmp_path, num_kills=5, report=lambda outcome: None)
    assert comparison.loss <= BOUND
    assert comparison.held_out_loss <= BOUND
    assert comparison.audit[-1] == "AUDIT: passed: every document was seen exactly as often as planned"
    assert comparison.epochs > 1
