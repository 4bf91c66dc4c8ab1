"""A tiny Llama as a GGUF file, written as the usual converter does."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from transformers import AutoModelForCausalLM

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
    "model.layers": "blk",
}


def write_gguf(folder: Path, file: Path, *, without: str | None = None) -> Path:
    """Write the Llama in `folder` with its byte-level BPE, unquantized, and without one weight."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = model.config
    writer = GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, folder)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        rows = tensor.numpy()
        kind = name.split(".")[-2]
        if kind in heads:
            # Rotary pairs stand side by side in these files, and in two halves in transformers.
            rows = rows.reshape(heads[kind], 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
        for ours, theirs in _NAMES.items():
            name = name.replace(ours, theirs)
        if name == without:
            continue
        writer.add_tensor(name, np.ascontiguousarray(rows))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_tokenizer(writer: GGUFWriter, folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(sorted(vocabulary, key=vocabulary.get))
    writer.add_token_types([3 if index in special.values() else 1 for index in range(len(vocabulary))])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    (end,) = special.values()
    writer.add_bos_token_id(end)
    writer.add_eos_token_id(end)
