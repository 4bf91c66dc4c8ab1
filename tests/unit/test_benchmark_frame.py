"""What all benchmarks stand on: rounds that interleave, rows that reach the one table, and lines that could not run."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks import __main__ as everything
from benchmarks import overlay
from benchmarks import table as frame
from benchmarks.data.readers import Reader
from benchmarks.rounds import cpu_seconds_of, interleave, medians, medians_or_reasons
from benchmarks.table import Measure, publish, read_measures, read_options, table, write_section


def test_each_contender_follows_each_and_warming_up_does_not_count():
    calls = []

    def contender(name):
        def run():
            calls.append(name)
            return float(len(calls))

        return run

    figures = interleave({name: contender(name) for name in "abc"}, 2)

    assert "".join(calls) == "abcbcacab"
    assert figures == {"a": [6.0, 8.0], "b": [4.0, 9.0], "c": [5.0, 7.0]}
    assert medians(figures) == {"a": 7.0, "b": 6.5, "c": 6.0}


def test_a_contender_that_fails_in_a_turn_is_a_reason_and_the_others_go_on():
    turns = iter([1.0, 2.0, overlay.UnavailableError("it has died"), 4.0])

    def failing():
        figure = next(turns)
        if isinstance(figure, Exception):
            raise figure
        return figure

    found = medians_or_reasons({"failing": failing, "steady": lambda: 3.0}, 3)

    assert found == {"failing": "it has died", "steady": 3.0}
    assert next(turns) == 4.0


def test_a_reader_that_dies_before_it_is_ready_says_why(tmp_path):
    reader = Reader("absent:Tokens", {}, tmp_path, tmp_path / "log", {})
    try:
        with pytest.raises(overlay.UnavailableError, match=r"No module named 'benchmarks\.data\.absent'"):
            reader.wait()
    finally:
        reader.end()


def test_versions_of_peers_are_those_that_are_pinned(tmp_path, monkeypatch):
    (tmp_path / "some.txt").write_text("one-peer==1.2.3\nother==4.5\n")
    monkeypatch.setattr(overlay, "_PINS", tmp_path)

    assert overlay.pinned("some", "other", "one-peer") == ["other 4.5", "one-peer 1.2.3"]


def test_rows_reach_the_table_with_their_ratios_and_reasons(tmp_path, capsys, monkeypatch):
    measure = Measure(
        what="time of a | step",
        unit="ms",
        ours=3.0,
        peers={"slow": 6.0, "absent": "not installed"},
        limits={"copy": 2.0},
        goal="at most 2x",
        is_met=True,
        date="2026-11-22",
    )
    file = tmp_path / "measures.json"
    monkeypatch.setattr(sys, "argv", ["name", "--measures", str(file)])
    options = read_options("name", "A benchmark.")

    publish(options, "name", "## Section", [measure])
    row, failed = table({"loop": read_measures(file), "gpu": "no CUDA\ndevice"}).splitlines()[2:]

    assert capsys.readouterr().out == "## Section\n"
    assert row == (
        "| loop | time of a / step | 3 ms | 0.5x slow (6); absent: not installed | 1.5x copy (2) | at most 2x | yes "
        "| 2026-11-22 |"
    )
    assert failed == "| gpu | not run: no CUDA device | - | - | - | - | - | - |"


def test_a_line_that_cannot_run_here_keeps_what_was_measured_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(frame, "MEASURED", tmp_path)
    measure = Measure(what="speed", unit="tokens/s", ours=3.0)

    assert frame.remember("gpu", "no CUDA device") == "no CUDA device"
    assert frame.remember("gpu", [measure]) == [measure]
    assert frame.remember("gpu", "no CUDA device") == [measure]


def test_a_section_takes_the_place_of_the_one_before(tmp_path):
    page = tmp_path / "page.md"
    write_section(page, "one", "first")
    write_section(page, "two", "other")
    write_section(page, "one", "again")

    assert page.read_text().split() == [
        *("#", "Benchmarks", "<!--", "one:", "begin", "-->", "again", "<!--", "one:", "end", "-->"),
        *("<!--", "two:", "begin", "-->", "other", "<!--", "two:", "end", "-->"),
    ]


def test_cpu_seconds_of_children_count():
    counting = [sys.executable, "-c", "for _ in range(3_000_000): pass"]

    assert cpu_seconds_of(lambda: subprocess.run(counting, check=True)) > 0.02


def test_a_peer_that_cannot_be_installed_says_why(tmp_path, monkeypatch):
    (tmp_path / "absent.txt").write_text("hfdist-no-such-package==1.0\n")
    monkeypatch.setattr(overlay, "_PINS", tmp_path)
    monkeypatch.setattr(overlay, "_FOLDER", tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")

    with pytest.raises(overlay.UnavailableError, match=r"absent\.txt.*hfdist-no-such-package"):
        overlay.peer_environment("absent")


def test_a_line_that_fails_is_told_and_the_others_run(monkeypatch, capsys):
    monkeypatch.setattr(everything, "LINES", {"absent": "benchmarks.absent", "gpu": "benchmarks.gpu"})
    monkeypatch.setattr(sys, "argv", ["benchmarks"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    with pytest.raises(SystemExit, match="failed: absent"):
        everything.main()

    absent, gpu = capsys.readouterr().out.splitlines()[-2:]
    assert "No module named benchmarks.absent" in absent
    assert gpu.startswith("| gpu | not run: no CUDA device is at hand |")
