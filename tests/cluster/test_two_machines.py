"""Ranks on two machines: they find each other, train as one process does, and end where they cannot connect."""

import os
import time
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist

from hfdist.records import RunFolder, read_lines
from proofs.cluster.elastic import leave_and_come_back
from tests.cluster.machines import INTERFACE
from tests.cluster.runs import RECIPE, SETTINGS, compare, train_alone
from tests.distributed.runs import losses
from tests.e2e.forked import end, run_script, start_forked

pytestmark = [pytest.mark.distributed, pytest.mark.e2e, pytest.mark.timeout(180)]

HEARTBEAT_SECONDS = 3.0
PORT = "29500"
ON_THE_LINK = {"GLOO_SOCKET_IFNAME": INTERFACE}


def on(machine, run, *arguments):
    machine.enter()
    run(*arguments)


class Ranks:
    """One on each machine, by hand instead of a launcher; each machine has a disk of its own if `folders` are two."""

    def __init__(self, machines, cwd, run, *arguments, folders=("run", "run"), **environment):
        self.logs = [cwd / f"log-{machine.name}" for machine in machines]
        for log in self.logs:
            log.unlink(missing_ok=True)
        # As torchrun does. By its name: the first machine itself reaches that by its loopback.
        place = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": machines[0].name,
                 "MASTER_PORT": PORT}  # fmt: skip
        self.processes = []
        for rank, (machine, log, folder) in enumerate(zip(machines, self.logs, folders, strict=True)):
            more = (f"run.dir={cwd / folder}",) if run is run_script else ()
            said = (log, log)
            variables = place | environment | {"RANK": str(rank)}
            self.processes.append(start_forked(on, machine, run, *arguments, *more, cwd=cwd, said=said, **variables))

    @property
    def said(self):
        return [log.read_text() for log in self.logs]

    def end(self, timeout_seconds=60):
        return [end(process, timeout_seconds) for process in self.processes]

    def end_of_first(self, timeout_seconds=60):
        """Exit code of whoever ends first, and what it has said; the other is killed."""
        deadline = time.monotonic() + timeout_seconds
        while all(process.is_alive() for process in self.processes):
            assert time.monotonic() < deadline, self.said
            time.sleep(0.05)
        codes = self.end(timeout_seconds=0.5)
        first = next(number for number, code in enumerate(codes) if code is not None)
        return codes[first], self.said[first], codes[1 - first]


def test_training_on_two_machines_is_that_on_one(tmp_path, cache_dir, machines):
    ranks = Ranks(machines, tmp_path, run_script, RECIPE, *SETTINGS, **ON_THE_LINK)
    assert ranks.end() == [0, 0], ranks.said
    alone = train_alone(tmp_path / "alone")
    assert len(losses(alone)) == 20
    difference = compare(tmp_path / "run", alone)
    assert difference.losses < 1e-5
    assert difference.weights < 1e-4


def test_the_interface_is_chosen_where_a_host_name_leads_to_loopback(tmp_path, cache_dir, machines):
    ranks = Ranks(machines, tmp_path, run_script, RECIPE, *SETTINGS, "train.max_steps=3")
    assert ranks.end() == [0, 0], ranks.said
    chosen = f"gloo connects by {INTERFACE}, as the name of this machine leads to 127.0.1.1"
    assert ranks.said[0].count(chosen) == 1, ranks.said


def test_an_interface_that_is_not_there_is_refused(tmp_path, cache_dir, machines):
    ranks = Ranks(machines, tmp_path, run_script, RECIPE, *SETTINGS, GLOO_SOCKET_IFNAME="eth9")
    assert ranks.end() == [2, 2], ranks.said
    assert "found:   eth9, on nodea" in ranks.said[0]
    assert f"allowed: {INTERFACE}" in ranks.said[0]
    assert "Traceback" not in ranks.said[0]


def start_group():
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))


def test_at_a_wrong_interface_one_rank_fails_and_the_other_waits(tmp_path, cache_dir, machines):
    """What gloo itself does with such a host name; and what a run says that is given a wrong interface."""
    code, said, other = Ranks(machines, tmp_path, start_group).end_of_first()
    assert (code, other) == (1, None)
    assert "connectFullMesh" in said
    loopback = Ranks(machines, tmp_path, run_script, RECIPE, *SETTINGS, GLOO_SOCKET_IFNAME="lo")
    code, said, other = loopback.end_of_first()
    assert (code, other) == (6, None), said
    assert "Peer lost: this rank cannot connect to the others" in said
    assert "Traceback" not in said


def test_both_sides_of_a_cut_link_end(tmp_path, cache_dir, machines):
    """Each machine has a disk of its own."""
    settings = (*SETTINGS, "train.max_steps=100000", "checkpoint=none", f"watch.heartbeat_seconds={HEARTBEAT_SECONDS}")
    names = [machine.name for machine in machines]
    ranks = Ranks(machines, tmp_path, run_script, RECIPE, *settings, folders=names, **ON_THE_LINK)
    while len(read_lines(RunFolder(tmp_path / names[0]).metrics)) < 5:
        assert all(process.is_alive() for process in ranks.processes), ranks.said
        time.sleep(0.05)
    began = time.time()
    machines[1].set_link(up=False)
    assert ranks.end() == [6, 6], ranks.said
    for rank, name in enumerate(names):
        (report,) = (tmp_path / name).glob("watch/*/report.txt")
        assert report.stat().st_mtime - began < HEARTBEAT_SECONDS + 5
        line = report.read_text().strip()
        assert f"rank {rank} waits for rank {1 - rank} (on " in line
        assert ranks.said[rank].count(line) == 1
        assert "Traceback" not in ranks.said[rank]
        assert (report.parent / f"rank-{rank:05d}.txt").is_file()


def _runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_machines_leave_nothing_behind(machines):
    """Where a process is killed, its children go as well: nothing of a machine runs on."""
    process = machines[0].start(["sh", "-c", "sleep 1000 & setsid sleep 1000 & wait"], machines[0].hosts.parent / "log")
    while len(machines[0].pids()) < 3:
        time.sleep(0.01)
    pids = machines[0].pids()
    machines[0].kill_all()
    process.wait()
    deadline = time.monotonic() + 10
    # A kill takes a moment.
    while running := [pid for pid in pids if _runs(pid)]:
        assert time.monotonic() < deadline, running
        time.sleep(0.01)
    assert os.uname().nodename != machines[0].name


@pytest.mark.many
@pytest.mark.timeout(480)
def test_a_machine_that_leaves_and_comes_back_leaves_no_trace(tmp_path, cache_dir, machines, monkeypatch):
    story = leave_and_come_back(machines, tmp_path, monkeypatch)
    story.check((2, 6), (1, 75), (2, 0))
