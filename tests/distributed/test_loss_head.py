"""A loss without whole logits trains as one from all of them, in every layout."""

from contextlib import contextmanager
from functools import cache

import pytest
from torch.nn import functional

from hfdist.models.loss import chunked
from tests.distributed.runs import eval_losses, losses, pretrain, weights
from tests.marks import many

pytestmark = pytest.mark.distributed

SHORT = ("train.max_steps=4", "train.micro_batch_size=2", "train.eval_every=4", "model.config.num_hidden_layers=4",
         "data.sequence_length=32")  # fmt: skip
VOCABULARY = 1024
CHUNK = 50 * VOCABULARY
UNTIED = "model.config.tie_word_embeddings=false"
CASES = {
    "tied": (),
    "head alone": (UNTIED,),
    "frozen head": (UNTIED, "train.freeze=[lm_head.*]"),
    "adapter on the head": (UNTIED, "adapter=lora", "adapter.targets=[q_proj,lm_head]", "adapter.merge=false"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, cache_dir):
    """The reference: one process, and all logits."""

    @cache
    def train(name):
        folder = tmp_path_factory.mktemp("whole")
        return pretrain(folder, 1, "strategy=single", "model.loss=full", *SHORT, *CASES[name])

    return train


@contextmanager
def small_chunks():
    """Several chunks of a micro batch, of which the last is smaller; more logits at a time end the run."""
    linear = functional.linear

    def limited(hidden, weight, bias=None):
        out = linear(hidden, weight, bias)
        assert len(weight) < VOCABULARY or out.numel() <= CHUNK, f"{out.numel()} logits at a time"
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(chunked.CHUNK_LOGITS, "cpu", CHUNK)
        patch.setattr(chunked, "LEAST_ROWS", 1)
        patch.setattr(functional, "linear", limited)
        yield


@pytest.mark.parametrize(
    ("case", "strategy", "num_processes", "more"),
    [
        ("tied", "single", 1, ("train.gradient_checkpointing=true",)),
        many("adapter on the head", "fsdp2", 2, ()),
        many("tied", "zero3", 2, ()),
        many("tied", "pipeline", 2, ("strategy.schedule=zbv",)),
        many("head alone", "pipeline", 2, ("strategy.schedule=interleaved_zero_bubble",)),
        many("frozen head", "zero3", 2, ()),
        ("adapter on the head", "zero3", 2, ("model.loss=auto",)),
    ],
)
def test_trains_as_with_whole_logits(whole, tmp_path, case, strategy, num_processes, more):
    overrides = ("model.loss=chunked", *SHORT, *CASES[case], *more)
    with small_chunks():
        run = pretrain(tmp_path, num_processes, f"strategy={strategy}", *overrides)
    assert losses(run) == pytest.approx(losses(whole(case)), rel=1e-6)
    assert eval_losses(run) == pytest.approx(eval_losses(whole(case)), rel=1e-6)
    if "adapter" not in case:
        reference = weights(whole(case))
        for name, value in weights(run).items():
            assert (value - reference[name]).norm() <= 1e-5 * reference[name].norm(), name


def test_whole_logits_are_noticed(cache_dir, tmp_path):
    with small_chunks(), pytest.raises(Exception, match="logits at a time"):
        pretrain(tmp_path, 1, "strategy=single", "model.loss=full", *SHORT)


def test_same_under_bfloat16_but_for_rounding(cache_dir, tmp_path):
    settings = ("strategy=single", "train.precision=bf16", *SHORT)
    with small_chunks():
        chunked = pretrain(tmp_path / "chunked", 1, *settings, "model.loss=chunked")
    full = pretrain(tmp_path / "full", 1, *settings, "model.loss=full")
    assert losses(chunked) == pytest.approx(losses(full), rel=1e-3)
    assert losses(chunked) != losses(full)
