"""Replicas vote, skipped steps are counted, and ranks that start again meet each other."""

import os
import re
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerControl, TrainerState

from hfdist.errors import ConfigError
from hfdist.launch import gloo_interface
from hfdist.run.process_group import agree_on_start, start_group_under_torchrun
from hfdist.strategies.deepspeed.engine import COUNTERS, ZeroEngine
from hfdist.testing import run_ranks
from hfdist.trainer.fault_tolerance.bit_comparison import Difference, find_differences, sum_bits, vote
from hfdist.trainer.fault_tolerance.nonfinite_steps import LEAST_LOSS_SCALE, NonfiniteGuard, propagate_nan
from hfdist.trainer.fault_tolerance.skip_counter import SkipCounter, Skipped, Tolerance
from hfdist.watch.callback import Watch
from hfdist.watch.heartbeat import EVALUATING


@pytest.mark.parametrize(
    ("held", "differences"),
    [
        ([{"a": 1, "b": 2}, {"a": 1, "b": 2}, {"a": 1, "b": 3}], [Difference(("b",), (2,), True)]),
        # A tie names all.
        ([{"a": 1}, {"a": 2}], [Difference(("a",), (0, 1), False)]),
        ([{"a": 1}, {"a": 1}, {"a": 2}, {"a": 2}], [Difference(("a",), (0, 1, 2, 3), False)]),
        # Only ranks that hold a parameter vote on it.
        ([{"a": 1}, {"b": 5}, {"a": 1}, {"b": 5}, {"a": 9}, {"b": 5}], [Difference(("a",), (4,), True)]),
        ([{"a": 1}, {"b": 2}], []),
        # Parameters with the same ranks are told together.
        ([*[{"a": 1, "b": 1, "c": 1}] * 2, {"a": 2, "b": 2, "c": 1}], [Difference(("a", "b"), (2,), True)]),
    ],
)
def test_a_majority_names_the_rank(held, differences):
    assert vote(held) == differences


def _compare(flipped_rank):
    parameters = {"a": torch.arange(6.0), "b": torch.ones(2, 3, dtype=torch.bfloat16)}
    equal = find_differences(parameters.items())
    if dist.get_rank() == flipped_rank:
        parameters["b"].view(torch.int16)[1, 1] ^= 1
    return equal, find_differences(parameters.items())


def test_three_ranks_find_the_one_that_is_wrong():
    answers = run_ranks(_compare, 3, 1)
    assert answers == [answers[0]] * 3
    equal, (line,) = answers[0]
    assert equal == []
    assert re.fullmatch(r"b: rank 1 on \S+ differs from the majority", line)


def _compare_shared():
    own = f"a of tensor rank {dist.get_rank()}"
    parameters = {own: torch.full((3,), float(dist.get_rank())), "norm": torch.ones(3)}
    equal = find_differences(parameters.items())
    parameters["norm"][1] += dist.get_rank()
    return equal, find_differences(parameters.items())


def test_ranks_that_share_only_some_parameters_compare_these():
    equal, (line,) = run_ranks(_compare_shared, 2)[0]
    assert equal == []
    assert re.fullmatch(r"norm: rank 0 on \S+ and rank 1 on \S+ differ, and no majority says which is wrong", line)


def test_any_flipped_bit_changes_the_sum():
    for dtype, integers in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16), (torch.float64, torch.int64)):
        tensor = torch.randn(5, 7).to(dtype).T
        before = sum_bits([("a", tensor)])
        for bit in range(8 * dtype.itemsize - 1):
            tensor.view(integers)[3, 2] ^= 1 << bit
            assert sum_bits([("a", tensor)]) != before
            tensor.view(integers)[3, 2] ^= 1 << bit
        assert sum_bits([("a", tensor)]) == before


def test_a_spread_loss_is_the_same_or_spoils_every_gradient():
    for value in (1.7, -0.0, 3e38):
        weight = torch.tensor(value, requires_grad=True)
        loss = propagate_nan(weight * 1)
        loss.backward()
        assert loss.view(torch.int32) == weight.view(torch.int32)
        assert weight.grad == 1
    weight = torch.tensor(2.0, requires_grad=True)
    propagate_nan(weight + torch.inf).backward()
    assert weight.grad.isnan()


def skip(step):
    return Skipped(step=step, data_ranks=(), end_sample=0)


def test_skipped_steps_count_in_a_row():
    tally = SkipCounter(Tolerance(skipped_steps=2))
    assert not tally.skip(skip(1))
    tally.take(2)
    assert not tally.skip(skip(3))
    assert tally.skip(skip(4))


