"""What of the examples needs no environment of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SPLIT = Path(__file__).parents[2] / "examples" / "federated" / "split.py"


@pytest.mark.parametrize("more", [[], ["--alpha", "0.3"]], ids=["by value", "dirichlet"])
def test_each_row_goes_to_one_client(tmp_path, more):
    rows = [{"text": f"{row}", "label": "abcdef"[row % 6]} for row in range(300)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    command = [sys.executable, SPLIT, tmp_path / "rows.jsonl", tmp_path / "out", "--clients", "3", "--key", "label"]
    subprocess.run([*command, *more], check=True, capture_output=True)
    found = [
        [json.loads(line) for line in (tmp_path / "out" / f"{client}.jsonl").read_text().splitlines()]
        for client in range(3)
    ]
    assert sorted(int(row["text"]) for own in found for row in own) == list(range(300))
    labels = [{row["label"] for row in own} for own in found]
    if more:
        # Each has its own share of each value.
        counts = [[sum(row["label"] == label for row in own) for label in "abcdef"] for own in found]
        assert len(set(map(tuple, counts))) == 3
        assert sum(map(len, labels)) > 6
    else:
        assert sorted(label for own in labels for label in own) == list("abcdef")
