"""What a rank that waits for another tells: the collective and who called it, by its stack and by torch's recorder."""

import threading
import time

import pytest
import torch
import torch.distributed as dist

from hfdist.collectives import gather_json
from hfdist.testing import run_ranks
from hfdist.watch import stacks

pytestmark = pytest.mark.distributed


def wait_until(holds):
    for _ in range(1000):
        if holds():
            return
        time.sleep(0.02)


def wait_for_each_other(path):
    """Rank 1 comes once rank 0 has looked at itself."""
    dist.all_reduce(torch.ones(3))
    # torch's recorder hears of the end a moment later.
    wait_until(lambda: stacks.waits_in() is None)
    told = {}

    def look():
        wait_until(lambda: stacks.waits_in() is not None)
        told["in"], told["last"] = stacks.waits_in(), stacks.last_collectives()
        stacks.write_stacks(path, "rank 0")

    thread = threading.Thread(target=look)
    if dist.get_rank() == 0:
        thread.start()
    else:
        wait_until(path.exists)
    gather_json("a secret")
    if dist.get_rank() == 0:
        thread.join()
    wait_until(lambda: stacks.waits_in() is None)
    told["after"] = stacks.waits_in()
    return told


def test_the_collective_that_has_not_finished_is_named(tmp_path):
    told, _ = run_ranks(wait_for_each_other, 2, tmp_path / "watch" / "rank-0.txt")
    assert told["in"].startswith("all_gather of hfdist/collectives.py:")
    assert told["after"] is None
    text = (tmp_path / "watch" / "rank-0.txt").read_text()
    assert "in gather_json" in text
    assert "in look" in text, "of all threads"
    assert "secret" not in text
    # Of torch's flight recorder, which is private: this says when it is gone.
    assert told["last"].startswith("gloo:all_gather [[")
    assert told["last"].endswith("(number 2 of default_pg, not finished)")
