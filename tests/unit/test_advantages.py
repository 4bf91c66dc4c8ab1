"""Rewards of steps become advantages of tokens by the formula of their paper; which prompts train."""

import pytest
import torch

from hfdist.config.batch import IGNORED
from hfdist.config.task import TaskConfig, TaskLoss, TaskName
from hfdist.topology import Topology
from hfdist.tune.advantages import add_advantages
from hfdist.tune.answer import Answer
from hfdist.tune.live_prompts import keep_live
from hfdist.tune.policy_loss import POLICY_LOSSES
from hfdist.tune.rollout_rows import (
    ADVANTAGES,
    OLD_LOG_PROBABILITIES,
    REWARDS,
    STEP_ENDS,
    TRAINS,
    are_answered,
    make_rows,
)
from hfdist.tune.step_rewards import add_up, differ, of_answers, of_steps, token_of

PROMPT, FILL = [50, 51], 99
ANSWERS = [[0, 1, 2, 3, 4], [5, 6, 7], [0, 1], [8, 9, 0, 1]]
"""Of two prompts."""
STEPS = [[(2, 1.0), (4, -1.0)], [(3, 0.5)], [(1, 2.0), (2, 0.0)], [(2, 1.0)]]
"""Each token is a character; the last token of the first and of the last answer is in no step."""


def decode(ids):
    return "".join(map(str, ids))


def batch_of(answers, steps):
    batch = make_rows([PROMPT] * len(answers), [Answer.of(one) for one in answers], fill_id=FILL)
    return batch | of_steps(batch, steps, decode, num_columns=2)


@pytest.mark.parametrize("loss", [TaskLoss.grpo, TaskLoss.rloo])
def test_an_episode_that_failed_before_its_first_token_counts_0_in_its_group(loss):
    task = TaskConfig(name=TaskName.grpo, loss=loss, num_generations=3, scale_rewards=False)
    batch = make_rows([PROMPT] * 6, [Answer.of(one) for one in ([1], [2], [], [], [], [])], fill_id=FILL)
    # The second prompt is that of a lane that has ended.
    trains = torch.tensor([True, True, False, True, True, True])
    batch |= {REWARDS: torch.tensor([[3.0], [6.0], *[[0.0]] * 4]), TRAINS: trains}
    [found] = add_advantages([batch], POLICY_LOSSES[loss], task, data_rank=0)
    wanted = [0.0, 3.0, -3.0] if loss is TaskLoss.grpo else [0.0, 4.5, -4.5]
    assert found[ADVANTAGES].tolist() == pytest.approx([*wanted, 0.0, 0.0, 0.0])
    assert are_answered(batch).tolist() == [True] * 3 + [False] * 3
    [kept] = keep_live([batch | {REWARDS: torch.zeros(6, 1)}], 0, 3, Topology())
    assert not are_answered(kept).any(), "a prompt that does not train is in no mean"


@pytest.mark.parametrize("scales", [True, False])
def test_a_token_has_the_advantages_of_the_steps_that_are_not_over(scales):
    task = TaskConfig(name=TaskName.grpo, loss=TaskLoss.grpo, num_generations=2, scale_rewards=scales)
    [batch] = add_advantages([batch_of(ANSWERS, STEPS)], POLICY_LOSSES[task.loss], task, data_rank=0)
    assert batch.keys().isdisjoint({REWARDS, STEP_ENDS})
    for first in (0, 2):
        group = torch.tensor([value for steps in STEPS[first : first + 2] for _, value in steps])
        for row in (first, first + 1):
            compared = [(end, (value - group.mean()) / (group.std() if scales else 1)) for end, value in STEPS[row]]
            wanted = [sum(a for end, a in compared if end > place) for place in range(len(ANSWERS[row]))]
            found = batch[ADVANTAGES][row, len(PROMPT) :][: len(wanted)]
            assert torch.allclose(found, torch.tensor([float(one) for one in wanted]), atol=1e-3)


