"""How much a process may use where control groups that it is in, and not the machine, have limits."""

import os

import pytest

from hfdist.cgroup import least_limit
from hfdist.host_cores import usable_cores
from hfdist.host_memory import cgroup_memory

GROUPS = {
    "version 2": ("0::/job\n", {"job/cpu.max": "200000 100000"}, 2),
    "version 2, at the top of a container": ("0::/job\n", {"cpu.max": "300000 100000"}, 3),
    "less than a core": ("0::/job\n", {"job/cpu.max": "20000 100000"}, 1),
    "of a group around it": (
        "0::/job/step\n", {"job/cpu.max": "300000 100000", "job/step/cpu.max": "max 100000"}, 3
    ),
    "no limit": ("0::/job\n", {"job/cpu.max": "max 100000"}, 8),
    "version 1": (
        "4:cpu,cpuacct:/job\n", {"cpu/job/cpu.cfs_quota_us": "400000\n", "cpu/job/cpu.cfs_period_us": "100000\n"}, 4
    ),
    "version 1, no limit": (
        "4:cpu,cpuacct:/job\n", {"cpu/job/cpu.cfs_quota_us": "-1\n", "cpu/job/cpu.cfs_period_us": "100000\n"}, 8
    ),
    "none": ("", {}, 8),
}  # fmt: skip


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Writes the files of groups, and which of them this process is in."""
    monkeypatch.setattr("hfdist.cgroup._ROOT", tmp_path)
    monkeypatch.setattr("hfdist.cgroup._OWN", tmp_path / "own")

    def write(own, files):
        (tmp_path / "own").write_text(own)
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)

    return write


@pytest.mark.parametrize(("own", "files", "cores"), GROUPS.values(), ids=GROUPS)
def test_the_lowest_limit_of_the_groups_counts(groups, monkeypatch, own, files, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    groups(own, files)
    assert usable_cores() == cores


MEMORY = {
    "of a group around it": (
        "0::/job/step/task\n",
        {
            "job/step/task/memory.max": "max",
            "job/step/memory.max": "4000", "job/step/memory.current": "1000",
            "job/memory.max": "9000", "job/memory.current": "8000", "job/memory.stat": "inactive_file 500",
            "job/memory.events": "oom 1\noom_kill 2",
        },
        (9000, 8000, 500, 2),
    ),
    "version 1": (
        "4:memory:/job/step\n",
        {"memory/job/step/memory.limit_in_bytes": f"{2**63 - 4096}", "memory/job/memory.limit_in_bytes": "7000"},
        (7000, 0, 0, 0),
    ),
    "version 1, with cached files of a group in it": (
        "4:memory:/job/step\n",
        {
            "memory/job/memory.limit_in_bytes": "7000", "memory/job/memory.usage_in_bytes": "6900",
            "memory/job/memory.stat": "inactive_file 10\ntotal_inactive_file 6900",
        },
        (7000, 6900, 6900, 0),
    ),
    "no limit": ("0::/job\n", {"job/memory.max": "max"}, None),
}  # fmt: skip


@pytest.mark.parametrize(("own", "files", "found"), MEMORY.values(), ids=MEMORY)
def test_the_group_that_leaves_the_least_memory_counts(groups, own, files, found):
    groups(own, files)
    assert cgroup_memory() == found
    assert cgroup_memory() is None or cgroup_memory().free_bytes in (1500, 7000)


def test_a_limit_of_processes_holds_for_groups_within(groups):
    groups("0::/job/task\n", {"job/task/pids.max": "max", "job/pids.max": "50"})
    assert least_limit("pids", "pids.max") == 50
