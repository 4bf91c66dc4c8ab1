"""What schedules ask for, their idle time by formulas and by torch's orders of work, and what ranks do in one step."""

from itertools import product

import pytest

from hfdist.config.composition.compose import compose_config
from hfdist.config.strategy import ONE_F_ONE_B, Schedule
from hfdist.errors import ConfigError
from hfdist.pipeline.instructions import Instruction, Operation, computations, list_instructions, receive_early
from hfdist.pipeline.schedule import bubble_fraction, check_microbatches, rank_of_stage, stages_per_rank
from tests.unit.pipeline.torch_actions import KINDS, order, run

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
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_torch_plans_exactly_what_is_accepted(schedule, per_rank, num_ranks):
    """torch plans for any number of ranks, without processes."""
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


SIZES = [(1, 2), (2, 4), (4, 8), (4, 12)]
"""Ranks and micro batches: two of these for each kind."""
cases = pytest.mark.parametrize(
    ("schedule", "per_rank", "num_ranks", "num_microbatches"),
    [(*kind, *SIZES[(place + more) % 4]) for place, kind in enumerate(KINDS) for more in (0, 1)],
    ids=lambda value: value.value if isinstance(value, Schedule) else str(value),
)

MESSAGES = {
    Operation.send_output: (Operation.receive_input, 1),
    Operation.send_input_gradient: (Operation.receive_output_gradient, -1),
}
"""What receives a send, and at which stage from the sender's."""
GIVES = {Operation.forward: Operation.send_output} | dict.fromkeys(
    (Operation.backward, Operation.backward_input), Operation.send_input_gradient
)


def make(schedule, per_rank, num_ranks, num_microbatches):
    placement = rank_of_stage(schedule, num_ranks, per_rank)
    return placement, list_instructions(schedule, placement, num_microbatches)


def message(instruction, placement):
    """Of a send: its receive, and the rank of that."""
    receive, change = MESSAGES[instruction.operation]
    stage = instruction.stage + change
    return Instruction(receive, stage, instruction.microbatch), placement[stage]


def walk(ranks, placement, *, sends_wait):
    """Go through the lists as ranks would: a computation waits for what it takes, and a send perhaps for its receive.

    Returns what is left of each list when nothing can go on.
    """
    last = len(placement) - 1
    left = [list(own) for own in ranks]
    done, sent = set(), set()

    def has_input(rank, each):
        backwards = (Operation.backward, Operation.backward_input)
        if each.operation is Operation.forward and each.stage > 0:
            source, receive = (Operation.forward,), Operation.receive_input
            before = each.stage - 1
        elif each.operation in backwards and each.stage < last:
            source, receive = backwards, Operation.receive_output_gradient
            before = each.stage + 1
        else:
            return True
        given = any((operation, before, each.microbatch) in done for operation in source)
        if placement[before] == rank:
            return given
        return (receive, *each[1:]) in done and (receive, *each[1:]) in sent

    def can_run(rank, each):
        if each.operation in MESSAGES:
            receive, peer = message(each, placement)
            return not sends_wait or receive in done or left[peer][:1] == [receive]
        return has_input(rank, each)

    progress = True
    while progress:
        progress = False
        for rank, own in enumerate(left):
            while own and can_run(rank, own[0]):
                each = own.pop(0)
                done.add(each)
                if each.operation in MESSAGES:
                    sent.add(message(each, placement)[0])
                progress = True
    return left


