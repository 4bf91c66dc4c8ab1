"""Rows that a model cannot read are named before the training."""

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from hfdist.errors import ConfigError
from hfdist.trainer.row_check import check_rows


def test_a_token_that_the_model_lacks_is_named_with_its_row():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    rows = [{"input_ids": []}, {"input_ids": [63, 0]}, {"input_ids": [1, 64]}]
    with pytest.raises(ConfigError) as caught:
        check_rows(rows, LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)), collates_itself=False)
    assert caught.value.found == "64 in row 2"
