"""Experts in 4 bits: those of each type are packed and compute as PEFT does over dequantized ones, or are known."""

import pytest

from tests.zoo.packing import pack_type

pytestmark = pytest.mark.zoo

LEFT = {"dbrx", "jetmoe", "llama4", "llama4_text", "longcat_flash"}
"""They compute experts by themselves, and not by an implementation that transformers lets us choose."""
SOME = ("aria_text", "deepseek_v32", "gpt_oss", "jamba", "llama4_text", "mixtral", "nemotron_h")
"""Matrices with both orders of their sides, biases, no gate; layers whose weight the model's own code reads."""


@pytest.mark.parametrize("kind", SOME)
def test_packed_experts_compute_as_dequantized_ones(kind):
    packed = pack_type(kind)
    assert packed.verdict == ("left" if kind in LEFT else "exact"), packed


@pytest.mark.many
def test_every_type(model_type):
    packed = pack_type(model_type)
    assert packed.verdict in (["left"] if model_type in LEFT else ["exact", "no experts"]), packed
