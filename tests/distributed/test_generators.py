"""Generators beside the ranks: the same training as within the step, and each prompt once, whoever is killed."""

import math
import signal

import pytest

from hfdist.records import RunFolder, read_lines
from hfdist.records.lines import earlier
from recipes.tune import main
from tests.distributed import policy_runs, trl_runs
from tests.distributed.policy_runs import each_once, trained_prompts
from tests.distributed.preference_runs import GLOBAL_BATCH, STEPS, make_config, tune
from tests.distributed.processes import Life, assert_gone
from tests.distributed.runs import losses, weights
from tests.marks import many

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(("task", "strategy"), [("grpo", "pipeline"), many("rloo", "fsdp2")])
def test_without_staleness_it_is_the_training_within_the_step(tmp_path, policy, sums, cache_dir, task, strategy):
    own = (f"task={task}", *policy_runs.COMMON, "task.temperature=1.3", "task.top_k=9")
    plain = tune(tmp_path / "plain", policy, sums, 1, *own)
    asynchronous = ("task.generators=1", "task.max_staleness=0", f"strategy={strategy}")
    run = tune(tmp_path / "run", policy, sums, 2, *own, *asynchronous)
    lines, reference = (
        [line for line in read_lines(RunFolder(folder).metrics) if "loss" in line] for folder in (run, plain)
    )
    assert [line["reward"] for line in lines] == [line["reward"] for line in reference]
    assert max(line["reward_std"] for line in lines) > 0
    assert losses(run) == pytest.approx(losses(plain), rel=1e-5, abs=1e-5)
    assert trl_runs.difference(weights(run), weights(plain)) < 1e-5
    assert {line["staleness_max"] for line in lines} == {0}
    assert max(line["mismatch"] for line in lines) < 1e-5
    assert [line["largest_ratio"] for line in lines] == pytest.approx([1.0] * STEPS, abs=1e-4)
    assert trained_prompts(run) == each_once(STEPS)


@pytest.mark.many
def test_each_prompt_is_trained_once_whoever_is_killed(tmp_path, policy, sums, cache_dir):
    steps, folder = 16, tmp_path / "run"
    own = (
        "task.generators=2",
        f"train.max_steps={steps}",
        "checkpoint.every=4",
        "checkpoint.keep=1",
        "train.eval_every=null",
    )
    config = make_config(folder, policy, sums, "task=grpo", *policy_runs.COMMON, *own)
    life = Life(config, 1, tmp_path / "log", run=main.__wrapped__)
    assert life.wait(lambda: len(trained_prompts(folder)) >= 2 * GLOBAL_BATCH)
    life.loaders()[0].send_signal(signal.SIGKILL)
    before = len(trained_prompts(folder))
    assert life.wait(lambda: len(trained_prompts(folder)) >= before + 6 * GLOBAL_BATCH), life.log.read_text()
    [rank] = life.ranks()
    rank.kill()
    life.end()
    # Generators see by themselves that their run has ended.
    assert_gone([life.group])
    assert 0 < len(trained_prompts(folder)) < steps * GLOBAL_BATCH
    assert "its prompts go to others" in life.log.read_text()

    fewer = ("task.generators=1", "checkpoint.allow_changes=true")
    tune(folder, policy, sums, 1, "task=grpo", *policy_runs.COMMON, *own, *fewer)
    assert trained_prompts(folder) == each_once(steps)
    assert read_lines(earlier(RunFolder(folder).rollouts_ledger))
    lines = [line for line in read_lines(RunFolder(folder).metrics) if "loss" in line]
    assert all(math.isfinite(line["loss"]) and line["staleness_max"] <= 1 for line in lines)
    assert max(line["staleness_max"] for line in lines) == 1
    assert max(line["clipped_ratios"] for line in lines) > 0
    assert max(line["mismatch"] for line in lines) > 1e-3
    assert max(line["largest_ratio"] for line in lines) > 1.2
