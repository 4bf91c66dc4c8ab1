"""Blocks are compiled by themselves only where they are found and a compiler works."""

import logging

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hfdist.models.blocks import can_compile_blocks

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}


def test_a_compiler_that_fails_means_nothing_is_compiled(caplog):
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    assert can_compile_blocks(model, torch.device("cpu"))
    with caplog.at_level(logging.WARNING, "hfdist"):
        assert not can_compile_blocks(model, torch.device("cuda", 99))
        model.model.layers = nn.Identity()
        assert not can_compile_blocks(model, torch.device("cpu"))
    said = [record.message for record in caplog.records if record.name == "hfdist.models.blocks"]
    assert [line.split(",")[0] for line in said] == ["train.compile: nothing is compiled"] * 2
    assert "blocks cannot be found" in said[1]
