"""Threads that call environments: beside each other, and none that hangs holds up another."""

import threading
import time

import pytest

from hfdist.environments import crew as module
from hfdist.environments.crew import Crew, HangsError


@pytest.fixture
def gate():
    """Calls wait for it; all end with the test."""
    made = threading.Event()
    yield made
    made.set()


def collect_all(crew):
    found = {}
    while crew.is_busy:
        found |= dict(crew.collect(0.05))
    return found


def test_calls_run_beside_each_other_and_none_is_left_after_a_rest():
    before, meeting = set(threading.enumerate()), threading.Barrier(5)
    crew = Crew[int](10.0, 5)
    for key in range(5):
        # Each waits for all the others.
        crew.submit(key, lambda: meeting.wait(5) * 0 + 7)
    assert collect_all(crew) == dict.fromkeys(range(5), 7)
    crew.rest()
    assert set(threading.enumerate()) <= before


def test_those_that_are_slow_do_not_hold_up_the_others(gate):
    crew = Crew[str](10.0, 2)
    crew.submit(0, lambda: gate.wait() and "slow")
    crew.submit(1, lambda: "fast")
    begin = time.monotonic()
    assert crew.collect(0.3) == [(1, "fast")]
    assert time.monotonic() - begin < 5
    assert crew.is_busy
    gate.set()
    assert collect_all(crew) == {0: "slow"}


def test_a_call_that_hangs_is_given_up_and_others_go_on(gate):
    crew = Crew[str](0.2, 1)
    crew.submit(0, lambda: gate.wait() and "late")
    crew.submit(1, lambda: "next")
    found = collect_all(crew)
    assert isinstance(found[0], HangsError)
    assert found[1] == "next"
    gate.set()
    crew.rest()
    crew.submit(2, lambda: "again")
    # The late result is nobody's.
    assert collect_all(crew) == {2: "again"}


def test_whatever_a_call_raises_is_a_result():
    def leave():
        raise SystemExit(3)

    crew = Crew[str](10.0, 2)
    crew.submit(0, leave)
    assert isinstance(collect_all(crew)[0], SystemExit)
    crew.rest()


def test_there_is_a_limit_of_calls_that_hang(gate, monkeypatch):
    monkeypatch.setattr(module, "_MOST_LOST", 2)
    crew = Crew[str](0.1, 1)
    for key in range(4):
        crew.submit(key, lambda: gate.wait() and "late")
    found = collect_all(crew)
    assert all(isinstance(found[key], HangsError) for key in range(4))
    assert "already" in str(found[3])
    gate.set()
