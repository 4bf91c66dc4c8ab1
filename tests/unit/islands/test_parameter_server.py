"""Who waits for whom at a parameter server, and what it steps with."""

import math
import time

import numpy as np
import pytest
import torch

from hfdist.config.optimizer import OptimizerConfig, OptimizerName, Schedule
from hfdist.config.plain_values import plain
from hfdist.errors import ConfigError, PeerError
from hfdist.islands import server
from hfdist.islands.parameter_client import GradientRecorder
from hfdist.islands.parameter_shard import check_job
from hfdist.islands.parameter_store import ParameterStore, exact_sum, find_slots
from hfdist.islands.segment import Segment
from hfdist.messages.message import Message
from tests.unit.islands.servers import member, served, together, until

SGD = plain(OptimizerConfig(name=OptimizerName.sgd, weight_decay=0.0, lr=1.0, schedule=Schedule.constant))
SEGMENTS = [["weight", [2], 0, 0, 0, 2]]
START = [1.0, 2.0]


def job(staleness, **more):
    return {
        "islands.method": "parameter_server",
        "islands.count": 2,
        "islands.codec": "fp32",
        "islands.staleness": staleness,
        "optimizer": SGD,
        "train.max_grad_norm": 1e9,
        "train.max_steps": 100,
    } | more


class Worker:
    """One rank that is an island."""

    def __init__(self, address, index, staleness, *, start="1", **more):
        # It loads torch for the first one.
        self._member = member(address, index, job=job(staleness, **more), start=start, seconds=60.0)
        self.step = 0

    def begin(self, step=0, weights=START, **more):
        message = {"segments": SEGMENTS, "step": step, "updates": step, "state": {"of": step}, "may_begin": True}
        message |= more
        self._member.send(message, np.array(weights, np.float32).tobytes())
        return self.take()

    def push(self, gradient, targets=1.0, **more):
        self.step += 1
        message = {"push": self.step, "targets": targets, "state": {"of": self.step}} | more
        self._member.send(message, np.array([gradient] * 2, np.float32).tobytes())

    def pull(self):
        self._member.send({"pull": 1})

    def take(self):
        """The weights that the server gives; they are waited for."""
        self.answer = self._member.wait_for("weights")
        return np.frombuffer(self.answer["payload"], np.float32).tolist()

    def is_answered(self):
        return not self._member._connection._messages.empty()

    def leave(self):
        self._member.leave()


def begin_both(address, staleness, **more):
    workers = [Worker(address, index, staleness, **more) for index in range(2)]
    assert together(*(worker.begin for worker in workers)) == [START] * 2
    return workers


def test_a_synchronous_step_takes_the_mean_by_targets_of_all():
    with served() as (address, _):
        one, two = begin_both(address, 0)
        one.push(1.0, targets=3.0)
        assert not one.is_answered()
        two.push(5.0, targets=1.0)
        # (3 x 1 + 1 x 5) / 4
        assert one.take() == two.take() == [-1.0, 0.0]
        assert one.answer["weights"] == 1
        # Who has nothing does not count; the others do not wait for who has left.
        one.push(0.5)
        two.push(9.0, targets=0.0)
        assert one.take() == two.take() == [-1.5, -0.5]
        one.push(1.0)
        two.leave()
        assert one.take() == [-2.5, -1.5]


def test_gradients_are_clipped_by_the_norm_of_their_mean():
    with served() as (address, _):
        one, two = begin_both(address, 0, **{"train.max_grad_norm": 2**0.5})
        one.push(3.0)
        two.push(1.0)
        assert one.take() == pytest.approx([0.0, 1.0], abs=1e-5)


@pytest.mark.parametrize("staleness", [1, None])
def test_without_synchronous_steps_each_push_is_a_step_and_who_is_far_ahead_waits(staleness):
    with served() as (address, _):
        fast, slow = begin_both(address, staleness)
        fast.push(1.0)
        assert fast.take() == [0.0, 1.0]
        fast.push(1.0)
        # Answered after the push, whether or not that waits.
        fast.pull()
        assert fast.take() == [-1.0, 0.0]
        if staleness is None:
            assert fast.take() == [-1.0, 0.0]
            return
        # Two steps ahead.
        assert not fast.is_answered()
        slow.push(0.5)
        assert slow.take() == [-1.5, -0.5]
        assert fast.take() == [-1.5, -0.5]
        fast.push(1.0)
        slow.leave()
        assert fast.take() == [-2.5, -1.5]


