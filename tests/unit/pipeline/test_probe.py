"""What a few tokens tell about a model before training: what must travel, and why it cannot be split."""

import pytest
import torch

from hfdist.pipeline.probe import probe
from hfdist.pipeline.stage_io import CARRIES, Carry
from tests.unit.pipeline import toys
from tests.unit.pipeline.staging import Loopback, cut_stages
from tests.unit.pipeline.toys import HALVES, HIDDEN, LAST, NEEDED, QUARTERS, REFUSED, THIRDS, make_toy, toy_batch


def probe_all(make, stages, carry):
    """The findings of all stages of a pipeline."""
    link = Loopback()
    return [probe(cut, carry, toy_batch(), link) for cut in cut_stages(make, stages, carry)]


def problems(kind, carry=HIDDEN, stages=HALVES):
    return [finding.problem for finding in probe_all(lambda: make_toy(kind), stages, carry) if finding.problem]


@pytest.mark.parametrize("kind", NEEDED)
def test_the_least_that_must_travel_is_found(kind):
    for carry in CARRIES:
        if not problems(kind, carry, QUARTERS):
            assert carry == NEEDED[kind]
            return
    pytest.fail("refused")


REASONS = {
    toys.Twice: "the model does not run its blocks once each and in order, block 0 after block 0",
    toys.Backwards: "the model does not run its blocks once each and in order, block 3 first",
    toys.Reversible: "the outputs of its blocks carry no autograd graph",
    toys.Detaches: "no gradient flows back through its blocks",
    toys.Stops: "the model ends before it has called all its blocks",
    toys.SideChannel: "TypeError: unsupported operand",
}


@pytest.mark.parametrize("carry", [CARRIES[0], CARRIES[-1]], ids=Carry.describe)
@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_cannot_be_split_are_refused_with_the_reason(kind, carry):
    found = problems(kind, carry, THIRDS)
    # The ranks after the one that noticed have nothing to say.
    assert len(found) == 1
    assert REASONS[kind] in found[0]


def test_a_loss_that_needs_more_than_what_travels():
    for kind in (toys.SecondOutput, toys.UNet, toys.EmbedsAgain):
        assert problems(kind) == ["its loss needs more than what travels (NaN stands for the rest, and reached it)"]


def test_each_rank_learns_which_parameters_around_the_blocks_it_needs():
    first, middle, last = probe_all(make_toy, THIRDS, HIDDEN)
    assert first.needed == {"embedding.weight"}
    assert middle.needed == set()
    assert last.needed == {"norm.weight", "norm.bias", "head.weight"}
    between = [finding.needed for finding in probe_all(lambda: make_toy(toys.LearnsBetween), THIRDS, HIDDEN)]
    assert [("between.weight" in needed) for needed in between] == [False, True, True]


def test_a_tied_head_is_needed_on_both_ends():
    first, middle, last = probe_all(lambda: make_toy(tie_word_embeddings=True), THIRDS, HIDDEN)
    assert "embedding.weight" in first.needed & last.needed
    assert not middle.needed


def test_frozen_parameters_are_found_and_stay_frozen():
    cuts = cut_stages(make_toy, HALVES, HIDDEN)
    link = Loopback()
    for cut in cuts:
        cut.model.eval()
        cut.model.requires_grad_(False)
        finding = probe(cut, HIDDEN, toy_batch(), link)
        assert finding.problem is None
        assert finding.needed
        assert not any(parameter.requires_grad for parameter in cut.model.parameters())
        assert not cut.model.training


def test_probing_changes_neither_gradients_nor_the_random_state():
    before = torch.random.get_rng_state()
    cuts = cut_stages(lambda: make_toy(toys.Tuples), HALVES, HIDDEN)
    torch.random.set_rng_state(before)
    link = Loopback()
    for cut in cuts:
        for block in cut.blocks:
            block[0].linear.register_forward_hook(lambda module, args, output: torch.dropout(output, 0.1, train=True))
        probe(cut, LAST, toy_batch(), link)
        assert all(parameter.grad is None for parameter in cut.model.parameters())
    assert torch.equal(torch.random.get_rng_state(), before)
