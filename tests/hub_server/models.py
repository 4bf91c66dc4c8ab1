"""Tiny models with random weights as folders, to be served."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hfdist.models.tokenizer import train_bpe

TEXTS = ["def add(left, right):\n    return left + right\n", "class Empty:\n    pass\n"] * 20


def write_model(folder: Path, *, max_shard_size: str = "1GB") -> Path:
    """A Llama of two blocks, with its tokenizer."""
    tokenizer = train_bpe(TEXTS, 300)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size=max_shard_size)
    tokenizer.save_pretrained(folder)
    return folder
