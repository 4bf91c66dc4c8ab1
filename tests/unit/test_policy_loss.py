"""Advantages; and the loss of an older policy's answers, weighted as if the trained one had drawn them."""

from types import SimpleNamespace

import pytest
import torch

from hfdist.config.task import TaskConfig, TaskName
from hfdist.tune.policy import PolicyGradient, clipped_losses, ratio_of

ADVANTAGES = torch.tensor([1.0, -0.5, 0.3, -0.8])


def gradient(logits, old, weights):
    own = logits.clone().requires_grad_()
    losses, _ = clipped_losses(ratio_of(own.log_softmax(0), old), ADVANTAGES, 0.2)
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
    ("ratio", "advantage", "loss", "slope"),
    [
        *((1.1, 1.0, -1.1, -1.1), (1.5, 1.0, -1.2, 0.0), (0.5, 1.0, -0.5, -0.5)),
        *((0.5, -1.0, 0.8, 0.0), (2.0, -1.0, 2.0, 2.0), (9.0, -1.0, 3.0, 0.0)),
    ],
)
def test_a_ratio_counts_up_to_its_limits(ratio, advantage, loss, slope):
    new = torch.tensor([0.0], requires_grad=True)
    losses, _ = clipped_losses(ratio_of(new, -torch.tensor([ratio]).log()), torch.tensor([advantage]), 0.2)
    losses.sum().backward()
    assert losses.item() == pytest.approx(loss)
    assert new.grad.item() == pytest.approx(slope)


def test_a_ratio_that_no_number_holds_has_no_gradient():
    new = torch.tensor([0.0], requires_grad=True)
    ratio_of(new, torch.tensor([-100.0])).sum().backward()
    assert new.grad.item() == 0.0


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"name": TaskName.grpo}, [[-1.0, 1.0, 0.0], [0.0, 0.0, 0.0], [-1.0, 0.0, 1.0]]),
        ({"name": TaskName.grpo, "scale_rewards": False}, [[-1.0, 1.0, 0.0], [0.0, 0.0, 0.0], [-4.0, 0.0, 4.0]]),
        ({"name": TaskName.rloo}, [[-1.5, 1.5, 0.0], [0.0, 0.0, 0.0], [-6.0, 0.0, 6.0]]),
    ],
)
def test_an_answer_is_compared_with_those_to_the_same_prompt(fields, wanted):
    objective = PolicyGradient(TaskConfig(**fields), SimpleNamespace(names=()))
    rewards = torch.tensor([[0.0, 2.0, 1.0], [5.0, 5.0, 5.0], [-4.0, 0.0, 4.0]])
    assert torch.allclose(objective.advantages(rewards), torch.tensor(wanted), atol=1e-3)
