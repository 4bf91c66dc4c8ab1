"""The doctor on machines that are really broken, each in its own way: namespaces of one kernel, and a link for each."""

import ctypes
import json
import multiprocessing
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from hfdist.records import versions
from hfdist.testing import forget_parent
from hfdist.tools.doctor import link_speed, ranks, rendezvous
from hfdist.tools.doctor.examine import Request
from hfdist.tools.doctor.ranks import examine_rank
from tests.cluster.machines import ip

pytestmark = pytest.mark.distributed

NUM_MACHINES = 5
PORT = 29500  # of a namespace that nobody else is in
PAIR_SECONDS = 4
NEW_NS, NEW_UTS, NEW_NET = 0x00020000, 0x04000000, 0x40000000
LIBC = ctypes.CDLL(None, use_errno=True)


def address(machine):
    return f"10.213.8.{machine + 1}"


def lose(name, machine):
    """Send what goes to a machine to a station that does not exist: nobody refuses, nobody answers."""
    ip("-n", name, "neigh", "add", address(machine), "lladdr", "02:00:00:00:00:99", "dev", "eth", "nud", "permanent")


def remove(names):
    for name in names:
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True, timeout=20)


def shape(name):
    done = subprocess.run(
        ["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "slow", "root", "tbf", "rate", "400mbit", "burst",
         "256kb", "latency", "50ms"], check=False, capture_output=True, timeout=20,
    )  # fmt: skip
    return done.returncode == 0


