"""What the doctor makes of what it has measured or read, and its command line."""

import json
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from hfdist.errors import ConfigError, ResourceError
from hfdist.host_memory import CgroupMemory
from hfdist.launch.gloo_interface import address_of_own_name
from hfdist.tools.doctor import machine, software, storage
from hfdist.tools.doctor.command import main, parse_request
from hfdist.tools.doctor.finding import Finding, Level, finding_lines
from hfdist.tools.doctor.link_speed import offset_seconds
from hfdist.tools.doctor.links import gloo_address
from hfdist.tools.doctor.pairs import Pair, judge_clocks, judge_pairs, rounds
from hfdist.tools.doctor.rendezvous import Rendezvous
from hfdist.tools.doctor.shared_folder import check_same_folder
from hfdist.topology import read_launcher

GPUS = """\
0, NVIDIA H100 80GB HBM3, 570.86.15, 81559, 4, 0x0000000000000000, 34
1, NVIDIA H100 80GB HBM3, 570.86.15, 81559, 40211, 0x0000000000000048, 91
"""
BANNER = "| NVIDIA-SMI 570.86.15    Driver Version: 570.86.15    CUDA Version: 12.8     |"
TOPOLOGY = """\
\tGPU0\tGPU1\tGPU2\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV18\tSYS\t0-15\t0
GPU1\tNV18\t X \tSYS\t0-15\t0
GPU2\tSYS\tSYS\t X \t16-31\t1

Legend:
"""


@pytest.mark.parametrize("number", [2, 3, 5, 8])
def test_each_pair_is_tried_once_and_no_rank_twice_at_a_time(number):
    divided = rounds(range(10, 10 + number))
    assert sorted(pair for pairs in divided for pair in pairs) == [
        (a, b) for a in range(10, 10 + number) for b in range(a + 1, 10 + number)
    ]
    for pairs in divided:
        assert len({rank for pair in pairs for rank in pair}) == 2 * len(pairs)


def pair(a, b, gbs, **more):
    speeds = {"1": gbs, "16": gbs}
    hosts = (f"node-{a}", f"node-{b}")
    return Pair(
        ranks=(a, b), hosts=hosts, backend="gloo", gbs=speeds, all_reduce_gbs=speeds, latency_seconds=1e-5, **more
    )


def test_a_pair_below_half_the_median_is_named():
    pairs = [pair(0, 1, 1.0), pair(0, 2, 0.51), pair(1, 2, 0.49)]
    assert [one.level for one in judge_pairs(pairs, {})] == ["ok"]
    pairs.append(pair(1, 3, 1.1))
    slow = [one.text for one in judge_pairs(pairs, {}) if one.level == "warning"]
    assert [text.partition(" (")[0] for text in slow] == []
    pairs += [pair(0, 3, 1.0), pair(2, 3, 0.2)]
    slow = [one.text for one in judge_pairs(pairs, {}) if one.level == "warning"]
    assert [text.partition(" (")[0] for text in slow] == ["ranks 2-3"]


def test_the_address_that_gloo_tells_may_be_one_of_ipv6(monkeypatch):
    known = {"eth7": [SimpleNamespace(family=socket.AF_INET6, address="2001:db8::7")]}
    monkeypatch.setattr("psutil.net_if_addrs", lambda: known)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert gloo_address() == "2001:db8::7"


def test_links_are_compared_with_what_the_interface_is_made_for():
    (found,) = judge_pairs([pair(0, 1, 0.3)], {"node-0": 3.1, "node-1": 12.5})
    assert found.level == "warning"
    assert "expected: 0.50, half of what one stream fills of 3.10" in found.text
    (found,) = judge_pairs([pair(0, 1, 0.1)], {"node-0": 0.125, "node-1": 12.5})
    assert found.level == "ok"


