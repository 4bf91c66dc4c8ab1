"""Killed at every named moment, told to stop at any, short of disk: the run goes on as if nothing had been."""

import signal

import pytest

from proofs.fault_points import Moment
from proofs.faults import (
    Case,
    Victim,
    draw_stops,
    go_on,
    make_config,
    read_run,
    run_case,
    run_stop,
    run_whole,
    strike,
)
from proofs.kills import BOUND, run_both
from tests.distributed.disk_faults import (
    ERRORS,
    STEP,
    every_fault,
    make_small_config,
    require_mount,
    require_strace,
    run_fault,
    run_on_tmpfs,
    run_with_short_files,
)

pytestmark = pytest.mark.distributed

CHAINS = {
    "ddp": [(Moment.first_batch, 1), (Moment.reduction, 3), (Moment.snapshot, 4), (Moment.prune, 4),
            (Moment.shutdown, 6)],
    "zero3": [(Moment.backward, 1), (Moment.after_manifest, 2), (Moment.optimizer, 4)],
    "pipeline": [(Moment.before_manifest, 2), (Moment.rename, 4), (Moment.export_moves, 6)],
}  # fmt: skip
"""One run after the other is killed there, and goes on until the next; `make faults` has every moment and layout."""


@pytest.fixture(scope="module")
def references(tmp_path_factory, cache_dir):
    """Runs that nobody kills, one a layout, made when first asked for."""
    made = {}

    def reference(layout):
        if layout not in made:
            folder = tmp_path_factory.mktemp(layout)
            made[layout] = run_whole(folder, make_config(folder / "run", layout))
        return made[layout]

    return reference


@pytest.fixture(scope="module")
def small_reference(tmp_path_factory, cache_dir):
    """Of the runs whose disk fails: one process."""
    folder = tmp_path_factory.mktemp("small")
    return run_whole(folder, make_small_config(folder / "run"), num_ranks=1)


@pytest.mark.parametrize(
    "layout", [pytest.param(layout, marks=[pytest.mark.faults] * (layout != "pipeline")) for layout in CHAINS]
)
def test_a_run_that_is_killed_at_one_moment_after_the_other(references, tmp_path, layout):
    config = make_config(tmp_path / "run", layout)
    whole = 0
    for number, (moment, step) in enumerate(CHAINS[layout]):
        victim = (Victim.rank, Victim.everyone)[number % 2]
        whole = strike(tmp_path, config, Case(layout, moment, victim, step, rank=number // 2 % 2))
    assert go_on(tmp_path, config)[0] == whole
    assert read_run(tmp_path / "run") == references(layout)


def test_the_ranks_of_a_killed_launcher_harm_nothing(references, tmp_path):
    case = Case("pipeline", Moment.weights, Victim.launcher, 4)
    outcome = run_case(tmp_path, case, references("pipeline"))
    assert outcome.is_equal
    # They went on, and the next start waited for them.
    assert outcome.resumed > 4


def test_files_that_may_not_grow(small_reference, tmp_path):
    outcome = run_with_short_files(tmp_path, 100_000, small_reference)
    assert outcome.exit_code in (4, 7), outcome
    assert outcome.names == (outcome.whole,) == ("step-00000002",)


@pytest.mark.faults
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("call", ERRORS)
def test_every_call_of_a_save_that_fails(small_reference, tmp_path, call):
    require_strace()
    outcomes = []
    for number, fault in enumerate(every_fault(call)):
        outcome = run_fault(tmp_path / str(number), fault, small_reference)
        if outcome is None:
            break
        outcomes.append(outcome)
    assert any(f"step-{STEP:08d}" in outcome.path or call in ("unlinkat", "rmdir") for outcome in outcomes)


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_a_disk_of_any_size(small_reference, tmp_path):
    require_mount()
    num_bytes = small_reference.checkpoint_bytes
    outcomes = []
    for number, share in enumerate((0.2, 0.9, 1.1, 1.5, 1.9, 1.95, 1.98, 2.0, 2.02, 2.05, 2.2)):
        folder = tmp_path / str(number)
        folder.mkdir()
        outcome = run_on_tmpfs(folder, int(share * num_bytes), small_reference)
        assert outcome.exit_code in (0, 7), outcome
        assert outcome.names == (() if outcome.whole is None else (outcome.whole,)), outcome
        assert (outcome.whole is None) == (share < 1), outcome
        outcomes.append(outcome)
    assert {outcome.exit_code for outcome in outcomes} == {0, 7}
    assert "needed" in outcomes[0].message
    assert "free" in outcomes[0].message


STOPS = [
    Case("ddp", Moment.backward, Victim.rank, 1, 1, signal.SIGINT),
    Case("pipeline", Moment.after_step, Victim.rank, 2, 0, signal.SIGUSR1),
]


@pytest.mark.parametrize(
    "stop",
    [STOPS[-1], *(pytest.param(stop, marks=pytest.mark.faults) for stop in (STOPS[0], *draw_stops(20, seed=0)))],
    ids=str,
)
def test_one_process_is_told_to_stop(references, tmp_path, stop):
    """All ranks save the same step and end, and the run goes on as if nothing had been."""
    run_stop(tmp_path, stop, references(stop.layout))


@pytest.mark.faults
def test_a_run_that_is_killed_again_and_again_goes_on_with_other_numbers_of_ranks(tmp_path, cache_dir):
    comparison = run_both(tmp_path, num_kills=3, report=lambda line: None)
    assert comparison.loss <= BOUND
    assert comparison.held_out_loss <= BOUND
    assert comparison.audit[-1] == "AUDIT: passed: every document was seen exactly as often as planned"
    assert comparison.epochs > 1
