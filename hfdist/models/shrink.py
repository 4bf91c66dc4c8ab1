"""A small model's config of the same architecture as any model's."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from hfdist.errors import ConfigError

WIDTH, HEADS, HEAD_SIZE, ROTARY_SIZE = 64, 4, 16, 8
"""The most that widths, heads and their sizes may be in a small model."""
WINDOW_TOKENS, POSITIONS, TOWER_BLOCKS, LONGEST_PERIOD = 8, 512, 2, 4
"""The most tokens of a window, positions, blocks of a tower, and blocks of a period."""

KEY_HEADS = r"\w*(key_value|kv|kv_n|linear_num_key)_heads|num_query_groups"
QUERY_HEADS = ("num_attention_heads", "num_heads", "n_head", "n_heads")
DEPTHS = r"(num_|n_|encoder_|decoder_|num_encoder_|num_decoder_|\w*num_hidden_)layers?(_per_stack)?|depth|num_blocks"
PERIODS = r"\w*(_period|_interval|_every_n_layers|sliding_window_pattern)"
BLOCK_INDICES = r"\w*(_layers|_layer_ids|_idxs|_indices|_indexes)"
VOCABULARIES = r"\w*vocab(_size)?(_per_layer_input|_base)?"
TOWER_STATES = ("vision_feature_layer", "vision_feature_layers")
"""Fields that name states of a tower, by the number of the block that they stand after."""
SPECIAL_TOKENS = r"\w*_token_(id|index)|\w*suppress_tokens"

# The first pattern that matches the whole name of a field gives the most that its integers may be. A field that no
# pattern matches is structure and stays: kinds, flags, factors, kernels, norms.
LIMITS = {
    # Attention heads.
    KEY_HEADS: HEADS // 2,
    r"index(er)?_n_heads": HEADS // 2,
    r"\w*_heads|n_head|num_attention_heads_per_layer": HEADS,
    r"\w*(rotary_dim|rope_head_dim)": ROTARY_SIZE,
    r"\w*(head_dim|head_size|d_head|dim_head|headdim|d_kv|kv_channels)": HEAD_SIZE,
    # Experts.
    r"\w*(num|n|routed|local)_experts|zero_expert_num": 4,
    r"\w*(experts_per_tok(en)?|top_?k|moe_k)(_experts|_blocks)?": 2,
    r"n_group|num_expert_group|\w*n_groups|o_groups": 2,
    r"topk_group|first_k_dense_replace|num_dense_layers": 1,
    # Recurrence and low ranks.
    r"\w*(d_state|state_size)": 8,
    r"(mamba_dt|time_step)_rank": 4,
    r"\w*rank": 16,
    # Windows and chunks: shorter than short sequences, so that they matter.
    r"\w*(window|window_size|window_len|chunk_size|chunk_length|local_attention|block_size)": WINDOW_TOKENS,
    r"index(er)?_(topk|budget)": WINDOW_TOKENS,
    r"n_ctx|n_positions|context_length|model_max_length|max_seq_len|max_\w*positions?\w*": POSITIONS,
    r"\w*position_embedding_size": POSITIONS,
    # Widths.
    r"\w*(moe|expert)\w*(intermediate|hidden)_size": WIDTH // 2,
    r"\w*(intermediate_size|ffn_dim|ffn_hidden_size|feed_forward_size|mlp_dim)\w*": 2 * WIDTH,
    r"\w*(d_ff|dff|dim_ff|d_inner|d_ssm)": 2 * WIDTH,
    r"hidden_size_per_layer_input": WIDTH // 4,
    r"\w*(hidden_size|d_model|n_embd|embed_dim|emb_dim|embedding_size|input_size|proj_dim|width)\w*": WIDTH,
    r"\w*(input|output|in|out)_dim": WIDTH,
    r"\w*channels?": 32,
}


def shrink(config: PreTrainedConfig, *, num_blocks: int | None = None, vocab_size: int = 256) -> PreTrainedConfig:
    """Give a config of the same architecture whose model has at most about two million parameters.

    Widths, heads, experts, ranks, windows and vocabularies become small; lists with an entry for each block keep
    blocks of every kind where `num_blocks` allows it. Everything else stays: tying, activations, norms, kinds of
    rotary positions, the implementation of attention. Towers for images and sound get two blocks.

    Args:
        config: of any model; it is not changed.
        num_blocks: transformer blocks of the small model; None: at most four.
        vocab_size: the most tokens that the small model knows; ids of special tokens are brought below it.

    Raises:
        ConfigError: the config's class refuses the small fields.
    """
    # Classes change the configs that they are made of: blt takes the implementation of attention from them.
    config = copy.deepcopy(config)
    text = config.get_text_config(decoder=True)
    if not _depth(text):
        text = max(_nested(config).values(), key=_depth, default=text)
    try:
        small = _small_config(config, text, num_blocks or min(_depth(text), 4), vocab_size)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, StrictDataclassError) as error:
        raise ConfigError(
            f"this architecture cannot be made small: {' '.join(str(error).split())}",
            where="model",
            found=f"{type(config).__name__}, num_blocks={num_blocks}",
            hint="another number of blocks, or the small model's fields by hand: model.config.*",
        ) from error
    small._attn_implementation = config._attn_implementation
    return small


def shrink_to_try(config: PreTrainedConfig, *, keeps_tokens: bool = False) -> PreTrainedConfig:
    """Give a small config whose model can be tried on a CPU, where no other attention needs to be at hand.

    With `keeps_tokens` it knows all tokens. ConfigError: as of `shrink`.
    """
    small = shrink(config, vocab_size=config.get_text_config().vocab_size) if keeps_tokens else shrink(config)
    small._attn_implementation = "eager"
    text = small.get_text_config()
    if getattr(text, "output_router_logits", False):
        # A loss over routers depends on the batch.
        text.output_router_logits = False
    return small


def _small_config(
    config: PreTrainedConfig, text: PreTrainedConfig, num_blocks: int, vocab_size: int
) -> PreTrainedConfig:
    make: Callable[..., PreTrainedConfig] = type(config)
    fields, depth = _fields(config), _depth(config)
    rules = _Rules(fields, depth, _kept_blocks(fields, depth, num_blocks), vocab_size)
    small = {
        name: _small_config(value, text, num_blocks if value is text else TOWER_BLOCKS, vocab_size)
        if isinstance(value, PreTrainedConfig)
        else rules.small(name, value)
        for name, value in fields.items()
    }
    _reconcile(small, fields)
    # What the class works out itself, it works out from the small fields; unless it puts the old value back.
    derived = _derived_fields(config, fields)
    try:
        made = _fields(make(**{name: value for name, value in small.items() if name not in derived}))
    except (TypeError, ValueError, StrictDataclassError):
        # What it puts in their place is for a full size.
        return make(**small)
    derived -= {name for name in derived if small[name] != fields[name] and made.get(name) == fields[name]}
    return make(**{name: value for name, value in small.items() if name not in derived})


def _fields(config: PreTrainedConfig) -> dict[str, object]:
    """The fields of `config`, under the names that its class takes; nested configs as they are."""
    stored = {config.attribute_map.get(f.name, f.name): f.name for f in dataclasses.fields(config)}
    return {
        stored.get(name, name): value
        for name, value in (config.to_dict() | _nested(config)).items()
        if not name.startswith("_") and name not in ("model_type", "transformers_version", "label2id")
    }


def _nested(config: PreTrainedConfig) -> dict[str, PreTrainedConfig]:
    return {name: value for name, value in vars(config).items() if isinstance(value, PreTrainedConfig)}


def _derived_fields(config: PreTrainedConfig, fields: Mapping[str, object]) -> set[str]:
    """The fields that the class works out from others, but for those over blocks, whose kinds must be chosen."""
    make: Callable[..., PreTrainedConfig] = type(config)
    defaults = {f.name: f.default for f in dataclasses.fields(config)}
    defaults |= {name: parameter.default for name, parameter in inspect.signature(make).parameters.items()}
    # What is None unless it is given, or no parameter at all, may be worked out.
    candidates = {
        name
        for name, value in fields.items()
        if defaults.get(name) is None
        and name != "per_layer_config"
        and not isinstance(value, PreTrainedConfig)
        and not (isinstance(value, list) and len(value) == _depth(config))
    }
    made = _fields(make(**{name: value for name, value in fields.items() if name not in candidates}))
    return {name for name in candidates if made.get(name) == fields[name]}


def _depth(config: PreTrainedConfig) -> int:
    """The number of blocks of `config` itself; 0: it has none."""
    names = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers", "depth", "num_blocks")
    return next((depth for name in names if isinstance(depth := getattr(config, name, None), int)), 0)


def _kept_blocks(fields: Mapping[str, Any], depth: int, num_blocks: int) -> list[int]:
    """Choose blocks, in their order: two of each kind where there is room. Of equal ones, the last and the earliest."""
    if not depth:
        return list(range(num_blocks))
    lists = [v for v in fields.values() if isinstance(v, list) and len(v) == depth]
    indices = [v for name, v in fields.items() if _are_block_indices(name, v, depth)]
    kinds = [str([v[i] for v in lists] + [i in v for v in indices]) for i in range(depth)]
    # The last goes before all, since some classes insist on its kind; one of each kind goes before second ones.
    order = [depth - 1, *range(depth - 1)]
    rank = {block: sum(kinds[other] == kinds[block] for other in order[:place]) for place, block in enumerate(order)}
    kept = sorted(sorted(order, key=lambda block: min(rank[block], 2))[:num_blocks])
    return [kept[i % len(kept)] for i in range(num_blocks)]


def _are_block_indices(name: str, value: object, depth: int) -> bool:
    """Whether a list names blocks by number, and so is not one with an entry for each."""
    return (
        isinstance(value, list)
        and re.fullmatch(BLOCK_INDICES, name) is not None
        and all(isinstance(i, int) and 0 <= i < depth for i in value)
        and sorted(set(value)) == value
    )


def _reconcile(small: dict[str, Any], fields: Mapping[str, Any]) -> None:
    """Make fields agree that depend on each other."""
    # Mamba's heads fill its inner width.
    expand = small.get("mamba_expand", small.get("expand"))
    pairs = (("mamba_n_heads", "mamba_d_head"), ("mamba_num_heads", "mamba_head_dim"), ("num_heads", "head_dim"))
    for heads, size in pairs:
        if expand and heads in small and size in small:
            small[heads] = int(expand * WIDTH) // small[size]
    # A head of latent attention is a rotated and another part, or the name is that of the rotated part.
    if "qk_rope_head_dim" in small and "qk_nope_head_dim" in small:
        for whole in ("head_dim", "qk_head_dim"):
            if fields.get(whole) == fields["qk_rope_head_dim"]:
                small[whole] = small["qk_rope_head_dim"]
            elif fields.get(whole) == fields["qk_rope_head_dim"] + fields["qk_nope_head_dim"]:
                small[whole] = small["qk_rope_head_dim"] + small["qk_nope_head_dim"]
    # The last blocks may take keys and values from earlier ones: from one of each kind.
    if small.get("num_kv_shared_layers") and small.get("layer_types"):
        kinds, most = small["layer_types"], min(fields["num_kv_shared_layers"], len(small["layer_types"]) // 2)
        small["num_kv_shared_layers"] = max(n for n in range(most + 1) if set(kinds[: len(kinds) - n]) == set(kinds))
    # Where in its period a kind of block comes.
    for name in small:
        if name.endswith("_layer_offset"):
            small[name] = fields[name] % small[name.replace("_offset", "_period")]
    # The order of kinds, spelt as a pattern and how often it comes.
    if "attention_types" in small:
        small["attention_types"] = [[small["attention_layers"], 1]]


@dataclass(frozen=True)
class _Rules:
    """The small value of a field, from its name, its value, and the config around it."""

    fields: Mapping[str, Any]
    depth: int
    kept_blocks: list[int]
    vocab_size: int

    def small(self, name: str, value: Any) -> Any:
        if isinstance(value, dict):
            if name == "per_layer_config":
                return self._small_overrides({int(block): fields for block, fields in value.items()})
            return {key: self.small(str(key), item) for key, item in value.items()}
        if isinstance(value, list):
            return self._small_list(name, value)
        if isinstance(value, int) and not isinstance(value, bool):
            return self._small_integer(name, value)
        if name == "partial_rotary_factor" and value is not None:
            # Less than half of a small head has too few pairs.
            return max(value, 0.5)
        return value

    def _small_integer(self, name: str, value: int) -> int:
        if re.fullmatch(DEPTHS, name):
            return len(self.kept_blocks)
        if re.fullmatch(PERIODS, name):
            return min(value, LONGEST_PERIOD, len(self.kept_blocks))
        if re.fullmatch(SPECIAL_TOKENS, name):
            return value % self.vocab_size if value >= 0 else value
        if re.fullmatch(VOCABULARIES, name):
            return min(value, self.vocab_size)
        if name == "window_size" and isinstance(self.fields.get("patch_size"), int):
            # Of a tower, in pixels: a window has some patches.
            return min(value, 4 * int(self.fields["patch_size"]))
        if name == "original_max_position_embeddings":
            # In proportion to the limit: some models tell from it whether to scale.
            positions = max(self.fields.get("max_position_embeddings", value), POSITIONS)
            return max(value * POSITIONS // positions, 1)
        if re.fullmatch(KEY_HEADS, name):
            # As many heads for keys as for queries stay as many.
            partners = (name.replace("key_value", "attention").replace("num_key", "num_value"), *QUERY_HEADS)
            return min(value, HEADS if value in map(self.fields.get, partners) else LIMITS[KEY_HEADS])
        limit = next((limit for pattern, limit in LIMITS.items() if re.fullmatch(pattern, name)), value)
        return min(value, limit)

    def _small_list(self, name: str, values: list[Any]) -> list[object]:
        if _are_block_indices(name, values, self.depth):
            return [new for new, old in enumerate(self.kept_blocks) if old in values]
        if len(values) == self.depth:
            values = [values[block] for block in self.kept_blocks]
        if name in ("long_factor", "short_factor"):
            return values[: self._num_rotary_pairs(len(values))]
        if name == "mrope_section":
            pairs = self._num_rotary_pairs(sum(values))
            small = [max(pairs * section // sum(values), 1) for section in values]
            # Sections of one size, as ernie's of height and width, stay so.
            alone = next((place for place, section in enumerate(values) if values.count(section) == 1), 0)
            small[alone] += pairs - sum(small)
            return list(small)
        if name in TOWER_STATES:
            return [max(min(value, TOWER_BLOCKS), -TOWER_BLOCKS) for value in values]
        return [self.small(name, value) for value in values]

    def _num_rotary_pairs(self, pairs: int) -> int:
        """The pairs of a small head, of which the same part is rotated."""
        size = self.fields.get("head_dim") or self.fields["hidden_size"] // self.fields["num_attention_heads"]
        part = (self.fields.get("rope_parameters") or {}).get("partial_rotary_factor", 1.0)
        return int(pairs * min(HEAD_SIZE, size) / size * self.small("partial_rotary_factor", part) / part)

    def _small_overrides(self, overrides: dict[int, dict[str, object]]) -> dict[int, dict[str, object]]:
        """The overrides of single blocks, in the same proportion to the values of the other blocks."""

        def small(name: str, value: object) -> object:
            usual = self.fields.get(name)
            if isinstance(value, int) and isinstance(usual, int) and usual > 0:
                return max(self.small(name, usual) * value // usual, 1)
            return self.small(name, value)

        return {
            new: {name: small(name, value) for name, value in overrides[old].items()}
            for new, old in enumerate(self.kept_blocks)
            if old in overrides
        }