def test_an_interface_that_is_not_there_is_an_error_and_an_empty_variable_names_none(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    assert machine.check_name(1).level is not Level.error
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,nosuch0")
    assert machine.check_name(1).level is Level.error


def test_a_host_name_that_no_resolver_takes_is_a_finding(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    # Linux takes 64 characters, and a part of a name in DNS has 63 at most.
    monkeypatch.setattr("platform.node", lambda: "a" * 64)
    monkeypatch.setattr("socket.gethostname", lambda: "a" * 64)
    assert "has no address" in machine.check_name(1).text
    assert address_of_own_name() == "127.0.0.1"


def test_a_shared_folder_whose_disk_fails_is_not_the_same_folder(tmp_path):
    # A name that is too long stands for a disk that answers with an error.
    (found,) = check_same_folder(tmp_path, "m" * 300, "node-b", "node-a")
    assert found.level is Level.error


def test_a_clock_that_is_off_is_named_with_its_direction():
    others = [pair(0, 2, 1.0, offset_seconds=0.2), pair(1, 2, 1.0, offset_seconds=3.2)]
    behind = judge_clocks([pair(0, 1, 1.0, offset_seconds=-3.0), *others])
    assert [(one.level, one.text) for one in behind] == [("warning", "node-1's clock is 3.0 s behind node-0's")]
    assert judge_clocks([pair(0, 1, 1.0, offset_seconds=0.9)])[0].level == "ok"
    assert offset_seconds(100.0, 103.5, 101.0) == 3.0


def test_gpus_that_are_slowed_or_in_use_are_named():
    found = software.read_gpus(GPUS)
    assert found[0].text == "2: NVIDIA H100 80GB HBM3 with 81559 MiB, driver 570.86.15"
    assert [(one.check, one.level) for one in found[1:]] == [("GPU memory", "warning"), ("GPU clocks", "warning")]
    assert "GPU 1 is slowed: hardware slowdown, thermal, by hardware, at 91 C" in found[2].text
    assert software.read_links(TOPOLOGY).text == "1 pairs by NV18, 2 pairs by SYS"


@pytest.mark.parametrize(
    ("built_for", "banner", "level"),
    [("12.9", BANNER, "ok"), ("13.0", BANNER, "error"), (None, BANNER, "error"), ("13.0", "", "ok")],
)
def test_torch_is_compared_with_the_driver(built_for, banner, level):
    assert software.check_cuda(built_for, banner).level == level


@pytest.mark.parametrize(("threads", "ranks", "level"), [(1, 16, "ok"), (4, 2, "ok"), (4, 3, "warning")])
def test_threads_of_ranks_share_the_cores(threads, ranks, level):
    assert machine.check_threads(threads, 8, ranks).level == level


def test_cached_files_of_a_cgroup_count_as_free(monkeypatch):
    group = CgroupMemory(limit_bytes=8 << 30, used_bytes=(8 << 30) - 1, inactive_file_bytes=7 << 30, kills=0)
    monkeypatch.setattr(machine, "cgroup_memory", lambda: group)
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: SimpleNamespace(total=64 << 30, available=32 << 30))
    found = machine._check_memory()
    assert (found.level, found.text) == ("ok", "a cgroup gives 8.0 GiB of 64.0 GiB, 7.0 GiB free")


def test_a_hub_that_is_not_reached_is_a_warning_and_a_token_is_not_shown(monkeypatch):
    from huggingface_hub import constants

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    token = "hf_" + "aB3" * 12
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("HF_TOKEN", token)
    found = storage.check_hub()
    assert found.level == "warning"
    assert "HF_HUB_OFFLINE=1" in found.hint
    assert token not in str(found)


@pytest.mark.parametrize("port", ["70000", "-1", "x"])
def test_a_port_that_is_none_is_one_message(monkeypatch, port):
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(ResourceError, match="rank 0 does not reach the store"):
        Rendezvous(read_launcher())


def test_hosts_that_found_the_same_share_a_line_and_errors_come_first():
    same = [Finding("Hub", "ok", "it answers", None, host) for host in ("a", "b")]
    bad = Finding("memory", "error", "none", "buy some", "b")
    assert list(finding_lines([*same, bad], 2)) == [
        "error    memory  b: none; try: buy some",
        "ok       Hub     it answers",
        "1 error, 0 warnings, 2 ok",
    ]


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["procesess=2"], "processes=2"),
        (["processes=none"], "processes=2"),
        (["json=maybe"], "json="),
        (["pair_seconds=99999999999999"], "at most 86400"),
        (["2"], "--help"),
    ],
)
def test_a_wrong_argument_is_one_message(arguments, hint):
    with pytest.raises(ConfigError) as caught:
        parse_request(arguments)
    assert hint in str(caught.value)


def test_one_process_needs_no_torch_and_tells_tools_the_same(tmp_path):
    code = "import sys; from hfdist.tools.doctor.command import main; main(); assert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code, "processes=1", "--json", "--offline", f"run.dir={tmp_path}"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert found["exit_code"] == done.returncode, done.stderr
    assert {"versions", "memory", "shared memory", "open files", "run.dir", "Hub"} <= {
        one["check"] for one in found["findings"]}  # fmt: skip
    assert all(one["hint"] for one in found["findings"] if one["level"] != "ok")


def test_the_command_prints_its_help(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["hfdist doctor", "--help"])
    main()
    assert "Exit codes: 0 no error, 2 a wrong argument, 7 an error." in capsys.readouterr().out
