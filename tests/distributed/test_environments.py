"""Episodes are the same in every layout: what is drawn, read and learned, and which of them fail."""

import pytest

from hfdist.environments.registry import GROUP
from hfdist.records import RunFolder, read_lines
from tests.distributed import trl_runs
from tests.distributed.policy_runs import ANSWERS, COMMON, MOODY, each_once, trained_prompts
from tests.distributed.preference_runs import tune
from tests.distributed.runs import eval_losses, weights
from tests.marks import many
from tests.packages import install_package

pytestmark = pytest.mark.distributed

STEPS = 3
FIGURES = (
    *("reward", "reward_std", "rewards/environment", "rewards/arithmetic", "dead_groups", "completion_tokens"),
    *("cut_off", "turns", "tool_calls", "failed_episodes"),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory, policy, sums, cache_dir):
    """Run in a layout; the environment is that of an installed package."""
    folder = tmp_path_factory.mktemp("moody")
    with pytest.MonkeyPatch.context() as patch:
        install_package(folder, patch, "moody", MOODY, GROUP, moody="Moody")
        # Of generators, which are no forks.
        patch.setenv("PYTHONPATH", str(folder))

        def in_layout(num_ranks, layout):
            own = ("task=grpo", "task.loss=dr_grpo", "task.beta=0.5", *COMMON, "task.environment=moody")
            limits = ("task.max_new_tokens=16", "task.max_turns=3", "data.sequence_length=32")
            rewards = "task.rewards={arithmetic: 1.0, environment: 2.0}"
            name = layout.replace(" ", "_").replace("=", "_")
            return tune(
                folder / name, policy, sums, num_ranks, *own, *limits, rewards, *f"strategy={layout}".split(),
                "report.log_every=1", f"train.max_steps={STEPS}", f"train.eval_every={STEPS}",
            )  # fmt: skip

        yield in_layout


@pytest.fixture(scope="module")
def single(run):
    return run(1, "single")


def lines(folder):
    return [line for line in read_lines(RunFolder(folder).metrics) if "loss" in line]


@pytest.mark.parametrize(
    ("num_ranks", "layout"),
    [
        (2, "ddp"),
        many(2, "pipeline"),
        many(2, "ddp task.generators=1 task.max_staleness=0"),
        (2, "pipeline task.generators=1 task.max_staleness=0"),
        many(2, "zero3"),
        many(2, "fsdp2"),
        many(2, "tensor"),
        many(8, "3d train.micro_batch_size=1"),
    ],
)
def test_a_layout_changes_no_episode(single, run, num_ranks, layout):
    folder = run(num_ranks, layout)
    for ours, theirs in zip(lines(folder), lines(single), strict=True):
        for name in FIGURES:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-6), name
        assert ours["entropy"] == pytest.approx(theirs["entropy"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5, abs=1e-6)
    assert eval_losses(folder) == pytest.approx(eval_losses(single))
    assert trl_runs.difference(weights(folder), weights(single)) < 1e-5
    assert first_episodes(folder) == first_episodes(single)
    if "generators" in layout:
        assert {line["staleness_max"] for line in lines(folder)} == {0}
        assert max(line["mismatch"] for line in lines(folder)) < 1e-5
        assert trained_prompts(folder) == each_once(STEPS)


def first_episodes(folder):
    """What was said to the first prompt of each step, which rank 0 has in any layout."""
    of_steps = {}
    for line in read_lines(RunFolder(folder).rollouts):
        of_steps.setdefault(line["step"], []).append((line["prompt"], line["turns"], line["reward"]))
    assert len(of_steps) == STEPS
    return [own[:ANSWERS] for own in of_steps.values()]


def test_the_run_has_turns_and_failed_episodes(single):
    """Or the layouts would agree on nothing."""
    found = lines(single)
    assert len(found) == STEPS
    assert max(line["turns"] for line in found) > 1.5
    assert 0 < sum(line["failed_episodes"] for line in found) < STEPS
    assert max(line["reward_std"] for line in found) > 0
    said = [line["turns"] for line in read_lines(RunFolder(single).rollouts)]
    assert {turn["role"] for turns in said for turn in turns} == {"assistant", "user"}
    last = [line for line in read_lines(RunFolder(single).metrics) if "eval_turns" in line][-1]
    assert last["eval_failed_episodes"] >= 0