def test_the_newest_begins_and_who_comes_later_gets_what_there_is():
    with served() as (address, lines):
        old, new = (Worker(address, index, 0) for index in range(2))
        assert together(lambda: old.begin(4, [7.0, 7.0]), lambda: new.begin(6, [8.0, 8.0])) == [[8.0, 8.0]] * 2
        assert old.answer["step"] == 6
        assert old.answer["state"] == {"of": 6}
        assert old.answer["weights"] == 6
        late = Worker(address, 2, 0)
        assert late.begin() == [8.0, 8.0]
        assert late.answer["step"] == 6
        assert "islands 0, 1 train from step 6" in lines or "islands 1, 0 train from step 6" in lines


def test_a_server_that_was_started_anew_does_not_begin_after_a_step():
    """What its optimizer had kept is lost; the islands have an older one."""
    with served(least=1) as (address, lines):
        worker = Worker(address, 0, 0)
        message = {"segments": SEGMENTS, "step": 5, "updates": 5, "state": {}, "may_begin": False}
        worker._member.send(message, np.array(START, np.float32).tobytes())
        assert worker._member.wait_for("weights") is None
        assert "island 0 must go on from its checkpoint: this server has no weights" in lines


LEFT_OUT = "island 0 is left out of a step: what it has pushed is not finite"


def test_what_is_no_gradient_ends_an_island_and_what_is_not_finite_is_left_out():
    with served() as (address, lines):
        one, two = begin_both(address, 0)
        one.push(float("nan"))
        two.push(1.0)
        assert one.take() == two.take() == [0.0, 1.0]
        assert lines[-1] == LEFT_OUT
        one.push(float("inf"))
        two._member.send({"push": 2, "targets": 1.0, "state": {}}, b"123")
        assert two._member.wait_for("weights") is None
        # Nothing is left to step with.
        assert one.take() == [0.0, 1.0]
        with pytest.raises(PeerError, match="has ended this island") as error:
            two._member.connect()
        assert "3 bytes follow, and 8 should" in error.value.found
        for _ in range(3):
            one.push(float("nan"))
            one.answer = one._member.wait_for("weights")
        # The last words come after the last weights.
        assert one._member.wait_for("weights") is None
        with pytest.raises(PeerError) as error:
            one._member.connect()
        assert error.value.found == "what it has pushed is not finite, 5 times in a row"


def test_what_an_island_has_pushed_before_its_start_counts_no_more():
    with served() as (address, lines):
        one, two = begin_both(address, None)
        for number in range(1, 6):
            one.push(float("nan"))
            until(lambda number=number: lines.count(LEFT_OUT) == number)
        until(lambda: any(line.startswith("island 0 has left") for line in lines))
        back = Worker(address, 0, None, start="2")
        assert back.begin() == START
        back.step = back.answer["step"]
        back.push(float("nan"))
        assert back.take() == START
        until(lambda: lines[-1] == LEFT_OUT)
        for worker in (back, two):
            worker.leave()


def test_a_skipped_step_pushes_no_gradient_of_an_earlier_one():
    one, two = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    recorder = GradientRecorder([one, two], lr=0.0)
    for parameter in (one, two):
        parameter.grad = torch.ones(2)
    recorder.step()
    assert recorder.has_taken
    recorder.has_taken = False
    one.grad = None
    recorder.step()
    assert recorder.has_taken
    assert recorder.state[one]["gradient"].tolist() == [0.0, 0.0]
    recorder.has_taken = False
    two.grad = None
    recorder.step()
    assert not recorder.has_taken


@pytest.mark.parametrize(
    "wrong",
    [
        {"targets": float("nan")},
        {"targets": -1.0},
        {"targets": 1e999},
        {"push": 1e30},
        {"push": 3},
        {"push": True},
        {"push": 0},
        {"state": 1},
    ],
)
def test_numbers_of_an_island_cannot_move_the_weights_of_others(wrong, parameters):
    address, lines = parameters
    one, two = begin_both(address, None)
    one.push(1.0, **wrong)
    assert one._member.wait_for("weights") is None
    assert "island 0 has left: rank 0 has sent what is not a message" in lines[-1]
    two.push(0.5, lr=float("nan"))
    assert two.take() == [0.5, 1.5]
    two.leave()


@pytest.fixture(scope="module")
def parameters():
    with served() as found:
        yield found


def test_the_rate_of_a_step_is_that_of_the_schedule():
    optimizer = OptimizerConfig(
        name=OptimizerName.sgd, lr=0.5, weight_decay=0.0, schedule=Schedule.linear, warmup_steps=2
    )
    with served(least=1) as (address, _):
        worker = Worker(address, 0, 0, **{"optimizer": plain(optimizer), "train.max_steps": 4})
        worker.begin()
        rates, before = [], START[0]
        for _ in range(4):
            worker.push(1.0)
            now = worker.take()[0]
            rates.append(before - now)
            before = now
        # Of a step by the number of those before it, as a Trainer has it.
        assert rates == pytest.approx([0.0, 0.25, 0.5, 0.25])


