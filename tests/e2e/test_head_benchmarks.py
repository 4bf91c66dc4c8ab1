"""The benchmarks of the loss head and of one GPU run at their smallest sizes, the latter's code on this processor."""

import subprocess
import sys

import pytest

from benchmarks.table import read_measures


@pytest.mark.many
@pytest.mark.parametrize(("module", "num_rows"), [("head", 2), ("gpu", 3)])
def test_runs_and_gives_the_rows_of_the_table(tmp_path, module, num_rows):
    measures = tmp_path / "measures.json"
    command = [sys.executable, "-m", f"benchmarks.{module}", "--quick", "--measures", str(measures)]
    subprocess.run(command, check=True, stdout=subprocess.PIPE)
    rows = read_measures(measures)
    assert len(rows) == num_rows
    assert rows[0].ours > 0
