"""Every line of `make bench` runs from end to end at its smallest, and gives rows that can be true."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import LINES
from benchmarks.table import Measure, read_measures, table

ROOT = Path(__file__).resolve().parents[2]


def check_loop(rows: dict[str, Measure]) -> None:
    # It ends with an error if a loss of one differs from the bare loop's.
    assert set(rows) == {"CPU time of a step, 1 micro batch", "CPU time of a step, 8 micro batches"}


def check_packing(rows: dict[str, Measure]) -> None:
    filled, cut, speed = list(rows.values())[:3]
    assert 99 < filled.ours < 100
    assert cut.ours == 0
    assert int(cut.peers["group_texts"]) > 0
    assert 0 < speed.peers["group_texts"] < speed.ours < speed.limits["bare copies"]


def check_growth(rows: dict[str, Measure]) -> None:
    for layout in ("ddp", "zero2", "pipeline"):
        assert rows[f"bytes that a rank sends in a step, {layout}, 2 ranks"].is_met
        assert rows[f"weights and optimizer on a rank, {layout}, 2 ranks"].is_met
    assert any(what.startswith("exponent: CPU time of the start") for what in rows)
    assert any(what.startswith("exponent: cursor") for what in rows)


CHECKS = {"loop": check_loop, "packing": check_packing, "growth": check_growth}


@pytest.mark.e2e
@pytest.mark.many
@pytest.mark.parametrize("name", [module.removeprefix("benchmarks.") for module in LINES.values()])
def test_a_line_gives_its_rows(tmp_path, name):
    measures = tmp_path / "measures.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--measures", str(measures)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_measures(measures)
    assert not isinstance(rows, str), rows
    assert rows
    for row in rows:
        others = [*row.peers.values(), *row.limits.values()]
        figures = [row.ours, *(value for value in others if not isinstance(value, str))]
        may_fall = row.what.startswith("exponent")
        assert all(math.isfinite(figure) and (figure >= 0 or may_fall) for figure in figures), row
    assert table({name: rows}).count("\n") == 1 + len(rows)
    CHECKS.get(name, lambda rows: None)({row.what: row for row in rows})


@pytest.mark.e2e
def test_a_line_that_this_machine_cannot_run_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    measures = tmp_path / "measures.json"
    subprocess.run([sys.executable, "-m", "benchmarks.gpu", "--measures", str(measures)], cwd=ROOT, check=True)
    assert read_measures(measures) == "no CUDA device is at hand"


@pytest.mark.e2e
@pytest.mark.many
def test_the_readers_are_measured_and_resume(tmp_path):
    command = [sys.executable, "-m", "benchmarks.data", "--quick", "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith(("| hf", "| data"))]
    assert [(row[0], row[1]) for row in rows] == [
        ("hfdist", "cold token cache"),
        ("hfdist", "token files"),
        ("datasets", "shuffle buffer"),
    ]
    for row in rows:
        figures = [float(re.fullmatch(r"([\d.]+) \([\d.]+x\)", cell)[1]) for cell in row[3:-1]]
        assert len(figures) == 6
        assert all(figure > 0 for figure in figures)
        assert row[-1] == "yes"
    assert not any(tmp_path.iterdir())