def test_what_the_optimizer_keeps_comes_with_a_pull():
    adam = plain(OptimizerConfig(fused=False, weight_decay=0.0, lr=0.5, schedule=Schedule.constant))
    with served(least=1) as (address, _):
        worker = Worker(address, 0, 0, optimizer=adam)
        assert worker.begin(weights=[*START, 0, 0, 0, 0]) == [*START, 0, 0, 0, 0]
        worker.push(2.0)
        weights = worker.take()
        assert weights == pytest.approx([0.5, 1.5])
        worker.pull()
        parameter = torch.nn.Parameter(torch.tensor(START))
        parameter.grad = torch.full((2,), 2.0)
        optimizer = torch.optim.AdamW([parameter], lr=0.5, betas=(0.9, 0.95), weight_decay=0.0)
        optimizer.step()
        state = optimizer.state[parameter]
        assert worker.take() == [*parameter.tolist(), *state["exp_avg"].tolist(), *state["exp_avg_sq"].tolist()]


@pytest.mark.parametrize("name", ["adafactor", "muon", "schedule_free_adamw"])
def test_an_optimizer_that_a_server_cannot_step_is_refused(name):
    with pytest.raises(ConfigError):
        find_slots(OptimizerConfig(name=OptimizerName(name)))


def test_a_job_without_a_learning_rate_is_refused():
    with pytest.raises(ConfigError, match="no rate"):
        check_job(Message(optimizer=plain(OptimizerConfig(lr=None))))


def test_who_has_other_parameters_does_not_begin_with_the_others():
    """Else a rank that only one island has would be answered on both, and nobody would go on."""
    with served() as (address, lines):
        one, two = (Worker(address, index, 0) for index in range(2))
        message = {"segments": [["bias", [2], 0, 0, 0, 2]], "step": 0, "updates": 0, "state": {}, "may_begin": True}
        two._member.send(message, np.array(START, np.float32).tobytes())
        assert one.begin(step=1) == START
        until(lambda: "island 1 has left: it has other parameters" in lines)
        one.step = 1
        one.push(1.0)
        assert one.take() == [0.0, 1.0]


def test_the_time_that_a_server_takes_to_look_at_a_job_is_no_silence(monkeypatch):
    # Torch may be loaded for it.
    monkeypatch.setattr(server, "_check_parameter_server", lambda job: time.sleep(2.2))
    with served(silent_seconds=1.5) as (address, lines):
        one = member(address, 0, job=job(0), seconds=10)
        time.sleep(1.2)
        assert not any("silent" in line for line in lines)
        one.leave()


@pytest.mark.parametrize("why", ["no room", "no room " * 300])
def test_a_server_that_fails_ends_its_islands(why, monkeypatch):
    def fail(*_):
        raise MemoryError(f"{why}\nfor it")

    with served() as (address, _):
        one, two = begin_both(address, 0)
        monkeypatch.setattr(ParameterStore, "step", fail)
        one.push(1.0)
        two.push(1.0)
        for worker in (one, two):
            until(worker._member._connection.is_broken.is_set)
            with pytest.raises(PeerError, match="has ended this island") as error:
                worker._member.raise_if_ended()
            assert error.value.found.startswith("the server has failed: MemoryError: no room")
            assert "for it" not in error.value.found


def test_each_element_counts_once_in_the_norm_whichever_ranks_have_it():
    optimizer = OptimizerConfig(name=OptimizerName.sgd, lr=1.0, schedule=Schedule.constant)
    segments = {rank: [Segment("a", (4, 1), rank, 0, 0, 1), Segment("b", (2,), 0, 0, 0, 2)] for rank in range(4)}
    store = ParameterStore(optimizer, segments, dict.fromkeys(range(4), bytes(12)), 0)
    for rank in range(4):
        store.add(rank, [torch.tensor([1.0]), torch.tensor([3.0, 4.0])], 1.0)
    assert store.squares() == [4.0 + 25.0]


def test_sums_of_parts_add_up_to_the_sum_of_all_bit_for_bit():
    numbers = [float(value) for value in torch.randn(300, dtype=torch.float64).exp() * 1e3 ** torch.randn(300)]
    for cut in (1, 7, 150):
        parts = [*exact_sum(numbers[:cut]), *exact_sum(numbers[cut:])]
        assert len(parts) < 12
        assert math.fsum(parts) == math.fsum(numbers)
    assert exact_sum([1.0, math.nan]) == exact_sum([math.inf]) == [math.inf]
    assert exact_sum([]) == []
