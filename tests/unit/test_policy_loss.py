"""Advantages; and the loss of an older policy's answers, weighted as if the trained one had drawn them."""

import pytest
import torch

from hfdist.config.task import TRAITS, TaskConfig, TaskLoss, TaskName
from hfdist.tune.advantages import compare
from hfdist.tune.policy_loss import POLICY_LOSSES, Ratios, clipped, smooth, truncated

ADVANTAGES = torch.tensor([1.0, -0.5, 0.3, -0.8])


def ratios_of(new, old, advantages, above=0.2):
    return Ratios(new, new - old, advantages, below=0.2, above=above, largest=3.0)


def gradient(logits, old, weights):
    own = logits.clone().requires_grad_()
    losses, _ = clipped(ratios_of(own.log_softmax(0), old, ADVANTAGES))
    (weights * losses).sum().backward()
    return own.grad


def test_the_mean_over_what_an_older_policy_draws_is_that_over_what_the_new_one_draws():
    new, old = torch.tensor([0.1, 0.2, -0.1, 0.0]), torch.tensor([0.0, 0.15, 0.0, 0.05])
    drawn = old.log_softmax(0)
    within_the_step = gradient(new, new.log_softmax(0), new.softmax(0))
    assert torch.allclose(gradient(new, drawn, drawn.exp()), within_the_step, atol=1e-6)
    # Without the weights of the ratio it would be another one.
    assert not torch.allclose(gradient(new, new.log_softmax(0), drawn.exp()), within_the_step, atol=1e-3)


@pytest.mark.parametrize(
    ("form", "ratio", "advantage", "loss", "slope"),
    [
        *((clipped, 1.1, 1.0, -1.1, -1.1), (clipped, 1.5, 1.0, -1.2, 0.0), (clipped, 0.5, 1.0, -0.5, -0.5)),
        *((clipped, 0.5, -1.0, 0.8, 0.0), (clipped, 2.0, -1.0, 2.0, 2.0), (clipped, 9.0, -1.0, 3.0, 0.0)),
        # A probability of 1: its logarithm is 0, and so is the loss.
        *((truncated, 1.1, 1.0, 0.0, -1.1), (truncated, 9.0, 1.0, 0.0, -1.2), (truncated, 0.1, -1.0, 0.0, 0.1)),
        *((smooth, 1.0, 1.0, -2.0, -1.0), (smooth, 1.0, -1.0, 2.0 / 1.05, 1.0), (smooth, 1e9, 1.0, -4.0, 0.0)),
    ],
)
def test_a_ratio_counts_up_to_its_limits(form, ratio, advantage, loss, slope):
    new = torch.tensor([0.0], requires_grad=True)
    losses, _ = form(ratios_of(new, -torch.tensor([ratio]).log(), torch.tensor([advantage])))
    losses.sum().backward()
    assert losses.item() == pytest.approx(loss)
    assert new.grad.item() == pytest.approx(slope)


@pytest.mark.parametrize("form", [clipped, smooth])
def test_a_ratio_that_no_number_holds_has_no_gradient(form):
    new = torch.tensor([0.0], requires_grad=True)
    losses, _ = form(ratios_of(new, torch.tensor([-100.0]), torch.tensor([-1.0])))
    losses.sum().backward()
    assert new.grad.item() == 0.0


REWARDS = [[0.0, 2.0, 1.0], [5.0, 5.0, 5.0], [-4.0, 0.0, 4.0], [0.0, 0.0, 0.0]]
"""The last prompt is none."""
SPREAD = torch.tensor([-1.0, 1.0, 0.0, 0.0, 0.0, 0.0, -4.0, 0.0, 4.0]).std().item()
IN_BATCH = [[-1 / SPREAD, 1 / SPREAD, 0.0], [0.0] * 3, [-4 / SPREAD, 0.0, 4 / SPREAD], [0.0] * 3]
UNSCALED = [[-1.0, 1.0, 0.0], [0.0] * 3, [-4.0, 0.0, 4.0], [0.0] * 3]


@pytest.mark.parametrize(
    ("loss", "scales", "wanted"),
    [
        ("grpo", True, [[-1.0, 1.0, 0.0], [0.0] * 3, [-1.0, 0.0, 1.0], [0.0] * 3]),
        *(("grpo", False, UNSCALED), ("dr_grpo", True, UNSCALED)),
        *(("reinforce_pp", True, IN_BATCH), ("reinforce_pp", False, UNSCALED)),
        ("rloo", True, [[-1.5, 1.5, 0.0], [0.0] * 3, [-6.0, 0.0, 6.0], [0.0] * 3]),
    ],
)
def test_an_answer_is_compared_with_others(loss, scales, wanted):
    task = TaskConfig(name=TaskName.grpo, loss=TaskLoss[loss], scale_rewards=scales, clip=None)
    is_answered = torch.tensor([True, True, True, False])[:, None].expand(4, 3)
    found = compare(torch.tensor(REWARDS), is_answered, POLICY_LOSSES[task.loss], task, data_rank=0)
    assert torch.allclose(found, torch.tensor(wanted), atol=1e-3)


def test_each_loss_of_a_policy_has_its_line():
    tasks = [traits for traits in TRAITS.values() if "clip" in traits.keys]
    assert [*POLICY_LOSSES] == [loss for traits in tasks for loss in traits.losses]


@pytest.mark.parametrize(
    ("loss", "clip", "clip_high", "wanted"),
    [
        *(("grpo", None, None, (0.2, 0.2)), ("grpo", 0.1, None, (0.1, 0.1)), ("grpo", 0.1, 0.3, (0.1, 0.3))),
        *(("dapo", None, None, (0.2, 0.28)), ("dapo", 0.1, None, (0.1, 0.1)), ("gspo", None, 1e-3, (3e-4, 1e-3))),
    ],
)
def test_bounds_that_are_not_given_are_the_loss_s_own(loss, clip, clip_high, wanted):
    task = TaskConfig(name=TaskName.grpo, clip=clip, clip_high=clip_high)
    assert POLICY_LOSSES[TaskLoss[loss]].bounds(task) == wanted
