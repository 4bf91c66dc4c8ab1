"""A rank ends with its exit code and all that it had to say, whatever torch's threads do by then."""

import json
import subprocess
import sys

import pytest

from tests.e2e.test_command_line import ROOT, environment

pytestmark = pytest.mark.e2e


def test_no_thread_aborts_a_process_at_its_end(tmp_path):
    command = [sys.executable, "-m", "tests.e2e.ended", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120)
    said = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == {"well": 0, "told": 5, "untold": 1}, said
    assert all(said[f"{way}.out"].endswith("from a thread\nlast words\n") for way in ("well", "told", "untold")), said
    assert "the loss is not finite" in said["told.err"]
    assert said["untold.err"].count("ZeroDivisionError: by zero") == 1
    assert "terminate called" not in "".join(said.values())
