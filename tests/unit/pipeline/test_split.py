"""What a rank keeps of a model: its own blocks, and around them only what can run there."""

import pytest
import torch
from torch import nn

from hfdist.models.blocks import find_block_parts
from hfdist.pipeline.split import Removed, split_at_blocks
from hfdist.pipeline.stage_io import CARRIES
from tests.unit.pipeline import toys
from tests.unit.pipeline.toys import EMBEDDING, HIDDEN, THIRDS, make_toy

NORM = {"norm.weight", "norm.bias"}


def cut(model, *mine, stages=THIRDS):
    return split_at_blocks(model, find_block_parts(model), stages, mine)


def names(cut):
    return {name for name, _ in cut.model.named_parameters(remove_duplicate=False)}


def in_blocks(*indices):
    return {f"blocks.{index}.linear.{name}" for index in indices for name in ("weight", "bias")}


@pytest.mark.parametrize(
    ("mine", "blocks", "untied", "tied"),
    [
        ([0], [0], {"embedding.weight"}, {"embedding.weight", "head.weight"}),
        ([1], [1, 2], set(), set()),
        ([2], [3], {"head.weight"}, {"embedding.weight", "head.weight"}),
        # In a V the first and the last stage share a rank.
        ([0, 2], [0, 3], {"embedding.weight", "head.weight"}, {"embedding.weight", "head.weight"}),
    ],
)
def test_each_rank_keeps_its_blocks_and_its_end_of_the_model(mine, blocks, untied, tied):
    assert names(cut(make_toy(), *mine)) == in_blocks(*blocks) | NORM | untied
    model = make_toy(tie_word_embeddings=True)
    kept = cut(model, *mine)
    assert names(kept) == in_blocks(*blocks) | NORM | tied
    assert (kept.model.head.weight is kept.model.embedding.weight) or not tied
    assert kept.model is model


def test_nothing_is_read_or_copied():
    with torch.device("meta"):
        shapeless = toys.Toy(toys.ToyConfig(tie_word_embeddings=False))
    assert names(cut(shapeless, 1)) == in_blocks(1, 2) | NORM
    model = make_toy()
    held = model.blocks[1].linear.weight
    assert cut(model, 1).model.blocks[1].linear.weight is held


def test_modules_that_blocks_share_stay_with_every_stage():
    model = make_toy()
    shared = nn.Linear(8, 8)
    for block in model.blocks:
        block.shared = shared
    kept = cut(model, 1)
    assert kept.model.blocks[1].shared.weight is shared.weight
    assert shared.weight is not None
    assert kept.model.blocks[0].linear.weight is None


def test_parameters_that_blocks_share_with_what_surrounds_them_stay():
    model = make_toy()
    for block in model.blocks:
        block.linear.bias = model.norm.bias
    kept = cut(model, 1)
    assert kept.model.blocks[0].linear.bias is kept.model.norm.bias
    assert kept.model.blocks[0].linear.weight is None


def test_buffers_of_other_stages_go_unless_code_makes_them():
    model = make_toy()
    for block in model.blocks:
        block.register_buffer("saved", torch.ones(3))
        block.register_buffer("computed", torch.ones(3), persistent=False)
    kept = cut(model, 1).model
    assert [block.saved is None for block in kept.blocks] == [True, False, False, True]
    assert all(block.computed is not None for block in kept.blocks)


def test_removed_parameters_are_known_and_can_be_held_again():
    model = make_toy()
    model.norm.weight.requires_grad_(False)
    kept = cut(model, 1)
    kept.remove(["norm.weight"])
    assert kept.model.norm.weight is None
    assert kept.removed["norm.weight"] == Removed(torch.Size((8,)), torch.float32, False, ("norm.weight",))
    value = torch.rand(8)
    kept.restore("norm.weight", value)
    assert torch.equal(kept.model.norm.weight, value)
    assert isinstance(kept.model.norm.weight, nn.Parameter)
    assert not kept.model.norm.weight.requires_grad
    assert set(kept.removed) == {"embedding.weight", "head.weight"}


@pytest.mark.parametrize("asked", ["embedding.weight", "head.weight"])
def test_tied_parameters_go_and_come_back_together(asked):
    kept = cut(make_toy(tie_word_embeddings=True), 1)
    assert set(kept.removed) == {"embedding.weight", "head.weight"}
    assert kept.removed[asked].names == ("embedding.weight", "head.weight")
    kept.restore(asked, torch.rand(32, 8))
    assert kept.model.embedding.weight is kept.model.head.weight
    assert kept.removed == {}
    kept.remove([asked])
    assert kept.model.embedding.weight is None
    assert kept.model.head.weight is None


@pytest.mark.parametrize(("carry", "is_poison"), [(HIDDEN, True), (EMBEDDING, False)])
def test_an_embedding_held_for_the_head_is_looked_up_only_where_it_may_travel(carry, is_poison):
    kept = cut(make_toy(tie_word_embeddings=True), 2)
    view = kept.stage_module(2, carry).model
    assert view.embedding.weight.isnan().all() == is_poison
    assert torch.isfinite(view.head.weight).all()
    assert view.head.weight is kept.model.head.weight


def test_in_a_v_only_the_first_stage_looks_up_the_embedding():
    kept = cut(make_toy(), 0, 2)
    assert kept.stage_module(0, HIDDEN).model.embedding.weight is kept.model.embedding.weight
    assert kept.stage_module(2, HIDDEN).model.embedding.weight.isnan().all()


@pytest.mark.parametrize("frozen", ["", "embedding", "blocks"])
def test_what_is_not_held_has_the_type_of_the_rest_once_that_is_converted(frozen):
    """Models take the type of their arithmetic, as of rotary positions, from what the embedding gives."""
    model = make_toy().to(torch.bfloat16)
    if frozen:
        model.get_submodule(frozen).requires_grad_(False)
    kept = cut(model, 1)
    model.to(torch.float32)
    assert {kept.type_of(removed) for removed in kept.removed.values()} == {torch.float32}
    view = kept.stage_module(1, CARRIES[0])
    assert view.model.embedding.weight.dtype is torch.float32
