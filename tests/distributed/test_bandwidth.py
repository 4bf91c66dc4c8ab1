"""`hfdist bandwidth` on two machines whose link has a known speed, and where a rank is missing."""

import json
import multiprocessing
import os
import platform
import socket
import subprocess
import sys

import pytest

from hfdist.config.cli.process_end import stop_everywhere, told_in_one_message
from hfdist.config.hardware import read_hardware
from hfdist.testing import forget_parent
from hfdist.tools.doctor.bandwidth import measure
from hfdist.tools.doctor.bandwidth.figures import ALL, ALL_REDUCE, BETWEEN, IN_MACHINE, KINDS
from hfdist.tools.doctor.bandwidth.measure import Request
from tests.cluster.machines import INTERFACE, NoMachinesError, two_machines

pytestmark = pytest.mark.distributed

LINK_GBS = 0.025
"""10^9 bytes a second: slow, beside what a loaded machine reaches within itself."""
BURST_BYTES = 64_000
"""Bytes that the link lets through at once."""


def be_rank(rank, world_size, machine, address, port, folder, request):
    sys.stdout = sys.stderr = (folder / f"said-{rank}").open("w", buffering=1)
    # All on one machine, each as if it had one alone.
    local_size = 2 if machine is not None else 1
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank % local_size), WORLD_SIZE=str(world_size),
                      LOCAL_WORLD_SIZE=str(local_size), MASTER_ADDR=address, MASTER_PORT=str(port))  # fmt: skip
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    forget_parent()
    code = 0
    try:
        if machine is not None:
            machine.enter()
            platform._uname_cache = None
        with told_in_one_message(stop_everywhere):
            measure.measure_rank(request)
    except SystemExit as ended:
        code = ended.code
    except BaseException as error:
        sys.stderr.write(f"{error!r}\n")
        code = 1
    sys.stdout.flush()
    os._exit(code)


def start(machines, address, folder, request, world_size):
    """Give the exit codes of the ranks, and what rank 0 has said."""
    begin = multiprocessing.get_context("fork").Process
    # Other tests run beside this one.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = (address, port, folder, request)
    ranks = [begin(target=be_rank, args=(n, world_size, of, *arguments)) for n, of in enumerate(machines)]
    for rank in ranks:
        rank.start()
    try:
        for rank in ranks:
            rank.join(120)
        return [rank.exitcode for rank in ranks], (folder / "said-0").read_text()
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def test_each_group_of_two_machines_is_measured_and_the_link_has_its_speed(tmp_path):
    own = tmp_path / "own.yaml"
    request = Request(processes=1, largest_bytes=1 << 20, call_seconds=30, as_json=True, out=own, hardware="t4")
    try:
        with two_machines() as (first, second):
            for machine in (first, second):
                shape = ("tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf", "rate", f"{LINK_GBS * 8e3:.0f}mbit")
                try:
                    machine.run(*shape, "burst", str(BURST_BYTES), "latency", "200ms")
                except (AssertionError, FileNotFoundError, subprocess.CalledProcessError) as error:
                    pytest.skip(f"tc has no tbf here: {error}")
            codes, said = start([first, first, second, second], first.address, tmp_path, request, 4)
    except NoMachinesError as error:
        pytest.skip(str(error))
    assert codes == [0] * 4, said
    found = json.loads(said)
    assert found["backend"] == "gloo"
    assert found["hosts"] == ["nodea", "nodea", "nodeb", "nodeb"]
    places = {(one["group"], one["kind"]) for one in found["figures"]}
    assert places == {(group, kind) for group in (ALL, IN_MACHINE, BETWEEN) for kind in KINDS}
    assert {one["num_ranks"] for one in found["figures"] if one["group"] != ALL} == {2}
    assert all(one["seconds"] > 0 and one["runs_as"].startswith("gloo:") for one in found["figures"])
    between = [one for one in found["figures"] if one["group"] == BETWEEN and one["kind"] == ALL_REDUCE]
    largest = max(between, key=lambda one: one["size_bytes"])
    # A late rank alone would say less.
    assert largest["low_seconds"] > 0.95 * (largest["size_bytes"] - BURST_BYTES) / LINK_GBS / 1e9
    links = found["links"]
    assert links[BETWEEN]["gbs"] == pytest.approx(LINK_GBS, rel=0.3)
    assert links[IN_MACHINE]["gbs"] > 2 * LINK_GBS
    hardware = read_hardware(str(own))
    assert hardware.network_gb_per_second == pytest.approx(links[BETWEEN]["gbs"], rel=1e-3)
    assert hardware.link_gb_per_second == pytest.approx(links[IN_MACHINE]["gbs"], rel=1e-3)


def test_a_rank_that_never_comes_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "JOIN_SECONDS", 3.0)
    monkeypatch.setattr("hfdist.config.cli.process_end.RANK_0_PRINTS_SECONDS", 0)
    request = Request(processes=1, largest_bytes=1 << 10, call_seconds=5, as_json=False)
    codes, said = start([None, None], "127.0.0.1", tmp_path, request, 3)
    assert codes == [7, 7]
    assert "not all ranks have come" in said
    assert "1 never came: 2" in said
