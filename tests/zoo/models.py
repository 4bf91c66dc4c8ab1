"""Tiny random models of every type in transformers' causal language model mapping, and batches for them."""

from __future__ import annotations

import re

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, SiglipVisionConfig
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hfdist.models.initialize import initialize_by_name
from hfdist.models.shrink import shrink
from hfdist.models.small_fields import SPECIAL_TOKENS

NOT_BUILDABLE = {
    "gemma4_assistant": "its default config fails its own check, and its forward needs another model's keys and values",
    "gemma4_unified_assistant": "its forward needs the embeddings, keys and values of the model that it assists",
}

TYPES = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(NOT_BUILDABLE))

# What quick runs try: the ways of mixing tokens, routing, sharing, scaling and tying that a split can trip over.
SAMPLE = ["bart", "bloom", "blt", "deepseek_v3", "gemma3", "gemma4_text", "gpt2", "gpt_oss", "mixtral", "prophetnet",
          "reformer", "zamba2"]  # fmt: skip
SHARDED_SAMPLE = {
    "fsdp2": ["bart", "gemma4_text", "gpt2", "mixtral", "zamba2"],
    "tensor": ["bart", "deepseek_v3", "gemma4_text", "zamba2"],
    "context": ["bart", "deepseek_v3", "gemma4_text", "zamba2"],
    "expert": ["deepseek_v3", "gpt2", "gpt_oss", "mixtral"],
    "pipeline": ["bart", "gemma4_text", "gpt2", "mixtral", "reformer"],
}
"""By axis: what its plan tells apart, and a type that is refused. proofs/mesh_runs.py trains some in several axes."""

_DOTS3_NOTE = {"head_dim": 192, "swa_head_dim": 192, "swa_qk_nope_head_dim": 128}
_QWEN4_EXP = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "ple_layer_ids": [2],
    "eos_token_id": 1,
}
_COHERE_COMPASS = {
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "num_hidden_layers": 4,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [24, 20, 20]},
        "full_attention": None,
    },
}
_SHARED_KEYS = {
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 3,
}

