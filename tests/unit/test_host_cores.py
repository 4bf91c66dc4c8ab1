"""How many cores a process may use where its own control group, and not the machine's, has a limit."""

import os

import pytest

from hfdist.host_cores import usable_cores

GROUPS = {
    "version 2": ("0::/job\n", {"job/cpu.max": "200000 100000"}, 2),
    "version 2, at the top of a container": ("0::/job\n", {"cpu.max": "300000 100000"}, 3),
    "less than a core": ("0::/job\n", {"job/cpu.max": "20000 100000"}, 1),
    "no limit": ("0::/job\n", {"job/cpu.max": "max 100000"}, 8),
    "version 1": (
        "4:cpu,cpuacct:/job\n", {"cpu/job/cpu.cfs_quota_us": "400000\n", "cpu/job/cpu.cfs_period_us": "100000\n"}, 4
    ),
    "version 1, no limit": (
        "4:cpu,cpuacct:/job\n", {"cpu/job/cpu.cfs_quota_us": "-1\n", "cpu/job/cpu.cfs_period_us": "100000\n"}, 8
    ),
    "none": ("", {}, 8),
}  # fmt: skip


@pytest.mark.parametrize(("own", "files", "cores"), GROUPS.values(), ids=GROUPS)
def test_the_limit_of_the_own_group_counts(tmp_path, monkeypatch, own, files, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr("hfdist.cgroup._ROOT", tmp_path)
    monkeypatch.setattr("hfdist.cgroup._OWN", tmp_path / "own")
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_cores() == cores
