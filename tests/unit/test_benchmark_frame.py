"""What all benchmarks stand on: rounds that interleave, rows that reach the one table, and lines that could not run."""

from __future__ import annotations

import sys

from benchmarks import overlay
from benchmarks import table as frame
from benchmarks.rounds import interleave, medians, medians_or_reasons
from benchmarks.table import Measure, publish, read_measures, read_options, table


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