# Fields that the default config of a type lacks or has wrong, at full size.
FIELDS: dict[str, dict[str, object]] = {
    # The defaults of these hybrids have blocks of one kind only.
    "bamba": {"attn_layer_indices": [1, 4, 7]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 16},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    # Block-sparse attention is for encoders.
    "big_bird": {"attention_type": "original_full"},
    # The default has no rotary parameters for its kinds of blocks, and one kind only.
    "cohere_compass": {"text_config": _COHERE_COMPASS},
    "cohere_compass_text": _COHERE_COMPASS,
    # Its attention reads a field that the attention's config lacks.
    "dbrx": {"attn_config": {"kv_n_heads": 8, "clip_qkv": 8.0, "rope_theta": 10000.0}},
    # The defaults say nothing of kinds of blocks, or which features go to which block.
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", *["sparse"] * 31]}},
    "granite4_vision": {"downsample_rate": "1/2", "deepstack_layer_map": [[-2, 0], [-1, 1]]},
    # The defaults route to no expert.
    "deepseek_v2": {"num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "dots1": {"n_shared_experts": 2, "n_routed_experts": 128, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
    # By default the parts of a head differ between kinds of blocks in a way that small heads cannot.
    "dots3_note": {"text_config": _DOTS3_NOTE},
    "dots3_note_text": _DOTS3_NOTE,
    # Alternating, so that in six blocks some of both kinds take keys and values from earlier ones.
    "gemma3n": {"text_config": _SHARED_KEYS},
    "gemma3n_text": _SHARED_KEYS,
    "gemma4": {"text_config": _SHARED_KEYS, "vision_config": {"model_type": "gemma4_vision"}},
    "gemma4_text": _SHARED_KEYS,
    # The defaults give no size of heads.
    "glm4v_moe": {"text_config": {"head_dim": 128}},
    "hunyuan_vl": {"text_config": {"head_dim": 128}},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    # The default does not say which blocks attend.
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    # The default gives no number of heads for keys.
    "nemotron": {"num_key_value_heads": 8},
    # The defaults give no indexer, and no block that reads n-grams of the input.
    "qwen4_exp": {"text_config": _QWEN4_EXP},
    "qwen4_exp_text": _QWEN4_EXP,
    # Axial positions allow one length only; random hashes would differ from run to run.
    "reformer": {"axial_pos_embds": False, "hash_seed": 0},
    "xlm": {"causal": True},
    "xmod": {"default_language": "en_XX"},
}

# Types whose config holds more than the language model, and the part that its class takes.
PARTS = {"musicgen": "decoder", "musicgen_melody": "decoder"}

# Types with weights that no rule of their model sets, only the constructors of their modules.
INITIALIZED_BY_CONSTRUCTORS = {"openai-gpt"}

DROPOUTS = r"\w*(drop|jitter_noise)\w*"


def full_config(model_type: str) -> PreTrainedConfig:
    """Give the type's default config at full size, mended where it cannot train."""
    fields = FIELDS.get(model_type, {})
    if hasattr(AutoConfig.for_model(model_type), "is_decoder"):
        # BERT and its kin look ahead otherwise.
        fields = fields | {"is_decoder": True}
    config = AutoConfig.for_model(model_type, **fields)
    return getattr(config, PARTS[model_type]) if model_type in PARTS else config


def tiny_config(model_type: str, num_blocks: int = 6) -> PreTrainedConfig:
    """Give a config with `num_blocks` narrow blocks of all the type's kinds; no dropout, cache or router loss."""
    config = shrink(full_config(model_type), num_blocks=num_blocks)
    switch_off(config)
    if model_type == "gemma3n":
        # Its own tower comes from timm, which hfdist does not need; the config's check lets no other through.
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        tower = SiglipVisionConfig(**sizes, image_size=32, rms_norm_eps=1e-6, vocab_size=128, vocab_offset=256)
        vars(config)["vision_config"] = tower
    return config


def make_model(model_type: str, config: PreTrainedConfig, attention: str = "eager") -> PreTrainedModel:
    """Give the type's causal language model as its constructors leave it."""
    if model_type in PARTS:
        model_class = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
        return model_class._from_config(config, attn_implementation=attention)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def tiny_model(
    model_type: str, num_blocks: int = 6, *, seed: int = 0, attention: str = "eager", **fields: object
) -> PreTrainedModel:
    """Give a model of the type on the CPU, in float32 and train mode, with random weights; `fields`: of its config."""
    config = tiny_config(model_type, num_blocks)
    config.update(fields)
    if model_type in INITIALIZED_BY_CONSTRUCTORS:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return make_model(model_type, config, attention).train()
    with no_init_weights():
        model = make_model(model_type, config, attention)
    model.tie_weights()
    initialize_by_name(model, seed)
    return model.train()


def special_token_ids(config: PreTrainedConfig) -> set[int]:
    """Give the ids that mean something else than text anywhere in `config`: ends, padding, places of images."""
    found: set[int] = set()
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            found |= special_token_ids(value)
        elif re.fullmatch(SPECIAL_TOKENS, name):
            found |= {i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)}
    return found


def tiny_batch(
    model: PreTrainedModel, sequences: int = 2, tokens: int = 16, *, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Give random arguments for `model(**batch).loss`.

    Args:
        model: from `tiny_model`.
        sequences: first axis of `input_ids` and `labels`.
        tokens: second axis; a multiple of 8 for reformer.
        seed: of the tokens.
    """
    random = torch.Generator().manual_seed(seed)
    config = model.config
    vocab_size = config.get_text_config(decoder=True).vocab_size
    ordinary = torch.tensor(sorted(set(range(vocab_size)) - special_token_ids(config)))
    if config.model_type.startswith("musicgen"):
        # A row of the input for each codebook.
        labels = ordinary[torch.randint(len(ordinary), (sequences, tokens, config.num_codebooks), generator=random)]
        input_ids = labels.permute(0, 2, 1).reshape(-1, tokens)
    else:
        labels = input_ids = ordinary[torch.randint(len(ordinary), (sequences, tokens), generator=random)]
    batch = {"input_ids": input_ids, "labels": labels, "attention_mask": torch.ones(sequences, tokens).long()}
    if config.model_type == "git":
        # Its loss expects the places of an image before the text.
        size = config.vision_config.image_size
        batch["pixel_values"] = torch.randn(sequences, 3, size, size, generator=random)
    return batch


def switch_off(config: PreTrainedConfig) -> None:
    """Take away what makes two runs differ, and what a split cannot have."""
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            switch_off(value)
        elif isinstance(value, float) and re.fullmatch(DROPOUTS, name):
            setattr(config, name, 0.0)
        elif name in ("use_cache", "output_router_logits"):
            setattr(config, name, False)
