"""The example of docs/reinforcement.md, for a few steps: its program, then fine-tuning, then GRPO from that model."""

import subprocess
import sys

import pytest

from hfdist.config.composition.compose import compose_config
from hfdist.records import RunFolder, read_lines
from hfdist.testing import run_ranks
from proofs.follow_readme import ROOT, shown_programs
from recipes import finetune, tune
from tests.unit.config.shipped import ARITHMETIC, primary_of

pytestmark = pytest.mark.distributed

SHORT = (
    "train.max_steps=2",
    "train.eval_every=2",
    "optimizer.warmup_steps=1",
    "evaluate.num_generations=8",
    "report=quiet",
)


def test_the_example_goes_on_from_its_own_model(tmp_path, cache_dir, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = shown_programs(ROOT / "docs" / "reinforcement.md")["sums.py"]
    subprocess.run([sys.executable, "-c", program], check=True)
    for experiment in reversed(ARITHMETIC):
        primary = primary_of(experiment)
        main = {"finetune": finetune, "tune": tune}[primary].main
        run_ranks(main.__wrapped__, 2, compose_config([f"+experiment={experiment}", *SHORT], name=primary))
    lines = read_lines(RunFolder(tmp_path / "runs" / "arithmetic_grpo").metrics)
    assert [line["step"] for line in lines if "eval_reward" in line] == [0, 2]
    held_out = set((tmp_path / "held_out.jsonl").read_text().splitlines())
    assert not held_out & set((tmp_path / "sums.jsonl").read_text().splitlines())
