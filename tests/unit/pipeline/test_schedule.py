"""What schedules ask for, and their idle time: the formulas against torch's own orders of work."""

import pytest

import hfdist.pipeline.schedule
from hfdist.config.pipeline import ONE_F_ONE_B, Schedule
from hfdist.errors import ConfigError
from hfdist.pipeline.schedule import bubble_fraction, check_microbatches, rank_of_stage, stages_per_rank
from tests.unit.pipeline.torch_actions import KINDS, order, picture, run

kinds = pytest.mark.parametrize(("schedule", "per_rank"), KINDS, ids=[f"{s.value}-{v}" for s, v in KINDS])


def check(schedule, num_microbatches, *, num_ranks=4, per_rank=2, micro_batch_size=2, data_size=3):
    check_microbatches(
        schedule,
        num_ranks=num_ranks,
        stages_per_rank=per_rank,
        num_microbatches=num_microbatches,
        micro_batch_size=micro_batch_size,
        data_size=data_size,
    )


def accepts(*arguments, **keywords):
    try:
        check(*arguments, **keywords)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize(
    ("schedule", "default", "allowed"),
    [(Schedule.gpipe, 1, {1}), (ONE_F_ONE_B, 1, {1}), (Schedule.interleaved_1f1b, 2, {2, 3, 4}),
     (Schedule.interleaved_zero_bubble, 2, {1, 2, 3, 4}), (Schedule.zbv, 2, {2}), (Schedule.dualpipev, 2, {2})],
)  # fmt: skip
def test_stages_per_rank(schedule, default, allowed):
    assert stages_per_rank(schedule, None) == default
    for asked in range(1, 5):
        if asked in allowed:
            assert stages_per_rank(schedule, asked) == asked
        else:
            with pytest.raises(ConfigError, match=f"does not run with {asked} stages") as caught:
                stages_per_rank(schedule, asked)
            assert caught.value.where == "strategy.stages_per_rank"
            assert f"strategy.stages_per_rank={default}" in caught.value.hint


def test_stages_go_round_or_there_and_back():
    assert rank_of_stage(Schedule.gpipe, 3, 1) == (0, 1, 2)
    assert rank_of_stage(Schedule.interleaved_1f1b, 2, 3) == (0, 1, 0, 1, 0, 1)
    assert rank_of_stage(Schedule.zbv, 3, 2) == (0, 1, 2, 2, 1, 0)
    assert rank_of_stage(Schedule.dualpipev, 2, 2) == (0, 1, 1, 0)


def test_too_few_micro_batches_are_refused_with_sizes_that_fit():
    with pytest.raises(ConfigError) as caught:
        check(Schedule.dualpipev, 6)
    error = caught.value
    assert error.where == "train.global_batch_size"
    assert error.found == "36: 6 micro batches of 2 sequences, on each of 3 data ranks"
    assert error.allowed == "at least 8 micro batches, one for each stage; nearest: 8"
    assert error.hint == (
        "train.global_batch_size=48 train.micro_batch_size=2 (8 micro batches), "
        "or train.micro_batch_size=1 (12 micro batches of the same global batch)"
    )


def test_a_smaller_micro_batch_is_not_proposed_where_there_is_none():
    with pytest.raises(ConfigError) as caught:
        check(ONE_F_ONE_B, 3, per_rank=1, micro_batch_size=1)
    assert caught.value.hint == "train.global_batch_size=12 train.micro_batch_size=1 (4 micro batches)"


def test_uneven_rounds_are_refused_with_the_nearest_number_that_fits():
    with pytest.raises(ConfigError, match="cannot run 9 micro batches on 4 pipeline ranks") as caught:
        check(Schedule.interleaved_1f1b, 9, data_size=1)
    assert caught.value.allowed.endswith("such as any multiple of 4; nearest: 10")
    assert caught.value.hint.startswith("train.global_batch_size=20 train.micro_batch_size=2 (10 micro batches)")
    assert "train.micro_batch_size=3 (6 micro batches of the same global batch)" in caught.value.hint


@kinds
def test_what_is_proposed_is_accepted_and_nothing_nearer_is(schedule, per_rank):
    for num_ranks in (2, 3, 4, 8):
        accepted = [m for m in range(1, 80) if accepts(schedule, m, num_ranks=num_ranks, per_rank=per_rank)]
        for refused in sorted(set(range(1, 50)) - set(accepted)):
            with pytest.raises(ConfigError) as caught:
                check(schedule, refused, num_ranks=num_ranks, per_rank=per_rank)
            proposed = int(caught.value.allowed.rpartition("nearest: ")[2])
            assert proposed in accepted
            assert abs(proposed - refused) == min(abs(m - refused) for m in accepted)
            assert f"train.global_batch_size={proposed * 2 * 3} train.micro_batch_size=2 " in caught.value.hint


@kinds
@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_torch_plans_exactly_what_is_accepted(schedule, per_rank, num_ranks):
    """Plans for any number of ranks are made without processes; the distributed test runs two."""
    for num_microbatches in range(1, 3 * num_ranks + 8):
        if accepts(schedule, num_microbatches, num_ranks=num_ranks, per_rank=per_rank):
            run(order(schedule, num_ranks, per_rank, num_microbatches), num_ranks * per_rank)
        else:
            with pytest.raises(ValueError, match="microbatches"):
                order(schedule, num_ranks, per_rank, num_microbatches)


@kinds
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_formula_is_the_idle_time_of_torchs_order(schedule, per_rank, num_ranks):
    enough = (3 * num_ranks + 1) // 2 if schedule is Schedule.zbv else num_ranks
    for num_microbatches in range(1, 3 * num_ranks + 1):
        size = {"num_ranks": num_ranks, "per_rank": per_rank}
        if not accepts(schedule, num_microbatches, **size):
            continue
        events = run(order(schedule, num_ranks, per_rank, num_microbatches), num_ranks * per_rank)
        idle = 1 - 3 * num_microbatches * per_rank / max(event[-1] for event in events)
        formula = bubble_fraction(
            schedule, num_ranks=num_ranks, stages_per_rank=per_rank, num_microbatches=num_microbatches
        )
        if num_microbatches >= enough:
            assert formula == pytest.approx(idle)
        else:
            assert formula <= idle + 1e-12


def test_formulas_of_the_papers():
    def bubble(schedule, per_rank):
        return bubble_fraction(schedule, num_ranks=4, stages_per_rank=per_rank, num_microbatches=8)

    assert bubble(Schedule.gpipe, 1) == bubble(ONE_F_ONE_B, 1) == pytest.approx(3 / 11)
    assert bubble(Schedule.interleaved_1f1b, 2) == pytest.approx(3 / 19)
    assert bubble(Schedule.interleaved_zero_bubble, 1) == pytest.approx(3 / 27)
    assert bubble(Schedule.zbv, 2) == pytest.approx(3 / 51)
    assert bubble(Schedule.dualpipev, 2) == pytest.approx(3 / 51)
    assert bubble_fraction(Schedule.zbv, num_ranks=1, stages_per_rank=2, num_microbatches=4) == 0


def test_the_pictures_show_what_torch_runs():
    lines = hfdist.pipeline.schedule.__doc__.splitlines()
    for schedule in Schedule:
        start = lines.index(schedule.value) + 1
        assert lines[start : start + 2] == picture(schedule, 2, stages_per_rank(schedule, None), 4)
