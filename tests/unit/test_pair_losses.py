"""Losses of pairs: their values at hand-computed points, and numbers where a plain formula has none."""

import math

import pytest
import torch

from hfdist.config.task import TaskConfig, TaskLoss, TaskName
from hfdist.tune.pair_losses import LOSSES

LN3 = math.log(3)
"""Its sigmoid is 3/4."""


def loss(name, chosen, rejected, **fields):
    scores = torch.tensor([chosen, rejected], requires_grad=True)
    value = LOSSES[TaskLoss[name]].function(*scores, TaskConfig(**fields))
    value.backward()
    return value.item(), scores.grad


@pytest.mark.parametrize(
    ("name", "scores", "fields", "wanted"),
    [
        ("sigmoid", (LN3, 0.0), {"beta": 1.0}, -math.log(0.75)),
        ("simpo", (-1.0, -1.0 - LN3), {"beta": 2.0, "margin": LN3}, -math.log(0.75)),
        ("robust", (LN3, 0.0), {"beta": 1.0, "label_smoothing": 0.25}, (math.log(0.25) - 3 * math.log(0.75)) / 2),
        # The model's own distribution over a pair is the smoothed one.
        ("exo_pair", (LN3, 0.0), {"beta": 1.0, "label_smoothing": 0.25}, 0.0),
        ("hinge", (0.5, 1.0), {"beta": 0.5}, 1.25),
        ("ipo", (0.5, -0.5), {"beta": 0.25}, 1.0),
        ("nca_pair", (LN3, 0.0), {"beta": 1.0}, -math.log(0.75) - (math.log(0.25) + math.log(0.5)) / 2),
        ("bco_pair", (LN3, LN3), {"beta": 1.0}, -math.log(0.75) - math.log(0.25)),
        ("sppo_hard", (1.0, 0.0), {"beta": 0.25}, 5.0),
        ("discopop", (0.0, 0.0), {"beta": 1.0}, (math.log(2) + 1) / 2),
        ("apo_zero", (LN3, -LN3), {"beta": 1.0}, 0.5),
        ("apo_down", (LN3, 0.0), {"beta": 1.0}, 1.0),
        # Odds of 1 and of 1/3.
        ("orpo", (math.log(1 / 2), math.log(1 / 4)), {"beta": 0.5}, -0.5 * math.log(3 / 4)),
    ],
)  # fmt: skip
def test_a_loss_has_the_value_of_its_formula(name, scores, fields, wanted):
    assert loss(name, *scores, **fields)[0] == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "scores"),
    # Margins at which one factor of discopop overflows; answers that are certain, or not to be expected at all.
    [("discopop", (5000.0, 0.0)), ("discopop", (-5000.0, 0.0)), ("orpo", (0.0, -200.0)), ("orpo", (-200.0, 0.0))],
)
def test_extreme_scores_have_a_loss_and_a_gradient(name, scores):
    value, gradient = loss(name, *scores, beta=0.1)
    assert math.isfinite(value)
    assert gradient.isfinite().all()


def test_every_loss_of_a_pair_is_in_the_table():
    names = {loss for task in ("dpo", "cpo") for loss in TaskName[task].traits.losses}
    assert set(LOSSES) == names
