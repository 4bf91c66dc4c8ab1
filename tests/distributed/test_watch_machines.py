"""Real ranks of several machines that are killed or stopped, leaders too: the right one is named, in time."""

import multiprocessing
import os
import platform
import signal
import time

import pytest
import torch.distributed as dist

from hfdist.testing import forget_parent
from hfdist.watch.heartbeat import Progress
from hfdist.watch.heartbeat import beat_seconds as seconds_of_a_beat
from hfdist.watch.store import open_store
from hfdist.watch.watcher import Watcher
from tests.marks import many

pytestmark = pytest.mark.distributed

HEARTBEAT_SECONDS = 2.0
KILL, STOP = signal.SIGKILL, signal.SIGSTOP


def watch(folder, rank, num_ranks, size, victims, number, heartbeat_seconds):
    """Take part until some of the ranks are lost; the watch ends those that are left."""
    forget_parent()
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    platform.node = lambda: f"machine-{rank // size}"
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=num_ranks)
    progress = Progress()
    store = open_store(seconds_of_a_beat(heartbeat_seconds))
    watcher = Watcher(progress, store, folder / "watch" / "now", heartbeat_seconds)
    progress.exempt = None
    dist.barrier()
    # As in a step: a few beats go by.
    time.sleep(2.5 * seconds_of_a_beat(heartbeat_seconds))
    dist.barrier()
    if rank in victims:
        (folder / f"lost-{rank}").touch()
        os.kill(os.getpid(), number)
    try:
        dist.barrier()
    except RuntimeError:
        watcher.broke()
    time.sleep(60)


@pytest.mark.parametrize(
    ("num_ranks", "size", "victims", "number", "named"),
    [
        # A leader: the other rank of its machine beats to rank 0.
        (8, 2, {4}, KILL, "ranks 0-3, 5-7 wait for rank 4 (on machine-2,"),
        (8, 2, {2}, STOP, "ranks 0-1, 3-7 wait for rank 2 (on machine-1,"),
        # No leader. Several are never lost at one moment, and the first alarm names who is: that is a unit test.
        many(8, 2, {7}, KILL, "ranks 0-6 wait for rank 7 (on machine-3,"),
        many(8, 2, {0}, KILL, "waits for rank 0 (on machine-0,"),
        many(64, 8, {8}, KILL, "ranks 0-7, 9-63 wait for rank 8 (on machine-1,"),
        many(64, 8, {24}, STOP, "ranks 0-23, 25-63 wait for rank 24 (on machine-3,"),
    ],
)
def test_the_lost_ranks_are_named(tmp_path, num_ranks, size, victims, number, named):
    context = multiprocessing.get_context("fork")
    heartbeat_seconds = HEARTBEAT_SECONDS * (4 if num_ranks > 8 else 1)
    arguments = (num_ranks, size, victims, number, heartbeat_seconds)
    ranks = [context.Process(target=watch, args=(tmp_path, rank, *arguments)) for rank in range(num_ranks)]
    for one in ranks:
        one.start()
    try:
        for rank, one in enumerate(ranks):
            if rank not in victims:
                one.join(120)
                assert one.exitcode == 6, rank
    finally:
        for one in ranks:
            one.kill()
            one.join()
    report = tmp_path / "watch/now/report.txt"
    assert named in report.read_text()
    lost_seconds = max((tmp_path / f"lost-{rank}").stat().st_mtime for rank in victims)
    assert report.stat().st_mtime - lost_seconds < heartbeat_seconds + 5
    # Each rank that is left has written what it was doing.
    written = {int(path.stem[-5:]) for path in report.parent.glob("rank-*.txt")}
    assert written == set(range(num_ranks)) - victims
