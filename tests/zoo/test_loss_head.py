"""Which types train without whole logits: nearly all, and the others say so; none comes out differently."""

import pytest

from hfdist.models.loss import why_model_needs_logits
from tests.zoo.models import tiny_model

pytestmark = pytest.mark.zoo

NEED_LOGITS = {"prophetnet", "inkling2_text"}
"""They index their logits by hand."""
MANY_HEADS = {"musicgen", "musicgen_melody"}
SOME = ("cohere2", "falcon_mamba", "gemma2", "gpt2", "granitemoehybrid", "llama", "opt", "prophetnet", "qwen3_moe")


def check(model_type):
    reason = why_model_needs_logits(tiny_model(model_type))
    assert (reason is None) == (model_type not in NEED_LOGITS), reason
    assert reason is None or "needs them whole" in reason


@pytest.mark.parametrize("kind", SOME)
def test_scaled_capped_tied_and_biased_heads(kind):
    check(kind)


@pytest.mark.many
def test_every_type(model_type):
    if model_type in MANY_HEADS:
        pytest.skip("its head is a list of heads, which `choose_loss` leaves alone")
    check(model_type)
