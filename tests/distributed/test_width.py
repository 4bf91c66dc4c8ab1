"""`optimizer.base_width` scales the rate of hidden matrices alone, in every layout and over a change of the layout."""

import pytest
import torch

from tests.distributed.runs import losses, pretrain, weights
from tests.marks import many

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("cache_dir", "short_library")]

# A quarter of the model's width.
BASE = "optimizer.base_width=16"
STEPS = ("train.max_steps=8", "optimizer.lr=1e-2", "optimizer.schedule=constant", "checkpoint=default",
         "checkpoint.every=4", "checkpoint.allow_changes=true", "train.micro_batch_size=2")  # fmt: skip


@pytest.fixture(scope="module")
def single(tmp_path_factory, cache_dir, short_library):
    return pretrain(tmp_path_factory.mktemp("single"), 1, *STEPS, BASE)


def assert_same(run, reference):
    assert losses(run) == pytest.approx(losses(reference), rel=1e-5)
    ours, theirs = weights(run), weights(reference)
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert (ours[name] - expected).norm() / expected.norm() < 1e-5, name


def test_the_first_step_of_hidden_matrices_is_shorter_and_no_others(tmp_path):
    """AdamW's first step is as long as the rate, wherever there is a gradient."""
    one_step = ("train.max_steps=1", "optimizer.lr=1e-2", "optimizer.warmup_steps=0", "optimizer.schedule=constant",
                "optimizer.weight_decay=0")  # fmt: skip
    plain = weights(pretrain(tmp_path / "plain", 1, *one_step))
    scaled = weights(pretrain(tmp_path / "scaled", 1, *one_step, BASE))
    shorter = {name for name in plain if not torch.equal(plain[name], scaled[name])}
    assert shorter == {name for name in plain if "_proj" in name}
    for name in shorter:
        difference = (plain[name] - scaled[name]).abs()
        assert float(difference.median()) == pytest.approx(0.75 * 1e-2, rel=1e-3), name


@pytest.mark.parametrize(
    ("strategy", "processes"),
    [
        many("ddp", 2),
        # A run goes on from the one to the other, below.
        many("zero1", 2),
        many("pipeline", 2),
        many("zero3", 2),
        many("fsdp2", 2),
        many("tensor", 2),
        many("pipeline_zero1", 4),
    ],
)
def test_layouts_train_as_one_process(single, tmp_path, strategy, processes):
    assert_same(pretrain(tmp_path, processes, f"strategy={strategy}", *STEPS, BASE), single)


def test_a_resume_in_another_layout_goes_on_with_the_same_rates(single, tmp_path):
    pretrain(tmp_path, 2, "strategy=zero1", *STEPS, BASE, "train.max_steps=4")
    pretrain(tmp_path, 2, "strategy=pipeline", *STEPS, BASE)
    assert_same(tmp_path, single)
