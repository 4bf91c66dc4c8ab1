"""Episodes are the same in every layout: what is drawn, read and learned, and which of them fail."""

import pytest

from hfdist.environments.registry import GROUP
from hfdist.records import RunFolder, read_lines
from tests.distributed import trl_runs
from tests.distributed.policy_runs import COMMON
from tests.distributed.preference_runs import tune
from tests.distributed.runs import eval_losses, weights
from tests.marks import many
from tests.packages import install_package

pytestmark = pytest.mark.distributed

STEPS = 3
SOURCE = '''
import os

from hfdist.environments.guess import Guess


class Moody(Guess):
    """The guessing game, which fails for some numbers, and gives no number twice as much."""

    def reset(self, row):
        super().reset(row)
        if self._number == 7:
            raise ValueError("no room")

    def step(self, text):
        if self._number in (1, 4):
            raise ValueError("not today")
        observation, reward, done = super().step(text)
        return ("3 + 4" if observation == "higher" else observation), reward + 0.125, done
'''
FIGURES = (
    *("reward", "reward_std", "rewards/environment", "rewards/arithmetic", "dead_groups", "completion_tokens"),
    *("cut_off", "turns", "tool_calls", "failed_episodes"),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory, policy, sums, cache_dir):
    """Run in a layout; the environment is that of an installed package."""
    folder = tmp_path_factory.mktemp("moody")
    with pytest.MonkeyPatch.context() as patch:
        install_package(folder, patch, "moody", SOURCE, GROUP, moody="Moody")

        def in_layout(num_ranks, layout):
            own = ("task=grpo", "task.loss=dr_grpo", "task.beta=0.5", *COMMON, "task.environment=moody")
            limits = ("task.max_new_tokens=16", "task.max_turns=3", "data.sequence_length=32")
            rewards = "task.rewards={arithmetic: 1.0, environment: 2.0}"
            name = layout.partition(" ")[0]
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
        (2, "pipeline"),
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