def test_only_a_step_beyond_the_one_that_failed_is_progress():
    tally = SkipCounter(Tolerance(rollbacks=2))
    tally.roll_back(10)
    for step in range(5, 11):
        tally.take(step)
    assert tally.may_roll_back
    tally.roll_back(9)
    tally.take(10)
    assert not tally.may_roll_back
    tally.take(11)
    assert tally.may_roll_back


def test_a_watch_knows_when_an_evaluation_that_was_put_off_comes(tmp_path):
    watch, control = Watch(tmp_path), TrainerControl(should_evaluate=True)
    training = SimpleNamespace(
        args=SimpleNamespace(fp16=False),
        callbacks=[watch],
        control=control,
        num_samples=lambda: 0,
        schedule=SimpleNamespace(load_state_dict=lambda state: None, optimizer=SimpleNamespace(param_groups=[])),
        strategy=SimpleNamespace(topology=SimpleNamespace(data_rank=0)),
        trainer=SimpleNamespace(_tr_loss=torch.tensor(torch.nan), _globalstep_last_logged=0),
        state=TrainerState(global_step=1),
    )
    limits, keeper = Tolerance(compare_replicas_every=None), SimpleNamespace(replicates_at=lambda step: False)
    guard = NonfiniteGuard(training, keeper, limits, replicas=None, came_from=None, log_skipped=lambda: None)
    guard._loss_before, guard._is_finite = torch.tensor(1.0), False
    watch.on_step_end(None, training.state, control)
    assert watch.progress.exempt == EVALUATING
    guard.end_step()
    assert not guard.was_taken
    assert watch.progress.exempt is None
    watch.on_step_end(None, training.state, control)
    guard._is_finite = True
    guard.end_step()
    assert guard.was_taken
    assert control.should_evaluate
    assert watch.progress.exempt == EVALUATING


def test_a_skipped_step_takes_back_a_rate_that_is_a_tensor():
    guard = guard_of(zero_engine()[0])
    training, weight = guard._training, torch.nn.Parameter(torch.ones(1))
    training.optimizer = torch.optim.SGD([weight], lr=torch.tensor(1.0))
    training.model, training.schedule = torch.nn.Linear(1, 1), LambdaLR(training.optimizer, lambda step: 0.5**step)
    training.args, training.state = SimpleNamespace(fp16=False), TrainerState(global_step=1)
    training.control, training.num_samples = TrainerControl(), lambda: 0
    training.strategy = SimpleNamespace(topology=SimpleNamespace(data_rank=0))
    training.trainer = SimpleNamespace(_tr_loss=torch.tensor(torch.nan), _globalstep_last_logged=0)
    guard.begin_step()
    guard.judge(torch.tensor(torch.nan))
    training.optimizer.step()
    training.schedule.step()
    assert not guard.end_step()
    assert float(training.optimizer.param_groups[0]["lr"]) == 1.0
    assert isinstance(training.optimizer.param_groups[0]["lr"], torch.Tensor)


def test_a_step_that_looks_for_a_loss_scale_is_not_taken_though_nothing_is_wrong():
    guard = guard_of(zero_engine(min_scale=1)[0])
    training = guard._training
    training.control = TrainerControl()
    training.args, training.state = SimpleNamespace(fp16=True), TrainerState(global_step=1)
    training.schedule = SimpleNamespace(load_state_dict=lambda state: None, optimizer=SimpleNamespace(param_groups=[]))
    training.strategy = SimpleNamespace(topology=SimpleNamespace(data_rank=0))
    training.trainer = SimpleNamespace(_tr_loss=torch.tensor(1.0))
    guard.was_taken, guard._is_finite = True, False
    assert not guard.end_step()
    assert guard.is_sound
    assert not guard.was_taken


