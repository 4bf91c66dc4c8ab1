"""The benchmark of the Trainer's loop runs from end to end, and finds equal losses in all loops."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.e2e
@pytest.mark.many
def test_the_quick_mode_measures_loops_that_train_the_same(tmp_path):
    measures = tmp_path / "measures.json"
    command = [sys.executable, "-m", "benchmarks.loop", "--quick", "--measures", str(measures)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    # It ends with an error if a loss of one differs from the bare loop's.
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(measures.read_text())
    assert [row["what"] for row in rows] == [
        "CPU time of a step, 1 micro batch",
        "CPU time of a step, 8 micro batches",
    ]
    for row in rows:
        assert row["ours"] > 0
        assert row["limits"]["bare loop"] > 0
        assert {name for name, value in row["peers"].items() if not isinstance(value, str)} == {
            "transformers.Trainer",
            "accelerate loop",
        }
