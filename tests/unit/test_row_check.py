"""Rows that a model cannot read are named before the training."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel

from hfdist.errors import ConfigError
from hfdist.models.flops import measure_size
from hfdist.strategies.tensor.layers import split_vocabulary
from hfdist.trainer.row_check import check_is_dataset, check_lengths, check_rows

ROW = {"input_ids": [63, 0]}


class OwnModel(PreTrainedModel):
    """Its embedding has a name that transformers does not look for."""

    config_class = PreTrainedConfig

    def __init__(self):
        super().__init__(PreTrainedConfig())
        self.letters = nn.Embedding(4, 2)

    def forward(self, input_ids):
        return self.letters(input_ids)


class RandomRows(torch.utils.data.Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, place):
        return {"input_ids": torch.randint(np.random.randint(1, 9), (4,)) + random.randrange(9)}


def llama():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([{"input_ids": []}, ROW, {"input_ids": [1, 64]}], "64 in row 2"),
        ([{"text": "a", "label": 1}], "text, label"),
        ([], "0 rows"),
        ({"train": [ROW], "test": [ROW]}, "train, test"),
    ],
)
def test_rows_that_the_model_cannot_read_are_named(rows, found):
    with pytest.raises(ConfigError) as caught:
        check_rows(rows, llama(), collates_itself=False)
    assert caught.value.found == found


def test_a_path_is_no_dataset():
    with pytest.raises(ConfigError, match="no path"):
        check_is_dataset("rows.jsonl", "eval_dataset")


def test_rows_of_different_lengths_are_named_where_nothing_pads_them():
    with pytest.raises(ConfigError) as caught:
        check_lengths([ROW, {"input_ids": [1, 2, 3]}])
    assert caught.value.found == "2 to 3 tokens"


def test_a_model_whose_embedding_is_not_known_is_taken_as_it_is():
    model = OwnModel()
    check_rows([ROW], model, collates_itself=False)
    # A table that is looked up multiplies nothing, whatever its name.
    assert measure_size(model).num_multiplying == 0
    assert split_vocabulary(model, 2) == {}


def test_looking_at_random_rows_draws_nothing_from_the_generators_of_the_training():
    def draw(look):
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(0)
        look()
        return random.random(), np.random.rand(), float(torch.rand(1))

    def look():
        check_lengths(RandomRows())
        check_rows(RandomRows(), llama_once, collates_itself=False)

    llama_once = llama()
    assert draw(look) == draw(lambda: None)
