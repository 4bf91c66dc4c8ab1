"""Shrinking a config: sizes become small, structure stays, and fields that depend on each other still agree."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from hfdist.errors import ConfigError
from hfdist.models.flops import num_parameters
from hfdist.models.shrink import shrink
from tests.zoo.models import special_token_ids

SCALED_ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}  # fmt: skip
# As published models are configured.
LLAMA_405B = {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128,
              "num_key_value_heads": 8, "vocab_size": 128256, "bos_token_id": 128000, "eos_token_id": [128001, 128009],
              "max_position_embeddings": 131072, "rope_parameters": SCALED_ROPE}  # fmt: skip
PHI3_128K = {"hidden_size": 3072, "num_attention_heads": 32, "max_position_embeddings": 131072,
             "original_max_position_embeddings": 4096, "rope_parameters": {
                 "rope_type": "longrope", "rope_theta": 1e4, "long_factor": [2.0] * 48, "short_factor": [1.0] * 48,
                 "original_max_position_embeddings": 4096}}  # fmt: skip
KIMI_LINEAR = {"linear_attn_config": {"full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32,
               "kda_layers": [i for i in range(1, 27) if i % 4], "short_conv_kernel_size": 4}}  # fmt: skip


def small(model_type, num_blocks=None, **fields):
    return shrink(AutoConfig.for_model(model_type, **fields), num_blocks=num_blocks)


def trained_step(config):
    """The loss of a random model of `config`, whose gradients are finite."""
    torch.manual_seed(0)
    config.use_cache = False
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    assert num_parameters(model) <= 2_000_000
    ids = torch.randint(config.get_text_config().vocab_size // 2, (2, 16)) + 1
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    return loss


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("llama", LLAMA_405B),
        ("phi3", PHI3_128K),
        ("kimi_linear", KIMI_LINEAR),
        ("deepseek_v3", {}),
        ("gpt2", {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
    ],
)
def test_published_models_train_small(model_type, fields):
    assert trained_step(small(model_type, **fields)).isfinite()


def test_sizes_shrink_and_structure_stays():
    config = AutoConfig.for_model("llama", **LLAMA_405B, tie_word_embeddings=True, hidden_act="gelu", mlp_bias=True)
    before = config.to_dict()
    tiny = shrink(config, vocab_size=100)
    assert config.to_dict() == before
    assert (tiny.hidden_size, tiny.num_hidden_layers, tiny.vocab_size) == (64, 4, 100)
    assert (tiny.num_attention_heads, tiny.num_key_value_heads, tiny.head_dim) == (4, 2, 16)
    assert (tiny.tie_word_embeddings, tiny.hidden_act, tiny.mlp_bias) == (True, "gelu", True)
    assert tiny.rope_parameters["rope_type"] == "llama3"
    # The same proportion to the limit of positions.
    assert tiny.rope_parameters["original_max_position_embeddings"] * 16 == tiny.max_position_embeddings
    assert all(0 <= i < 100 for i in special_token_ids(tiny))


@pytest.mark.parametrize(("keys", "small_keys"), [(32, 4), (8, 2), (1, 1)])
def test_attention_stays_multi_head_grouped_or_multi_query(keys, small_keys):
    assert small("mistral", num_attention_heads=32, num_key_value_heads=keys).num_key_value_heads == small_keys


def test_a_model_stays_as_it_is_when_its_config_is_made_small():
    """A class may write into the configs that it is made of, which the model reads at each forward."""
    config = AutoConfig.for_model("blt")
    config._attn_implementation = "eager"
    shrink(config)
    assert config.encoder_config._attn_implementation == "eager"


class TestBlocks:
    KINDS = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 12

    @pytest.mark.parametrize(
        ("num_blocks", "attending"), [(2, [1]), (4, [2, 3]), (6, [3, 5]), (8, [3, 7]), (60, range(3, 60, 4))]
    )
    def test_two_of_each_kind_where_there_is_room(self, num_blocks, attending):
        tiny = small("qwen3_next", num_blocks, layer_types=self.KINDS)
        assert [i for i, kind in enumerate(tiny.layer_types) if kind == "full_attention"] == list(attending)
        assert len(tiny.layer_types) == tiny.num_hidden_layers == num_blocks

    def test_lists_over_blocks_stay_aligned(self):
        layer_types = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 12
        mlp_layer_types = ["dense"] * 3 + ["sparse"] * 45
        tiny = small("exaone_moe", 6, num_hidden_layers=48, mlp_layer_types=mlp_layer_types, layer_types=layer_types)
        kept = list(zip(tiny.mlp_layer_types, tiny.layer_types, strict=True))
        dense, sliding, full = (
            ("dense", "sliding_attention"),
            ("sparse", "sliding_attention"),
            ("sparse", "full_attention"),
        )
        assert kept == [dense, dense, full, sliding, sliding, full]

    def test_patterns(self):
        tiny = small("gpt_neo", 6, num_layers=24, attention_types=[[["global", "local"], 12]])
        assert tiny.attention_layers == ["global", "local"] * 3


def test_towers_are_small_and_the_language_model_gets_the_blocks():
    tiny = small("gemma3", 3)
    assert tiny.text_config.num_hidden_layers == 3
    assert tiny.vision_config.num_hidden_layers == 2
    assert tiny.vision_config.hidden_size == 64
    assert tiny.image_token_index in special_token_ids(tiny)
    assert tiny.image_token_index < tiny.text_config.vocab_size


def test_rotary_sections_fill_the_rotated_part_of_a_head():
    rope = {"rope_type": "default", "rope_theta": 1e7, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25}
    tiny = small("qwen3_5_text", rope_parameters=rope).rope_parameters
    assert sum(tiny["mrope_section"]) == 16 * tiny["partial_rotary_factor"] / 2
    assert len(tiny["mrope_section"]) == 3


def test_configs_of_the_older_kind():
    class OldConfig(PreTrainedConfig):
        model_type = "old"

        def __init__(self, hidden_size=4096, num_attention_heads=32, head_dim=None, num_layers=30, **kwargs):
            self.hidden_size, self.num_attention_heads, self.num_layers = hidden_size, num_attention_heads, num_layers
            self.head_dim = head_dim or hidden_size // num_attention_heads
            super().__init__(**kwargs)

    tiny = shrink(OldConfig(hidden_size=2048))
    assert (tiny.hidden_size, tiny.num_attention_heads, tiny.head_dim, tiny.num_layers) == (64, 4, 16, 4)


def test_what_a_class_refuses_is_one_message():
    """Its kinds of blocks cut heads into parts that differ by more than small heads can."""
    with pytest.raises(ConfigError, match="SWA head_dim must equal") as caught:
        small("dots3_note_text", 4)
    assert "Dots3NoteTextConfig, num_blocks=4" in str(caught.value)
