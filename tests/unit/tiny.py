"""A Llama that is small enough for a unit test."""

from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


def llama(kind=LlamaForCausalLM, **fields):
    return kind(LlamaConfig(**SIZES | fields))
