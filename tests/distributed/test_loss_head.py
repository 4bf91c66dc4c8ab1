"""A loss without whole logits trains as one from all of them, in every layout."""

from functools import cache

import pytest

from hfdist.models.loss import chunked
from tests.distributed.runs import eval_losses, losses, pretrain, weights
from tests.marks import many

pytestmark = pytest.mark.distributed

SHORT = ("train.max_steps=4", "train.micro_batch_size=2", "train.eval_every=4", "model.config.num_hidden_layers=4",
         "data.sequence_length=32")  # fmt: skip
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


@pytest.fixture
def small_chunks(monkeypatch):
    """Several chunks of a micro batch, of which the last is smaller."""
    monkeypatch.setitem(chunked.CHUNK_LOGITS, "cpu", 50 * 1024)
    monkeypatch.setattr(chunked, "LEAST_ROWS", 1)


@pytest.mark.parametrize(
    ("case", "strategy", "num_processes", "more"),
    [
        ("tied", "single", 1, ("train.gradient_checkpointing=true",)),
        many("tied", "zero3", 2, ()),
        ("tied", "pipeline", 2, ("strategy.schedule=zbv",)),
        many("head alone", "pipeline", 2, ("strategy.schedule=interleaved_zero_bubble",)),
        many("frozen head", "zero3", 2, ()),
        ("adapter on the head", "zero3", 2, ("model.loss=auto",)),
    ],
)
def test_trains_as_with_whole_logits(whole, small_chunks, tmp_path, case, strategy, num_processes, more):
    overrides = ("model.loss=chunked", *SHORT, *CASES[case], *more)
    run = pretrain(tmp_path, num_processes, f"strategy={strategy}", *overrides)
    assert losses(run) == pytest.approx(losses(whole(case)), rel=1e-6)
    assert eval_losses(run) == pytest.approx(eval_losses(whole(case)), rel=1e-6)
    if "adapter" not in case:
        reference = weights(whole(case))
        for name, value in weights(run).items():
            assert (value - reference[name]).norm() <= 1e-5 * reference[name].norm(), name


def test_same_under_bfloat16_but_for_rounding(cache_dir, small_chunks, tmp_path):
    settings = ("strategy=single", "train.precision=bf16", *SHORT)
    chunked = pretrain(tmp_path / "chunked", 1, *settings, "model.loss=chunked")
    full = pretrain(tmp_path / "full", 1, *settings, "model.loss=full")
    assert losses(chunked) == pytest.approx(losses(full), rel=1e-3)
    assert losses(chunked) != losses(full)