@pytest.fixture
def network():
    """Namespaces on one switch. Between the second and the third nothing arrives; to the fourth, the third is slow."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("network namespaces need root and iproute2")
    names = [f"hfdist-{os.getpid()}-{number}" for number in range(NUM_MACHINES)]
    switch = f"hfdist-{os.getpid()}-switch"
    try:
        for name in (*names, switch):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for number, name in enumerate(names):
            ip("link", "add", "eth", "netns", name, "type", "veth", "peer", "name", f"port{number}", "netns", switch)
            ip("-n", switch, "link", "set", f"port{number}", "master", "bridge", "up")
            ip("-n", name, "addr", "add", f"{address(number)}/24", "dev", "eth")
            ip("-n", name, "link", "set", "eth", "up")
        lose(names[1], 2)
        lose(names[2], 1)
        ip("link", "add", "slow", "netns", names[2], "type", "veth", "peer", "name", "slow", "netns", names[3])
        for name in names[2:4]:
            ip("-n", name, "link", "set", "slow", "up")
        ip("-n", names[2], "route", "add", f"{address(3)}/32", "dev", "slow", "src", address(2))
        ip("-n", names[3], "route", "add", f"{address(2)}/32", "dev", "slow", "src", address(3))
        if not all(map(shape, names[2:4])):
            raise subprocess.CalledProcessError(1, "tc", stderr="tc has no tbf")
    except subprocess.CalledProcessError as error:
        remove([*names, switch])
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    yield names
    remove([*names, switch])


def mount(*words):
    subprocess.run(["mount", *map(str, words)], check=True, capture_output=True, timeout=20)


def enter(name, number):
    """Become a machine with a network, a name and mounts of its own."""
    with open(f"/run/netns/{name}") as namespace:
        assert LIBC.setns(namespace.fileno(), NEW_NET) == 0
    assert LIBC.unshare(NEW_NS | NEW_UTS) == 0
    mount("--make-rprivate", "/")
    socket.sethostname(f"node-{number}")
    platform._uname_cache = None


def lead_own_name_to_loopback(number, folder):
    hosts = folder / f"hosts-{number}"
    hosts.write_text(f"127.0.0.1 localhost node-{number}\n")
    mount("--bind", hosts, "/etc/hosts")
    del os.environ["GLOO_SOCKET_IFNAME"]


def break_machine(number, folder, runs):
    """Do what goes wrong on real ones."""
    if number == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        # The kernel has no clock for each namespace.
        link_speed.time = SimpleNamespace(time=lambda: time.time() + 5, monotonic=time.monotonic)
    elif number == 2:
        mount("-t", "tmpfs", "-o", "size=1m", "tmpfs", "/dev/shm")
        lead_own_name_to_loopback(number, folder)
        # With what each launcher says, an interface is chosen.
        os.environ["LOCAL_WORLD_SIZE"] = "1"
    elif number == 3:
        mount("-t", "tmpfs", "-o", "ro", "tmpfs", runs)
        os.environ["OMP_NUM_THREADS"] = "64"
    elif number == 4:
        mount("-t", "tmpfs", "-o", "size=64k", "tmpfs", runs)
        lead_own_name_to_loopback(number, folder)
        about = folder / "transformers-4.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.0\n")
        sys.path.insert(0, str(folder))
        # The process that forks has read them.
        versions._version_of.cache_clear()


def be_rank(rank, name, folder, runs, world_size):
    sys.stdout = sys.stderr = (folder / f"log-{rank}").open("w", buffering=1)
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(world_size), MASTER_ADDR=address(0),
                      MASTER_PORT=str(PORT), GLOO_SOCKET_IFNAME="lo" if name is None else "eth")  # fmt: skip
    forget_parent()
    code = 0
    try:
        if name is not None:
            enter(name, rank)
            break_machine(rank, folder, runs)
        examine_rank(Request(run_dir=runs, processes=1, pair_seconds=PAIR_SECONDS, as_json=rank == 0))
    except SystemExit as ended:
        code = ended.code
    except BaseException as error:
        sys.stderr.write(f"{error!r}\n")
        code = 1
    sys.stdout.flush()
    os._exit(code)


def examine(folder, names, world_size=None):
    """Give the exit code of rank 0, and what it printed."""
    runs = folder / "runs"
    runs.mkdir()
    arguments = (folder, runs, world_size or len(names))
    start = multiprocessing.get_context("fork").Process
    ranks = [start(target=be_rank, args=(rank, name, *arguments)) for rank, name in enumerate(names)]
    for rank in ranks:
        rank.start()
    try:
        for rank in ranks:
            rank.join(100)
        said = [(folder / f"log-{rank}").read_text() for rank in range(len(names))]
        assert [rank.exitcode for rank in ranks[1:]] == [0] * (len(names) - 1), said
        return ranks[0].exitcode, json.loads(said[0])
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


BROKEN = {
    ("open files", "error", "node-1"): "limits.conf",
    ("shared memory", "error", "node-2"): "--shm-size",
    ("threads", "warning", "node-3"): "OMP_NUM_THREADS=",
    ("run.dir", "error", "node-3"): "run.dir=FOLDER",
    ("run.dir", "error", "node-4"): "run.dir=FOLDER",
    ("shared folder", "error", "node-3"): "that all machines share",
    ("host name", "error", "node-4"): "GLOO_SOCKET_IFNAME=eth",
    ("versions", "error", "node-4"): "pip install 'transformers",
    ("same versions", "error", "node-4"): "pip freeze",
}


def test_each_break_is_named_with_what_to_do(tmp_path, network):
    code, found = examine(tmp_path, network)
    assert code == 7
    findings = found["findings"]
    bad = {(one["check"], one["level"], host): one for one in findings for host in one["hosts"] if one["level"] != "ok"}
    for where, hint in BROKEN.items():
        assert hint in bad[where]["hint"], where
    assert "Read-only file system" in bad["run.dir", "error", "node-3"]["text"]
    assert "No space left" in bad["run.dir", "error", "node-4"]["text"]
    # The healthy one is not blamed, and others not for what is another's.
    assert {where[0] for where in bad if where[2] == "node-0"} <= {"memory", "run.dir", "Hub cache"}
    assert {host for check, _, host in bad if check in ("open files", "shared memory", "host name", "versions")} <= {
        "node-1", "node-2", "node-4"}  # fmt: skip
    (chosen,) = [one for one in findings if one["check"] == "host name" and "node-2" in one["hosts"]]
    assert (chosen["level"], chosen["text"].partition(";")[0]) == ("ok", "GLOO_SOCKET_IFNAME=eth")
    dead = [one["text"] for one in findings if one["check"] == "gloo links"]
    assert sorted(text.partition(" cannot")[0] for text in dead) == [
        "ranks 0-4 (on node-0 and node-4)", "ranks 1-2 (on node-1 and node-2)", "ranks 1-4 (on node-1 and node-4)",
        "ranks 2-4 (on node-2 and node-4)", "ranks 3-4 (on node-3 and node-4)"]  # fmt: skip
    slow = [one for one in findings if one["check"] == "gloo between machines" and one["level"] == "warning"]
    # The slowest first; a loaded machine may have others.
    assert slow[0]["text"].startswith("ranks 2-3 (node-2, node-3) reach 0.0")
    assert "ethtool" in slow[0]["hint"]
    clocks = [(one["level"], one["text"]) for one in findings if one["check"] == "clocks"]
    assert clocks == [("warning", "node-1's clock is 5.0 s ahead of node-0's")]
    assert len(found["pairs"]) == 10


def test_a_rank_that_never_comes_is_named_and_the_others_are_tried(tmp_path, monkeypatch):
    for module in (ranks, rendezvous):
        monkeypatch.setattr(module, "JOIN_SECONDS", 3.0)
    monkeypatch.setattr("tests.distributed.test_doctor.address", lambda machine: "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as free:
        monkeypatch.setattr("tests.distributed.test_doctor.PORT", free.getsockname()[1])
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    code, found = examine(tmp_path, [None, None], world_size=3)
    assert code == 7
    (missing,) = [one for one in found["findings"] if one["level"] == "error"]
    assert (missing["check"], missing["text"]) == ("ranks", "1 of 3 never came: 2")
