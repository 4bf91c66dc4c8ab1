"""What a run says of its memory before the first step is what then happens: under a limit, and without one."""

import json
import resource
import subprocess
import sys

import psutil
import pytest

from tests.e2e.forked import end, run_script, start_forked
from tests.e2e.test_command_line import RECIPE

# Weights, gradients and the optimizer's state of a large vocabulary: 0.4 GiB, and little to compute.
LARGE = (
    "model=tiny", "model.config.vocab_size=50000", "model.config.tie_word_embeddings=false",
    "model.config.hidden_size=256", "model.config.intermediate_size=64",
    "data.sequence_length=32", "data.workers=0", "data.eval_sequences=1", "train.max_steps=3",
    "train.global_batch_size=1", "train.micro_batch_size=1", "data.lanes=1", "optimizer.warmup_steps=1",
    "checkpoint=none", "report=quiet", "report.plan=true",
)  # fmt: skip
NEEDED_BYTES = 4 * 4 * 2 * 50_000 * 256


def run_limited(more_bytes, *arguments):
    """Run with so many bytes of data more than this process has, or without a limit."""
    if more_bytes is not None:
        # It counts what is private and can be written: libraries that are mapped do not.
        most = psutil.Process().memory_info().data + more_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (most, resource.RLIM_INFINITY))
    run_script(RECIPE, *arguments)


@pytest.mark.parametrize(("share", "fits"), [(0.7, False), (2.0, True)])
def test_a_run_that_a_plan_says_does_not_fit_fails_and_one_that_fits_runs(tmp_path, cache_dir, share, fits):
    said = tmp_path / "said"
    more_bytes = int(share * NEEDED_BYTES)
    process = start_forked(
        run_limited, more_bytes, *LARGE, "run.dir=run", cwd=tmp_path, said=(said, said), HFDIST_CACHE=str(cache_dir)
    )
    code, words = end(process), said.read_text()
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["fits"] is fits, words
    assert ("this run does not fit" in words) is not fits, words
    assert "no plan" not in words
    if fits:
        assert code == 0, words
        peak = json.loads((tmp_path / "run" / "grade.json").read_text())["items"][0]
        assert abs(peak["error"]) < 0.1, peak
    else:
        assert code == 7, words
        assert "there is not enough memory" in words
        assert not (tmp_path / "run" / "grade.json").exists()
        assert "Traceback" not in words


def test_json_is_all_that_a_plan_prints():
    layout = ("strategy=zero3", "plan.processes=2", "plan.hardware=h100_80gb")
    command = [sys.executable, "-m", "hfdist", "plan", "model=tiny", "model.config.vocab_size=256", *layout, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["processes"] == 2
    assert done.stderr == ""
