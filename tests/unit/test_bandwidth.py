"""What `hfdist bandwidth` makes of times: NCCL's definitions, the link of a plan, the table; and its command line."""

import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from hfdist import sent_bytes
from hfdist.config.hardware import CPU, read_hardware
from hfdist.config.train import TrainConfig
from hfdist.planning.costs import AxisTraffic, OpCosts, RankCosts
from hfdist.planning.timing.calibration import Factors
from hfdist.planning.timing.step_time import step_time
from hfdist.tools.doctor.bandwidth.command import main
from hfdist.tools.doctor.bandwidth.figures import (
    ALL,
    ALL_REDUCE,
    ALL_TO_ALL,
    BETWEEN,
    IN_MACHINE,
    KINDS,
    Figure,
    Link,
    describe_seconds,
    describe_size,
    fit_link,
    read_size,
    slowest,
    table,
)
from hfdist.tools.doctor.bandwidth.hardware_file import write_hardware
from hfdist.tools.doctor.bandwidth.measure import RankGroup, groups_of, have_measured
from hfdist.tools.doctor.rendezvous import Rendezvous
from hfdist.topology import read_launcher
from tests.unit.planning.layouts import make_layout


def figure(kind=ALL_REDUCE, size=1 << 20, seconds=1e-3, **more):
    known = {"group": IN_MACHINE, "num_ranks": 4, "low_seconds": seconds, "high_seconds": seconds, "cpu_seconds": 0.0}
    return Figure(kind=kind, size_bytes=size, seconds=seconds, **known | more)


def test_bandwidths_are_those_of_nccls_tests():
    # 10^9 bytes in a second, 4 ranks: doc/PERFORMANCE.md of nccl-tests.
    factors = (2 * 3 / 4, 3 / 4, 3 / 4, 3 / 4, 1, 1)
    for kind, factor in zip(KINDS, factors, strict=True):
        one = figure(kind, 10**9, 1.0)
        assert (one.algorithm_gbs, one.bus_gbs) == pytest.approx((1.0, factor)), kind


@pytest.mark.parametrize("group", [IN_MACHINE, BETWEEN])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("num_ranks", [2, 6, 8])
def test_the_link_is_found_again_in_what_a_plan_counts(num_ranks, backend, group):
    gbs, latency = 12.5, 20e-6
    hardware = replace(
        read_hardware("h100_80gb"),
        name=CPU if backend == "gloo" else "gpu",
        link_gb_per_second=gbs,
        network_gb_per_second=gbs,
        link_latency_us=latency * 1e6,
        network_latency_us=latency * 1e6,
    )
    train, plain = TrainConfig(), Factors(compute=1.0, memory=1.0, kernels=1.0, link=1.0, spread=1.0)

    def planned(size):
        traffic = AxisTraffic(
            axis="data",
            kind=sent_bytes.ALL_REDUCE,
            size=num_ranks,
            calls=1,
            sent_bytes=2 * (num_ranks - 1) / num_ranks * size,
            crosses_machines=group == BETWEEN,
            machine_ranks=num_ranks if group == IN_MACHINE else 1,
        )
        costs = RankCosts(stages=(), optimizer=OpCosts(), traffic=(traffic,))
        return step_time(costs, make_layout(num_ranks, train), hardware, train, plain).seconds

    figures = [
        figure(size=size, seconds=planned(size), num_ranks=num_ranks, group=group, runs_as=f"{backend}:all_reduce")
        for size in (1 << 10, 1 << 16, 1 << 22, 1 << 26)
    ]
    noise = [figure(ALL_TO_ALL, 1 << 10, 5.0, group=group), figure(size=1 << 12, seconds=9.0, group=ALL)]
    assert fit_link([*figures, *noise], group) == pytest.approx(Link(gbs, latency))
    assert fit_link(figures[:1], group) is None
    assert fit_link(figures[:2], group) is None, "small ones say nothing"


@pytest.mark.parametrize("seconds", [(1e-3, 1e-3), (1e-3, 9e-4), (1e-9, 1.0)])
def test_noise_gives_no_link_below_zero(seconds):
    link = fit_link([figure(size=s, seconds=t) for s, t in zip((1 << 10, 1 << 26), seconds, strict=True)], IN_MACHINE)
    assert link.gbs > 0
    assert link.latency_seconds >= 0


def test_neither_a_disturbed_round_nor_a_size_between_makes_the_link():
    # A shaped link lets small calls through at once; other work on the machine makes most rounds of any call longer.
    times = {1 << 10: (3e-4, 5e-4), 1 << 14: (3e-4, 4e-4), 1 << 18: (11e-3, 18.5e-3), 1 << 20: (42e-3, 50e-3)}
    figures = [figure(size=size, seconds=usual, low_seconds=low, num_ranks=2) for size, (low, usual) in times.items()]
    assert fit_link(figures, IN_MACHINE).gbs == pytest.approx(0.025, rel=0.02)


def test_the_slowest_rank_and_machine_count():
    quick, slow = figure(seconds=1e-3, cpu_seconds=2e-3), figure(seconds=3e-3, cpu_seconds=4e-3)
    between = figure(seconds=9e-3, group=BETWEEN)
    assert slowest([between, quick, slow]) == [figure(seconds=3e-3, cpu_seconds=3e-3), between]


