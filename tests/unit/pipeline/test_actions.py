"""What ranks do in one step: everything once, no rank waits for ever, and 1F1B keeps few micro batches in flight."""

from itertools import product

import pytest

from hfdist.config.pipeline import ONE_F_ONE_B, Schedule
from hfdist.pipeline.schedule import Instruction, Operation, plan, rank_of_stage, receive_early
from tests.unit.pipeline.torch_actions import KINDS

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
    return placement, plan(schedule, placement, num_microbatches)


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
