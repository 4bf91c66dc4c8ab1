"""No launcher trains on once a budget is used up: hfdist does not start again, others find that nothing is left."""

import re
from pathlib import Path

import pytest
import torch.distributed.run

from hfdist import __main__ as command
from hfdist.records import RunFolder, State, read_lines, read_run
from tests.e2e.forked import run_forked
from tests.e2e.test_launch import RECIPE, SMALL, forked_ranks  # noqa: F401

pytestmark = pytest.mark.e2e

BUDGET = ("strategy=ddp", *SMALL, "run.name=limited", "train.max_hours=1e-6")


def test_a_run_whose_budget_is_used_up_is_not_started_again(tmp_path, cache_dir, forked_ranks):  # noqa: F811
    run_dir = tmp_path / "runs" / "limited"
    own = ("pretrain", "launch.processes=2", "launch.max_restarts=3", *BUDGET)
    done = run_forked(*own, cwd=tmp_path, script=Path(command.__file__))
    assert done.returncode == 8, done.stderr
    assert "starting all" not in done.stderr
    assert done.stderr.count("Budget used up: the budget of the run is used up") == 1
    record = read_run(run_dir)
    assert (record.start, record.state, record.exit_code, record.step) == (1, State.stopped, 8, 1)
    assert [line["event"] for line in read_lines(RunFolder(run_dir).events)] == ["start", "budget", "save", "end"]
    assert (run_dir / "model" / "README.md").read_text().count("Training has used") == 1

    # Again: before any process is started.
    again = run_forked(*own, cwd=tmp_path, script=Path(command.__file__))
    assert (again.returncode, again.stdout) == (8, "")
    assert again.stderr.startswith("Budget used up")
    proposed = re.search(r"train\.max_hours=(\S+); the same command with it goes on", again.stderr)
    # Of this many steps one has used the hours of the record.
    assert float(proposed[1]) > record.max_steps * record.seconds / 3600

    # A launcher that starts again after each failure.
    options = ("--standalone", "--nproc-per-node", 2, "--max-restarts", 1)
    torchrun = Path(torch.distributed.run.__file__)
    done = run_forked(*options, RECIPE, *BUDGET, cwd=tmp_path, script=torchrun)
    assert done.returncode != 0
    assert done.stderr.count("Budget used up") == 2, done.stderr
    assert "layout" not in done.stderr
    assert read_run(run_dir) == record
