"""The outer optimizer: its formula, and what a checkpoint keeps of it is all that the next round needs."""

from dataclasses import replace

import pytest
import torch

from hfdist.config.islands import IslandsConfig, OuterRule
from hfdist.islands.outer import OuterOptimizer
from tests.unit.checkpoint.pieces import small_pieces


def begun(**fields):
    """An outer optimizer at its first weights, and the weights that it moves."""
    pieces = small_pieces()
    outer = OuterOptimizer(lambda: pieces, IslandsConfig(**fields))
    outer.begin(0)
    return outer, pieces[0].view


def take(outer, weights, step):
    """End a round in which all weights have changed."""
    weights -= torch.linspace(0.1, 0.5, weights.numel()).view(weights.shape) * step
    outer.take(outer.changes(None), step, None)
    return weights.clone()


@pytest.mark.parametrize(
    "fields",
    [{}, {"outer_momentum": 0.0, "outer_lr": 1.0}, {"outer_optimizer": OuterRule.adam, "outer_lr": 0.01}],
    ids=["nesterov", "averaging", "adam"],
)
def test_a_round_after_a_resume_is_the_round_that_would_have_been(fields):
    whole, weights = begun(**fields)
    take(whole, weights, 1)
    kept = [replace(piece, view=piece.view.clone()) for piece in whole.pieces()]
    resumed, other_weights = begun(**fields)
    other_weights.copy_(weights)
    for piece, saved in zip(resumed.pieces(), kept, strict=True):
        assert (piece.name, piece.key) == (saved.name, saved.key)
        piece.view.copy_(saved.view)
    resumed.after_load()
    resumed.begin(1)
    assert resumed.step == 1
    assert resumed.digest() == whole.digest()
    assert torch.equal(take(resumed, other_weights, 2), take(whole, weights, 2))


def test_adam_is_that_of_the_paper():
    """FedAdam, without correction of the bias (Reddi et al. 2021, Algorithm 2)."""
    rate, beta1, beta2, eps = 0.01, 0.9, 0.99, 1e-3
    outer, weights = begun(outer_optimizer=OuterRule.adam, outer_lr=rate, outer_momentum=beta1)
    wanted = weights.double().clone()
    mean, square = torch.zeros_like(wanted), torch.zeros_like(wanted)
    for step in (1, 2):
        change = torch.linspace(0.1, 0.5, weights.numel()).double().view(weights.shape) * step
        mean = beta1 * mean + (1 - beta1) * change
        square = beta2 * square + (1 - beta2) * change**2
        wanted = wanted - rate * mean / (square.sqrt() + eps)
        torch.testing.assert_close(take(outer, weights, step).double(), wanted, rtol=1e-6, atol=1e-6)
