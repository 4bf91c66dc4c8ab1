"""Generators beside the ranks: the same training as within the step, and each prompt once, whoever is killed."""

import math
import os
import re
import signal

import pytest

from hfdist.environments.registry import GROUP
from hfdist.launch.address import LOOPBACK
from hfdist.messages.door import SECRET
from hfdist.records import RunFolder, read_lines
from hfdist.records.lines import earlier
from hfdist.testing import run_ranks
from recipes.tune import main
from tests.distributed import policy_runs, trl_runs
from tests.distributed.policy_runs import each_once, trained_prompts
from tests.distributed.preference_runs import GLOBAL_BATCH, STEPS, make_config, tune
from tests.distributed.processes import Life, assert_gone
from tests.distributed.remote_generators import Moment, free_port, start_pair
from tests.distributed.runs import losses, weights
from tests.marks import many
from tests.packages import install_package

pytestmark = pytest.mark.distributed

RATE_OF_ADAPTERS = "optimizer.lr=1e-2"


@pytest.mark.many  # episodes are the same with generators in test_environments.py
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


def tune_on_two_machines(config):
    """A rank that is alone on its machine, as its launcher says."""
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    main.__wrapped__(config)


@pytest.fixture
def generators(tmp_path, monkeypatch):
    """Starts two generators, as of other machines: one that kills itself, and one that comes then; gives their port."""
    monkeypatch.setenv(SECRET, "of people")
    processes = []

    def start(moment):
        port = free_port()
        processes.extend(start_pair(port, tmp_path, moment))
        return processes, port

    yield start
    for process in processes:
        process.kill()
        process.join()


@pytest.mark.parametrize(
    ("adapter", "strategy", "moment"),
    [
        ("qlora", "fsdp2", Moment.answer),
        many("lora", "zero3", Moment.weights),
        many("lora", "ddp", Moment.answered),
        many("qlora", "pipeline", Moment.hello),
        many("qlora", "zero3", Moment.answered),
    ],
)
def test_generators_and_ranks_of_other_machines_with_an_adapter(
    tmp_path, policy, sums, cache_dir, generators, adapter, strategy, moment
):
    own = (
        "task=grpo",
        *policy_runs.COMMON,
        f"adapter={adapter}",
        "adapter.rank=4",
        "adapter.alpha=8",
        "task.temperature=1.3",
        "task.top_k=9",
        RATE_OF_ADAPTERS,
    )
    plain = tune(tmp_path / "plain", policy, sums, 1, *own)
    (processes, port), folder = generators(moment), tmp_path / "run"
    asynchronous = (f"task.generators_port={port}", f"task.generators_host={LOOPBACK}", "task.max_staleness=0")
    config = make_config(folder, policy, sums, *own, *asynchronous, f"strategy={strategy}")
    run_ranks(tune_on_two_machines, 2, config)
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [-signal.SIGKILL, 0]
    lines, reference = (
        [line for line in read_lines(RunFolder(one).metrics) if "loss" in line] for one in (folder, plain)
    )
    assert [line["reward"] for line in lines] == [line["reward"] for line in reference]
    assert len({line["loss"] for line in lines}) > 2
    assert losses(folder) == pytest.approx(losses(plain), rel=1e-5, abs=1e-5)
    assert max(line["mismatch"] for line in lines) < 1e-5
    assert trained_prompts(folder) == each_once(STEPS)
    said = "".join((tmp_path / f"generator-{number}" / "log").read_text() for number in range(2))
    sizes = {int(size.replace(",", "")) for size in re.findall(r"version \d+: ([\d,]+) bytes", said)}
    # In float32, as in the adapter's own file; headers have other names.
    size = (folder / "adapter" / "adapter_model.safetensors").stat().st_size
    assert [abs(one - size) < 2000 + 0.02 * size for one in sizes] == [True]


@pytest.mark.many  # generators play in test_environments.py, too
def test_generators_of_other_machines_play_the_episodes_that_ranks_play(
    tmp_path, policy, sums, cache_dir, generators, monkeypatch
):
    install_package(tmp_path, monkeypatch, "moody", policy_runs.MOODY, GROUP, moody="Moody")
    own = (
        "task=grpo",
        *policy_runs.COMMON,
        "task.environment=moody",
        "task.rewards={environment: 1.0}",
        "task.max_new_tokens=16",
        "task.max_turns=3",
        "data.sequence_length=32",
        "train.eval_every=null",
        "report.log_every=1",
    )
    plain = tune(tmp_path / "plain", policy, sums, 1, *own)
    (processes, port), folder = generators(Moment.turn), tmp_path / "run"
    asynchronous = (f"task.generators_port={port}", f"task.generators_host={LOOPBACK}", "task.max_staleness=0")
    tune(folder, policy, sums, 2, *own, *asynchronous, "strategy=pipeline")
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [-signal.SIGKILL, 0]
    for ours, theirs in zip(*(read_lines(RunFolder(one).rollouts) for one in (folder, plain)), strict=True):
        assert ours == theirs
    assert losses(folder) == pytest.approx(losses(plain), rel=1e-5, abs=1e-5)
    assert trl_runs.difference(weights(folder), weights(plain)) < 1e-5
    assert trained_prompts(folder) == each_once(STEPS)


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
