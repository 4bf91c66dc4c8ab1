"""What a start says while it takes long."""

import time

import pytest

from hfdist.processes import startup


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(startup, "_FIRST_SECONDS", 0.05)
    monkeypatch.setattr(startup, "_NEXT_SECONDS", 0.05)
    yield
    startup.switch_reports(False)


def wait_for_lines(capfd, number):
    said = ""
    deadline = time.monotonic() + 10
    while said.count("\n") < number:
        assert time.monotonic() < deadline, said
        time.sleep(0.01)
        said += capfd.readouterr().err
    return said


def test_a_long_stage_speaks_again_and_again_until_it_ends(capfd):
    startup.switch_reports(True)
    with startup.reporting("counting") as ended:
        assert wait_for_lines(capfd, 2).startswith("counting: 0 s\ncounting: 0 s\n")
        ended.set()
    capfd.readouterr()
    time.sleep(0.2)
    assert capfd.readouterr().err == ""


def test_a_line_says_how_far_the_work_is(capfd):
    startup.switch_reports(True)
    with startup.reporting("opening"):
        for _ in startup.counted("ab", 3_000, "files"):
            said = wait_for_lines(capfd, 2)
        assert said.endswith("opening: 0 s, 1 of 3,000 files\n")
        wait_for_lines(capfd, 2)
        assert wait_for_lines(capfd, 1).endswith("opening: 0 s\n")


def test_a_short_stage_and_a_process_that_is_not_to_speak_are_silent(capfd):
    with startup.reporting("counting"):
        time.sleep(0.2)
    startup.switch_reports(True)
    with startup.reporting("counting"):
        pass
    time.sleep(0.2)
    assert capfd.readouterr().err == ""


def test_it_decorates_a_method(capfd):
    class Run:
        @startup.reporting("counting")
        def count(self, number):
            wait_for_lines(capfd, 1)
            return number

    startup.switch_reports(True)
    assert [Run().count(1), Run().count(2)] == [1, 2]
