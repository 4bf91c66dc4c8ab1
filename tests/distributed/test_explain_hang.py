"""Ranks that really hang are explained from what the watch has left, or from what they answer while they hang."""

import contextlib
import json
import multiprocessing
import re
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hfdist.records import RunRecord, State
from hfdist.records.run_file import write_run
from hfdist.testing import RankFailed, run_ranks
from hfdist.tools.explain_hang import explain
from hfdist.watch.callback import Watch
from recipes import explain_hang

pytestmark = pytest.mark.distributed

HEARTBEAT_SECONDS = 0.5
ENOUGH = "enough"


def all_reduce():
    dist.all_reduce(torch.ones(3))


def leave_a_barrier_out():
    if dist.get_rank() != 1:
        dist.barrier()
    all_reduce()


def stay_in_the_data():
    while dist.get_rank() == 1 and not Path(ENOUGH).exists():
        time.sleep(0.05)
    all_reduce()


def meet_in_other_orders():
    """Each pair of groups has a rank in common, and each rank begins with another one."""
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([0, 2])]
    own = [group for group in groups if dist.get_rank(group) >= 0]
    # Rank 0 waits for rank 1, rank 1 for rank 2, and rank 2 for rank 0.
    first = {0: 0, 1: 1, 2: 1}[dist.get_rank()]
    dist.all_reduce(torch.ones(2), group=own[first])
    dist.all_reduce(torch.ones(2), group=own[1 - first])


def hang(run_dir, fault, heartbeat_seconds):
    watch = Watch(run_dir, heartbeat_seconds)
    with watch:
        for _ in range(3):
            all_reduce()
            watch.progress.step_done(watch.progress.step + 1)
        watch.progress.exempt = None
        fault()
        raise AssertionError("it did not hang")


def hang_to_the_end(run_dir, fault):
    with pytest.raises(RankFailed, match="died without a word"):
        run_ranks(hang, 3, run_dir, fault, HEARTBEAT_SECONDS, timeout_seconds=30)
    return explain(run_dir)


def hang_until_told(run_dir):
    with contextlib.suppress(RankFailed):
        run_ranks(hang, 3, run_dir, stay_in_the_data, 60.0, timeout_seconds=60)


def test_the_rank_that_left_a_collective_out_is_named_with_both_lines(tmp_path):
    found = hang_to_the_end(tmp_path, leave_a_barrier_out)
    assert [row.step for row in found.rows] == [3, 3, 3]
    assert [row.does.partition(",")[0] for row in found.rows] == [
        "is in barrier",
        "is in all_reduce of 3",
        "is in barrier",
    ]
    assert re.match(
        r"rank 1 called all_reduce of 3 at \S*/test_explain_hang.py:\d+ all_reduce, from \S*:\d+ leave_a_barrier_out, "
        r"from \S*:\d+ hang where ranks 0, 2 called barrier at \S*/test_explain_hang.py:\d+ leave_a_barrier_out, from "
        r".*: both are number \d+ of default_pg; rank 1 left a collective out, or called one too many",
        found.verdict,
    )
    assert [(wait.waiting, wait.awaited) for wait in found.waits] == [([0, 2], [1])]


def test_a_cycle_of_groups_is_told(tmp_path):
    found = hang_to_the_end(tmp_path, meet_in_other_orders)
    assert sorted((wait.waiting, wait.awaited) for wait in found.waits) == [([0], [1]), ([1], [2]), ([2], [0])]
    assert found.verdict.startswith("the ranks wait for each other")


def test_a_run_that_hangs_now_is_asked(tmp_path, monkeypatch, capsys):
    """The watch itself would wait for a minute."""
    write_run(tmp_path, RunRecord(start=1, processes=3), is_durable=False)
    monkeypatch.chdir(tmp_path)
    ranks = multiprocessing.get_context("fork").Process(target=hang_until_told, args=(tmp_path,))
    ranks.start()
    monkeypatch.setattr(sys, "argv", ["hfdist explain-hang", str(tmp_path), "--json"])
    found = {"waits": []}
    end = time.monotonic() + 40
    # What has begun less than some seconds ago is no hang yet.
    while not found["waits"] and time.monotonic() < end:
        time.sleep(2)
        explain_hang.main()
        found = json.loads(capsys.readouterr().out)
    Path(ENOUGH).touch()
    ranks.join()
    assert [(wait["waiting"], wait["awaited"]) for wait in found["waits"]] == [([0, 2], [1])]
    assert "for rank 1, which never came to it: runs its own code" in found["verdict"]
    assert "distributed/test_explain_hang.py:" in found["ranks"][1]["where"]
    assert found["ranks"][1]["where"].endswith("stay_in_the_data")


def test_a_folder_that_is_no_run_is_one_message(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["hfdist explain-hang", str(tmp_path / "none")])
    with pytest.raises(SystemExit, match="2"):
        explain_hang.main()
    assert "there is no such run" in capsys.readouterr().err


def test_a_run_that_ended_well_did_not_hang(tmp_path):
    write_run(tmp_path, RunRecord(start=1, state=State.finished, exit_code=0, processes=2), is_durable=False)
    assert explain(tmp_path).verdict == "nothing hung in the last start: it ended as finished"