def start(port, world_size):
    """Let the ranks of one start agree, each with its own connection, and give what each got."""
    tokens = {}

    def agree(rank):
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        tokens[rank] = agree_on_start(store, rank, world_size)

    threads = [threading.Thread(target=agree, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return tokens


def guard_of(engine, **named):
    training = SimpleNamespace(accelerator=SimpleNamespace(scaler=None), engine=engine, stream=object(), callbacks=[])
    checkpointer = SimpleNamespace(folder=SimpleNamespace(has_own=False), find_own=lambda: None)
    given = {"replicas": None, "came_from": None, "log_skipped": lambda: None} | named
    return NonfiniteGuard(training, checkpointer, Tolerance(), **given)


def test_a_replica_is_gone_back_to_twice(tmp_path, monkeypatch):
    class Lines:
        """Each line has a folder of its own."""

        def begin_line(self, start):
            moved = start.parent.with_name(f"{start.parent.name}1") / start.name
            start.parent.rename(moved.parent)
            return moved

        def holds(self, checkpoint):
            return True

    replica = tmp_path / "line" / "step-00000003"
    replica.mkdir(parents=True)
    guard, restored = guard_of(None, replicas=Lines(), came_from=replica), []
    monkeypatch.setattr(guard, "_restore", restored.append)
    for _ in range(2):
        assert guard._roll_back(5, AssertionError)
    assert [path.parent.name for path in restored] == ["line1", "line11"]


def test_a_checkpoint_that_was_damaged_since_the_start_is_not_gone_back_to(tmp_path):
    assert guard_of(None, came_from=tmp_path)._find_checkpoint() is None


def zero_engine(**settings):
    """An engine with DeepSpeed's own loss scaler; without settings its scale is fixed."""
    scaler = LossScaler(1024)
    if settings:
        scaler = DynamicLossScaler(2.0**16, 1000, delayed_shift=1, consecutive_hysteresis=False, **settings)
    engine, counters = ZeroEngine(torch.nn.Linear(1, 1)), dict.fromkeys(COUNTERS, 0)
    engine._engine = SimpleNamespace(optimizer=SimpleNamespace(loss_scaler=scaler), **counters)
    return engine, scaler


def test_a_loss_scale_that_cannot_fall_excuses_no_step():
    (engine, scaler), (fixed, _) = zero_engine(min_scale=128), zero_engine()
    assert guard_of(engine)._loss_scale() == 2**16
    scaler.cur_scale = 128
    assert guard_of(engine)._loss_scale() == guard_of(fixed)._loss_scale() == LEAST_LOSS_SCALE


def test_a_resume_takes_of_a_loss_scaler_what_steps_have_changed():
    (before, scaler), (after, changed), (fixed, static) = (
        zero_engine(min_scale=1),
        zero_engine(min_scale=128),
        zero_engine(),
    )
    scaler.cur_scale, scaler.cur_iter, changed.scale_window = 512.0, 7, 50
    for engine in (after, fixed):
        engine.load_extra_state(before.extra_state())
    assert (changed.cur_scale, changed.cur_iter, changed.min_scale, changed.scale_window) == (512, 7, 128, 50)
    assert static.cur_scale == 1024


def test_each_start_has_a_token_of_its_own():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second = start(server.port, 4), start(server.port, 3)
    assert sorted(first) == [0, 1, 2, 3]
    assert sorted(second) == [0, 1, 2]
    assert len(set(first.values())) == len(set(second.values())) == 1
    assert set(first.values()) != set(second.values())


def test_a_start_that_was_ended_while_it_asked_is_not_in_the_way():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server.set("asks-2", "a name that nobody has any more")
    third = start(server.port, 3)
    assert sorted(third) == [0, 1, 2]
    assert len(set(third.values())) == 1


def started_with(port, timeout_seconds):
    """The seconds that a collective of the group may take."""
    place = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, TORCHELASTIC_USE_AGENT_STORE="True")
    start_group_under_torchrun(timeout_seconds=timeout_seconds)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    return backend.options._timeout.total_seconds()


@pytest.mark.parametrize(("asked", "given"), [(None, 1800), (7200, 7200)])
def test_the_group_has_the_timeout_that_was_asked_for(asked, given):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert run_ranks(started_with, 1, server.port, asked, group=False) == [given]


def test_gloo_gets_an_interface_only_where_other_machines_would_not_find_this_one(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(gloo_interface, "own_interfaces", lambda: {"eth7": "10.0.1.2", "ib0": "10.0.0.2"})
    monkeypatch.setattr(gloo_interface, "find_route", lambda peer, wait_seconds: {"first": ("ib0", "10.0.0.2")}[peer])
    monkeypatch.setattr(gloo_interface, "address_of_own_name", lambda: "127.0.1.1")
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "first"}.items():
        monkeypatch.setenv(name, str(value))
    gloo_interface.choose_gloo_interface()
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    gloo_interface.choose_gloo_interface()
    assert os.environ.pop("GLOO_SOCKET_IFNAME") == "ib0"
    monkeypatch.setattr(gloo_interface, "address_of_own_name", lambda: "10.0.0.2")
    gloo_interface.choose_gloo_interface()
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth99")
    with pytest.raises(ConfigError, match="no such network interface"):
        gloo_interface.choose_gloo_interface()


def test_a_host_name_has_the_address_that_gloo_would_take(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "localhost")
    assert gloo_interface.address_of_own_name() in ("127.0.0.1", "::1")
    monkeypatch.setattr("socket.gethostname", lambda: "no-such-name.invalid")
    assert gloo_interface.address_of_own_name() == "127.0.0.1"
