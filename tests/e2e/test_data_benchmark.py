"""The benchmark of the readers runs from end to end: hfdist and `datasets`, on a tiny corpus."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.e2e
@pytest.mark.many
def test_the_quick_mode_measures_and_resumes(tmp_path):
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
