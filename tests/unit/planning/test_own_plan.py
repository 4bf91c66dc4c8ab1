"""The plan that a run makes of itself in another process: whatever happens there, the run goes on."""

import os
import signal
import sys
import time
from functools import partial

import psutil
import pytest
import torch
from transformers import AutoConfig

from hfdist.config.composition.compose import compose_config
from hfdist.config.hardware import Hardware
from hfdist.config.plan import PlanConfig
from hfdist.errors import ResourceError
from hfdist.planning.searching.evaluate import Machines
from hfdist.planning.timing.hardware import find_hardware
from hfdist.run import own_plan
from hfdist.run.own_plan import OwnPlan, begin_plan, naming_lack_of_memory
from hfdist.topology import Topology
from tests.marks import many
from tests.unit.planning.plans import PLAN, TOO_LARGE


def test_a_run_goes_on_where_no_process_can_be_started(monkeypatch):
    def refuse():
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    config = compose_config(["model=tiny"])
    assert begin_plan(config, AutoConfig.for_model("llama", **config.model.config), Topology()) is None
    assert "TOKENIZERS_PARALLELISM" not in os.environ


def test_a_plan_comes_back_whole_and_leaves_nothing_here():
    here = []
    # Of earlier tests of this process: multiprocessing keeps one that tracks its shared memory.
    others = psutil.Process().children()

    def make():
        here.append(1)
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        return PLAN, Machines(hardware=Hardware(name="cpu"), usable_bytes=1.0)

    plan, machines = OwnPlan(make).take()
    assert plan == PLAN
    assert machines.hardware.is_cpu
    assert here == []
    assert not torch.distributed.is_initialized()
    assert psutil.Process().children() == others


def test_what_cannot_be_sent_to_a_new_process_is_not_waited_for():
    start = time.monotonic()
    assert "was ended" in OwnPlan(lambda: PLAN, forks=False).take()
    # Without an end the child would be waited for a minute.
    assert time.monotonic() - start < 30


def _divide():
    return 1 // 0


def _end():
    os.kill(os.getpid(), signal.SIGKILL)


def _make_and_show_gpus(*given):
    return own_plan._make_own(*given), os.environ.get("CUDA_VISIBLE_DEVICES"), os.getppid()


# A new process answers as a fork does, and takes five seconds to import what makes a plan.
@pytest.mark.parametrize("forks", [True, many(False)])
def test_a_plan_that_fails_is_words(forks):
    assert OwnPlan(_divide, forks=forks).take() == "ZeroDivisionError: integer division or modulo by zero"


@pytest.mark.parametrize("forks", [True, many(False)])
def test_a_plan_whose_process_is_killed_is_words(forks):
    assert "was ended" in OwnPlan(_end, forks=forks).take()


def test_a_new_process_that_dies_at_its_start_is_words(monkeypatch):
    monkeypatch.setattr(own_plan, "python", lambda *words: [sys.executable, "-S", "-c", "raise SystemExit(1)"])
    # More than a socket holds.
    assert "was ended" in OwnPlan(partial(len, bytes(2**24)), forks=False).take()


def test_a_new_process_makes_the_same_plan_and_sees_no_gpu():
    config = compose_config(["model=tiny", "strategy=ddp", "train.precision=bf16"])
    architecture = AutoConfig.for_model("llama", **config.model.config)
    given = (config, PlanConfig(per_machine=2), find_hardware("h100_80gb"), 2, architecture)
    make = partial(_make_and_show_gpus, *given)
    new = OwnPlan(make, forks=False)
    wanted, *_ = OwnPlan(make).take()
    assert new.take() == (wanted, "", os.getpid())


def test_a_plan_that_takes_too_long_is_given_up(monkeypatch):
    monkeypatch.setattr(own_plan, "_MOST_SECONDS", 0.2)
    begin = time.monotonic()
    assert "took longer" in OwnPlan(lambda: time.sleep(60)).take()
    assert time.monotonic() - begin < 10


def test_no_process_outlives_a_run_that_takes_no_plan():
    plan = OwnPlan(lambda: time.sleep(60))
    child = psutil.Process(plan._pid)
    del plan
    assert not child.is_running()
    plan = OwnPlan(partial(bytes, 2**24))
    # As where this process is killed: what is answered is more than a socket holds.
    plan._connection.close()
    psutil.Process(plan._pid).wait(10)


def test_what_torch_says_where_memory_ends_has_the_next_move():
    with pytest.raises(ResourceError, match="not enough memory") as caught, naming_lack_of_memory(TOO_LARGE):
        torch.empty(2**50)
    assert caught.value.hint == TOO_LARGE.advice
    assert caught.value.found.startswith("does not fit")
    with pytest.raises(ResourceError), naming_lack_of_memory(None):
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_other_errors_stay_what_they_are():
    with pytest.raises(RuntimeError, match="shape"), naming_lack_of_memory(PLAN):
        torch.ones(2).view(3)