def test_groups_are_of_all_within_and_between_machines():
    assert groups_of({0: "a", 1: "a", 2: "a"}) == [(IN_MACHINE, [0, 1, 2])]
    assert groups_of({0: "a", 1: "b", 2: "c"}) == [(BETWEEN, [0, 1, 2])]
    assert groups_of({0: "a", 1: "a", 2: "b", 3: "b", 4: "c"}) == [
        (ALL, [0, 1, 2, 3, 4]), (IN_MACHINE, [0, 1]), (IN_MACHINE, [2, 3]), (BETWEEN, [0, 2, 4])]  # fmt: skip


def test_a_group_waits_for_ranks_that_are_busy_in_an_earlier_one(monkeypatch):
    """Rank 0 has a machine alone; rank 1 first measures its own machine, beside rank 2."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    place = read_launcher()
    first, second = (Rendezvous(replace(place, rank=rank, world_size=3)) for rank in range(2))
    groups, between = [RankGroup(ALL, [0, 1, 2]), RankGroup(IN_MACHINE, [1, 2])], [0, 1]
    first.tell("measured-0", True)
    second.tell("measured-0", True)
    assert have_measured(first, groups[:1], between)
    assert not have_measured(first, groups, between, seconds=0.1)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(have_measured, first, groups, between)
        with pytest.raises(TimeoutError):
            waiting.result(0.2)
        second.tell("measured-1", True)
        assert waiting.result(30)
    second.tell("measured-1", False)
    assert not have_measured(first, groups, between), "it would wait for a rank that does not come"


def test_columns_of_the_table_stand_below_each_other():
    figures = [figure(kind, size) for kind in KINDS for size in (1 << 10, 1 << 26)]
    lines = list(table(slowest([*figures, figure(group=BETWEEN, num_ranks=2, runs_as="gloo:all_reduce")])))
    assert lines[0] == "in a machine: 4 ranks"
    assert lines[2] == "all-reduce       1 KiB  1 ms           0.001     0.002  0 us"
    assert lines[3].index("64 MiB") + len("64 MiB") == lines[2].index("1 KiB") + len("1 KiB")
    assert lines[-2].endswith("gloo:all_reduce")


def test_sizes_and_times_in_words():
    texts = ("1 KiB", "64 MiB", "1.5 GiB", "12 B")
    assert [describe_size(size) for size in (1 << 10, 1 << 26, 3 << 29, 12)] == [*texts]
    assert [read_size(text) for text in ("1KiB", "64mib", "2 GiB", "77", "1.5MiB", "MiB", "x", "-1", "9" * 5000)] == [
        1 << 10, 1 << 26, 1 << 31, 77, None, None, None, None, None]  # fmt: skip
    assert [describe_seconds(value) for value in (2.5, 0.0421, 83e-6)] == ["2.5 s", "42.1 ms", "83 us"]


def test_a_plan_reads_the_file_with_the_measured_links(tmp_path):
    path = tmp_path / "deep" / "own.yaml"
    links = {IN_MACHINE: Link(201.5, 7e-6), BETWEEN: Link(11.25, 31e-6)}
    write_hardware(path, "h100_80gb", links, processes=8, is_cpu=False)
    found, known = read_hardware(str(path)), read_hardware("h100_80gb")
    assert found.link(crosses_machines=False) == pytest.approx((201.5e9, 7e-6))
    assert found.link(crosses_machines=True) == pytest.approx((11.25e9, 31e-6))
    assert (found.tflops, found.memory_gib, found.devices) == (known.tflops, known.memory_gib, known.devices)
    assert not found.is_cpu
    write_hardware(path, "h100_80gb", {}, processes=2, is_cpu=True)
    assert read_hardware(str(path)).is_cpu
    assert read_hardware(str(path)).network_gb_per_second == known.network_gb_per_second


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["proceses=2"], ("proceses", "processes=2")),
        (["processes=1"], ("nobody to send to", "try:     processes=2")),
        # With one GPU, two ranks have no GPU of their own.
        ([], ("nobody to send to", "try:     CUDA_VISIBLE_DEVICES= hfdist bandwidth processes=2")),
        (["largest=64MB"], ("64MB", "64MiB")),
        (["largest=12"], ("12", "1KiB")),
        (["out=own.json"], ("own.json", "out=own.yaml")),
        (["out=~/own.json"], (f"out={Path.home()}/own.yaml",)),
        (["picture=own.svg"], ("picture", "out=FILE.yaml")),
        (["out=own.yaml", "largest=16KiB"], ("16KiB", "largest=1MiB")),
        (["hardware=h100_80gb"], ("no file", "out=h100_80gb_measured.yaml")),
        (["hardware=h100", "out=own.yaml"], ("h100", "h100_")),
        (["call_seconds=0"], ("call_seconds", "call_seconds=2")),
        (["call_seconds=99999999999999"], ("call_seconds", "at most 86400")),
    ],
)
def test_a_mistake_is_said_before_ranks_are_started(arguments, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["hfdist bandwidth", *arguments])
    monkeypatch.setattr("hfdist.config.cli.process_end.RANK_0_PRINTS_SECONDS", 0)
    monkeypatch.setattr("hfdist.launch.launch.count_gpus", lambda: int(not arguments))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words), said


def test_sizes_grow_to_the_largest():
    from hfdist.tools.doctor.bandwidth.collectives import sizes_up_to

    sizes = sizes_up_to(64 << 20)
    assert sizes == [1 << 10, 1 << 14, 1 << 18, 1 << 22, 64 << 20]
    assert sizes_up_to(1 << 10) == [1 << 10]
    assert all(a < b for a, b in pairwise(sizes_up_to(3 << 20)))