@cases
def test_each_stage_computes_each_micro_batch_once_and_no_rank_waits_for_ever(
    schedule, per_rank, num_ranks, num_microbatches
):
    placement, ranks = make(schedule, per_rank, num_ranks, num_microbatches)
    assert len(ranks) == num_ranks
    done = [(rank, each) for rank, own in enumerate(ranks) for each in own]
    assert len(set(done)) == len(done)
    assert all(placement[each.stage] == rank for rank, each in done)
    instructions = {each for _, each in done}
    for place in product(range(len(placement)), range(num_microbatches)):
        assert Instruction(Operation.forward, *place) in instructions
        whole = Instruction(Operation.backward, *place) in instructions
        halves = {Instruction(half, *place) for half in (Operation.backward_input, Operation.backward_weight)}
        assert halves.isdisjoint(instructions) if whole else halves <= instructions
    # What another rank takes is sent at once, and received in order.
    sent = {pair: [] for pair in product(range(num_ranks), repeat=2)}
    for rank, own in enumerate(ranks):
        for before, each in zip([None, *own], own, strict=False):
            if each.operation in MESSAGES:
                assert (GIVES[before.operation], *before[1:]) == each
                receive, peer = message(each, placement)
                assert peer != rank
                sent[rank, peer].append(receive)
    for (rank, peer), receives in sent.items():
        expected = set(receives)
        assert [each for each in ranks[peer] if each in expected] == receives, (rank, peer)
    for sends_wait in (False, True):
        assert walk(ranks, placement, sends_wait=sends_wait) == [[]] * num_ranks


def test_ranks_that_wait_for_each_other_are_noticed():
    placement, ranks = make(ONE_F_ONE_B, 1, 2, 4)
    receive, forward, *rest = ranks[1]
    assert [receive.operation, forward.operation] == [Operation.receive_input, Operation.forward]
    assert walk([ranks[0], [forward, receive, *rest]], placement, sends_wait=False) != [[], []]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_1f1b_keeps_no_more_in_flight_than_there_are_ranks_to_the_end(num_ranks):
    _, ranks = make(ONE_F_ONE_B, 1, num_ranks, 12)
    for rank, own in enumerate(ranks):
        in_flight, most = 0, 0
        for each in own:
            in_flight += {Operation.forward: 1, Operation.backward: -1}.get(each.operation, 0)
            most = max(most, in_flight)
        assert most == num_ranks - rank


@cases
def test_computations_are_a_plan_without_its_messages(schedule, per_rank, num_ranks, num_microbatches):
    placement, ranks = make(schedule, per_rank, num_ranks, num_microbatches)
    messages = {*MESSAGES, *(receive for receive, _ in MESSAGES.values())}
    alone = [tuple(each for each in own if each.operation not in messages) for own in ranks]
    assert list(computations(schedule, tuple(placement), num_microbatches)) == alone


@cases
@pytest.mark.parametrize("num_computations", [0, 2, 100])
def test_early_receives(schedule, per_rank, num_ranks, num_microbatches, num_computations):
    """The same instructions; each receive as early as it may be; computations, sends and receives keep their orders."""
    placement, ranks = make(schedule, per_rank, num_ranks, num_microbatches)
    early = [receive_early(own, num_computations) for own in ranks]
    assert walk(early, placement, sends_wait=False) == [[]] * num_ranks
    receives = [receive for receive, _ in MESSAGES.values()]
    for own, moved in zip(ranks, early, strict=True):
        for kind in (True, False):
            assert [each for each in moved if (each.operation in receives) is kind] == [
                each for each in own if (each.operation in receives) is kind
            ]
        for each in (each for each in own if each.operation in receives):
            passed = set(moved[moved.index(each) :]) & set(own[: own.index(each)])
            computed = [other for other in passed if other.operation not in (*receives, *MESSAGES)]
            assert len(computed) <= num_computations
            if each.operation is Operation.receive_output_gradient:
                # Its room has the shape of the output.
                assert moved.index((Operation.forward, *each[1:])) < moved.index(each)
    if num_computations == 2 and num_ranks > 1:
        assert early != ranks


@pytest.mark.parametrize("number_of", [1, 2, 3])
def test_what_is_proposed_in_place_of_auto_runs_with_these_stages(number_of):
    given = ["strategy=pipeline", "strategy.schedule=auto", f"strategy.stages_per_rank={number_of}"]
    with pytest.raises(ConfigError, match="auto chooses") as caught:
        compose_config(given)
    proposed = Schedule(caught.value.hint.rpartition("strategy.schedule=")[2])
    assert stages_per_rank(proposed, number_of) == number_of
