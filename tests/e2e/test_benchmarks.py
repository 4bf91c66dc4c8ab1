"""Every line of `make bench` runs from end to end at its smallest, and gives rows that can be true."""

import math
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import LINES
from benchmarks.table import read_measures, table

ROOT = Path(__file__).resolve().parents[2]


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


@pytest.mark.e2e
def test_a_line_that_this_machine_cannot_run_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    measures = tmp_path / "measures.json"
    subprocess.run([sys.executable, "-m", "benchmarks.gpu", "--measures", str(measures)], cwd=ROOT, check=True)
    assert read_measures(measures) == "no CUDA device is at hand"
