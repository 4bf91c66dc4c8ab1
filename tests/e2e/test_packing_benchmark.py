"""The benchmark of packing runs from end to end, on few documents."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.e2e
@pytest.mark.many
def test_the_quick_mode_counts_and_times(tmp_path):
    measures = tmp_path / "measures.json"
    command = [sys.executable, "-m", "benchmarks.packing", "--quick", "--measures", str(measures)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    filled, cut, speed = json.loads(measures.read_text())[:3]
    assert 99 < filled["ours"] < 100
    assert cut["ours"] == 0
    assert int(cut["peers"]["group_texts"]) > 0
    assert 0 < speed["peers"]["group_texts"] < speed["ours"] < speed["limits"]["bare copies"]