@pytest.mark.parametrize("loss", [TaskLoss.grpo, TaskLoss.reinforce_pp, TaskLoss.dr_grpo])
def test_a_batch_has_one_scale_that_of_its_rewards(loss):
    task = TaskConfig(name=TaskName.grpo, loss=loss, num_generations=2, scale_rewards="batch")
    rewards = torch.tensor([1.0, 3.0, 2.0, 0.0])
    batch = make_rows([PROMPT] * 4, [Answer.of(one) for one in ANSWERS], fill_id=FILL) | {REWARDS: rewards[:, None]}
    # The batch of two forwards is one: the standard deviation is that of all four.
    halves = [{name: values[part] for name, values in batch.items()} for part in (slice(2), slice(2, 4))]
    found = add_advantages(halves, POLICY_LOSSES[loss], task, data_rank=0)
    scale = 1.0 if loss is TaskLoss.dr_grpo else float(rewards.std()) + 1e-4
    wanted = [-1 / scale, 1 / scale, 1 / scale, -1 / scale]
    assert torch.cat([one[ADVANTAGES] for one in found]).tolist() == pytest.approx(wanted)


def test_the_reward_of_a_whole_answer_is_one_step():
    task = TaskConfig(name=TaskName.grpo, loss=TaskLoss.grpo, num_generations=2)
    whole = [[(len(answer), float(value))] for answer, value in zip(ANSWERS, (1, 3, 2, 0), strict=True)]
    plain = batch_of(ANSWERS, whole) | of_answers(whole)
    del plain[STEP_ENDS]
    of_rows, of_tokens = (
        add_advantages([one], POLICY_LOSSES[task.loss], task, data_rank=0)[0][ADVANTAGES]
        for one in (plain, batch_of(ANSWERS, whole))
    )
    is_target = plain["labels"] != IGNORED
    assert torch.allclose(of_tokens[is_target], of_rows[:, None].expand(is_target.shape)[is_target])
    assert of_rows.abs().min() > 0.5


@pytest.mark.parametrize("steps", [[[(3, 1.0)], []], [[], []]])
def test_one_reward_in_all_teaches_nothing(steps):
    """It has no standard deviation, and neither has none."""
    task = TaskConfig(name=TaskName.grpo, loss=TaskLoss.reinforce_pp, num_generations=2)
    [batch] = add_advantages([batch_of(ANSWERS[:2], steps)], POLICY_LOSSES[task.loss], task, data_rank=0)
    assert (batch[ADVANTAGES] == 0).all()


def test_several_rewards_add_up_at_the_ends_of_steps():
    assert add_up([0.5, [(2, 1.0), (5, 3.0)]], [2.0, 1.0], 5) == [(2, 1.0), (5, 4.0)]


def test_the_end_of_a_text_is_that_of_its_answer():
    """A token that ends the answer has no text."""

    def text(ids):
        return "".join("ab" for one in ids if one)

    assert [token_of(end, [1, 1, 1, 0], text) for end in (1, 2, 3, 5, 6)] == [0, 0, 1, 2, 3]


def test_prompts_whose_answers_differ_train_first():
    """Six prompts in three batches: the first is alike, the fourth is none."""
    rewards = [(1, 1), (0, 2), (3, 3), None, (5, 4), (7, 6)]
    batches = []
    for first in (0, 2, 4):
        of_prompts = rewards[first : first + 2]
        answers = [[first + own] * 3 if one else [] for own, one in enumerate(of_prompts) for _ in range(2)]
        batch = make_rows([PROMPT if one else [] for one in answers], [*map(Answer.of, answers)], fill_id=FILL)
        values = [[float(value)] for one in of_prompts for value in one or (0, 0)]
        batches.append(
            batch | {REWARDS: torch.tensor(values), OLD_LOG_PROBABILITIES: torch.zeros(batch["labels"].shape)}
        )
    assert [differ(batch, 2).tolist() for batch in batches] == [[False, True], [False, False], [True, True]]

    def trained(count):
        kept = keep_live(batches, count, 2, Topology())
        assert all(len(values) == len(batch["labels"]) for batch in kept for values in batch.values())
        return [sorted({*batch["labels"][batch["labels"] != IGNORED].tolist()}) for batch in kept], kept

    assert trained(2)[0] == [[1], [], [4]]
    assert trained(3)[0] == [[1], [], [4, 5]]
    # Alike ones fill up, but not what is none.
    assert trained(5)[0] == [[0, 1], [2], [4, 5]]
    assert trained(6)[0] == trained(5)[0]
    empty = trained(2)[1][1]
    assert empty["input_ids"].shape == empty[OLD_LOG_PROBABILITIES].shape == (2, 2)
