"""The benchmark of growth: its two counts of bytes agree, and its quick mode runs from end to end."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.growth.theory import exponent
from benchmarks.growth.traffic import CountCollectives, socket_bytes
from hfdist.testing import run_ranks

ROOT = Path(__file__).resolve().parents[2]
NUM_ELEMENTS = 1 << 20


def count() -> dict[str, tuple[int, int]]:
    whole, share = torch.ones(NUM_ELEMENTS), torch.ones(NUM_ELEMENTS // dist.get_world_size())
    collectives = {
        "allreduce": lambda: dist.all_reduce(whole),
        "allgather": lambda: dist.all_gather(list(whole.chunk(dist.get_world_size())), share),
    }
    counts = {}
    for kind, run in collectives.items():
        dist.barrier()
        before, mode = socket_bytes(), CountCollectives()
        with mode:
            run()
        counts[kind] = mode.sent_bytes[kind], socket_bytes() - before
    return counts


@pytest.mark.distributed
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_both_counts_are_those_of_a_ring(num_ranks):
    share = (num_ranks - 1) / num_ranks
    for counts in run_ranks(count, num_ranks):
        for kind, times in (("allreduce", 2), ("allgather", 1)):
            expected = times * share * 4 * NUM_ELEMENTS
            assert counts[kind] == (pytest.approx(expected), pytest.approx(expected, rel=0.01))


def test_the_exponent_is_that_of_a_power():
    assert exponent({n: 3.0 * n**1.5 for n in (1, 2, 4, 8)}) == pytest.approx(1.5)


@pytest.mark.e2e
@pytest.mark.many
def test_the_quick_mode_gives_a_row_for_all_that_grows(tmp_path):
    measures = tmp_path / "measures.json"
    command = [sys.executable, "-m", "benchmarks.growth", "--quick", "--measures", str(measures)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["what"]: row for row in json.loads(measures.read_text())}
    for layout in ("ddp", "zero2", "pipeline"):
        assert rows[f"bytes that a rank sends in a step, {layout}, 2 ranks"]["is_met"]
        assert rows[f"weights and optimizer on a rank, {layout}, 2 ranks"]["is_met"]
    assert any(what.startswith("exponent: CPU time of the start") for what in rows)
    assert any(what.startswith("exponent: cursor") for what in rows)
