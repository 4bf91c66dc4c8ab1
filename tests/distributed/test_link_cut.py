"""Two machines, as two network namespaces, and the link between them cut: both sides find out, and both end."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hfdist.records import METRICS, read_lines
from tests.distributed.runs import SMALL

pytestmark = [pytest.mark.distributed, pytest.mark.faults]

ROOT = Path(__file__).resolve().parents[2]
HEARTBEAT_SECONDS = 3.0
ADDRESSES = ("10.213.7.1", "10.213.7.2")
PORT = 29500  # of a namespace that nobody else is in


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@pytest.fixture
def machines():
    """Names of two namespaces with a link between them, each with an address."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    names = [f"hfdist-{os.getpid()}-{end}" for end in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "end-a", "netns", names[0], "type", "veth", "peer", "name", "end-b", "netns", names[1])
        for name, end, address in zip(names, "ab", ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", f"end-{end}")
            ip("-n", name, "link", "set", f"end-{end}", "up")
            ip("-n", name, "link", "set", "lo", "up")
    except subprocess.CalledProcessError as error:
        remove(names)
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    yield names
    remove(names)


def remove(names):
    for name in names:
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True, timeout=20)


def start(folder, name, rank):
    """Each machine has a disk of its own."""
    environment = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": ADDRESSES[0],
                   "MASTER_PORT": str(PORT), "PYTHONPATH": str(ROOT),
                   "GLOO_SOCKET_IFNAME": f"end-{'ab'[rank]}"}  # fmt: skip
    settings = (f"run.dir={folder / name}", "train.max_steps=100000", "data.workers=0", "strategy=ddp")
    return subprocess.Popen(
        ["ip", "netns", "exec", name, sys.executable, str(ROOT / "recipes" / "pretrain.py"), *SMALL, *settings,
         f"watch.heartbeat_seconds={HEARTBEAT_SECONDS}"],
        env=os.environ | environment, cwd=folder, stdout=(folder / f"log-{rank}").open("w"), stderr=subprocess.STDOUT,
    )  # fmt: skip


def test_both_sides_of_a_cut_link_end(tmp_path, cache_dir, machines):
    ranks = [start(tmp_path, name, rank) for rank, name in enumerate(machines)]

    def said():
        return [(tmp_path / f"log-{rank}").read_text() for rank in range(2)]

    try:
        while len(read_lines(tmp_path / machines[0] / METRICS)) < 5:
            assert all(rank.poll() is None for rank in ranks), said()
            time.sleep(0.05)
        began = time.time()
        ip("-n", machines[1], "link", "set", "end-b", "down")
        assert [rank.wait(60) for rank in ranks] == [6, 6], said()
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for rank, name in enumerate(machines):
        (report,) = (tmp_path / name).glob("watch/*/report.txt")
        assert report.stat().st_mtime - began < HEARTBEAT_SECONDS + 5
        line = report.read_text().strip()
        assert f"rank {rank} waits for rank {1 - rank} (on " in line
        assert said()[rank].count(line) == 1
        assert "Traceback" not in said()[rank]
        assert (report.parent / f"rank-{rank:05d}.txt").is_file()
