"""What a program of the user's own ends with: one message, no traceback of ours."""

import subprocess
import sys

import pytest

from hfdist.strategies import select

PROGRAM = """
import sys
from hfdist.config.cli.process_end import report_uncaught
from hfdist.errors import ConfigError

before = sys.excepthook
report_uncaught()
ours = sys.excepthook
report_uncaught()
assert ours is sys.excepthook and ours is not before
raise {error}
"""


def run(error, *flags, **more):
    command = [sys.executable, *flags, "-c", PROGRAM.format(error=error)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **more)


def test_an_error_of_ours_is_a_message_and_an_exit_code():
    ended = run("ConfigError('this is wrong', where='a.key')")
    assert (ended.returncode, ended.stderr) == (2, "Config error: this is wrong\n  where:   a.key\n")


def test_other_errors_keep_their_tracebacks():
    ended = run("KeyError('x')")
    assert ended.returncode == 1
    assert ended.stderr.startswith("Traceback")


def test_a_session_at_a_prompt_goes_on():
    program = "from hfdist.config.cli.process_end import report_uncaught as r; import sys; b = sys.excepthook; r()"
    ended = subprocess.run(
        [sys.executable, "-i", "-c", f"{program}; print(b is sys.excepthook)"],
        input="",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.stdout.strip() == "True"


def test_a_strategy_from_python_sets_it_up_before_its_own_mistakes(monkeypatch):
    called = []
    monkeypatch.setattr(select, "report_uncaught", lambda: called.append(True))
    with pytest.raises(select.ConfigError):
        select.make_strategy(global_batch_size=8, shardin="zero2")
    assert called == [True]
