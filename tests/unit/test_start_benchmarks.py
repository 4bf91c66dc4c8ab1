"""The benchmarks of saves and of starts run, at their smallest."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.many
@pytest.mark.parametrize("name", ["checkpoint", "start"])
def test_it_gives_its_rows(tmp_path, name):
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--measures", str(tmp_path / "rows.json")]
    subprocess.run(command, check=True, cwd=ROOT, timeout=280, capture_output=True)
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert rows
    assert all(row["ours"] > 0 for row in rows)
