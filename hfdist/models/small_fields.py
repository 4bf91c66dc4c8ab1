"""The rules by which a field of a model's config gets its value in a small model of the same architecture."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# The most that a small model has of each.
WIDTH = 64
HEADS = 4
HEAD_SIZE = 16
ROTARY_SIZE = 8
"""Elements of a head that are rotated."""
WINDOW_TOKENS = 8
POSITIONS = 512
TOWER_BLOCKS = 2
LONGEST_PERIOD = 4
"""Blocks after which the kinds of blocks repeat."""

# Names of fields, as patterns that match the whole of a name.
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


@dataclass(frozen=True)
class FieldRules:
    """The rules for the fields of one config, as they depend on its other fields and on the small model."""

    fields: Mapping[str, Any]
    """Fields of the full config, by name."""
    depth: int
    """Number of blocks of the full model."""
    kept_blocks: list[int]
    """Numbers of the blocks of the full model, one for each block of the small model, which is of the same kind."""
    vocab_size: int
    """The most tokens that the small model knows."""

    def small(self, name: str, value: Any) -> Any:
        """Give the value of a field in the small model; a field that describes structure, not size, stays."""
        if isinstance(value, dict):
            if name == "per_layer_config":
                return self._small_overrides({int(block): fields for block, fields in value.items()})
            return {key: self.small(str(key), item) for key, item in value.items()}
        if isinstance(value, list):
            return self._small_list(name, value)
        if isinstance(value, int) and not isinstance(value, bool):
            return self._small_integer(name, value)
        if name == "partial_rotary_factor" and value is not None:
            # Less than half of a small head would be too few rotary pairs.
            return max(value, 0.5)
        return value

    def _small_integer(self, name: str, value: int) -> int:
        """Give the small value of a whole number: by a rule for its name, or by the first limit that fits the name."""
        if re.fullmatch(DEPTHS, name):
            return len(self.kept_blocks)
        if re.fullmatch(PERIODS, name):
            return min(value, LONGEST_PERIOD, len(self.kept_blocks))
        if re.fullmatch(SPECIAL_TOKENS, name):
            return value % self.vocab_size if value >= 0 else value
        if re.fullmatch(VOCABULARIES, name):
            return min(value, self.vocab_size)
        if name == "window_size" and isinstance(self.fields.get("patch_size"), int):
            # A tower counts its window in pixels: it stays some patches wide.
            return min(value, 4 * int(self.fields["patch_size"]))
        if name == "original_max_position_embeddings":
            # It keeps its share of the limit: some models tell by that whether to scale positions.
            positions = max(self.fields.get("max_position_embeddings", value), POSITIONS)
            return max(value * POSITIONS // positions, 1)
        if re.fullmatch(KEY_HEADS, name):
            # A model with as many heads for keys as for queries keeps as many.
            partners = (name.replace("key_value", "attention").replace("num_key", "num_value"), *QUERY_HEADS)
            is_as_many = any(self.fields.get(partner) == value for partner in partners)
            return min(value, HEADS if is_as_many else LIMITS[KEY_HEADS])
        limit = next((limit for pattern, limit in LIMITS.items() if re.fullmatch(pattern, name)), value)
        return min(value, limit)

    def _small_list(self, name: str, values: list[Any]) -> list[object]:
        """Give the small value of a list; name and length tell if its entries are blocks, rotary pairs or others."""
        if are_block_indices(name, values, self.depth):
            return [new for new, old in enumerate(self.kept_blocks) if old in values]
        if len(values) == self.depth:
            values = [values[block] for block in self.kept_blocks]
        if name in ("long_factor", "short_factor"):
            return values[: self._num_rotary_pairs(len(values))]
        if name == "mrope_section":
            # Rotary pairs of time, height and width.
            pairs = self._num_rotary_pairs(sum(values))
            small = [max(pairs * section // sum(values), 1) for section in values]
            # The rest from rounding goes to a section of a size that no other has: ernie's sections of height and width
            # must stay equal.
            alone = next((place for place, section in enumerate(values) if values.count(section) == 1), 0)
            small[alone] += pairs - sum(small)
            return list(small)
        if name in TOWER_STATES:
            return [max(min(value, TOWER_BLOCKS), -TOWER_BLOCKS) for value in values]
        return [self.small(name, value) for value in values]

    def _num_rotary_pairs(self, pairs: int) -> int:
        """Give the number of rotary pairs of a small head, where a full head has `pairs` of them."""
        size = self.fields.get("head_dim") or self.fields["hidden_size"] // self.fields["num_attention_heads"]
        rotated = (self.fields.get("rope_parameters") or {}).get("partial_rotary_factor", 1.0)
        small_rotated = self.small("partial_rotary_factor", rotated)
        return int(pairs * min(HEAD_SIZE, size) / size * small_rotated / rotated)

    def _small_overrides(self, overrides: dict[int, dict[str, object]]) -> dict[int, dict[str, object]]:
        """Give the small overrides of single blocks, by block: in the same proportion to the values of other blocks."""

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


def are_block_indices(name: str, value: object, depth: int) -> bool:
    """Whether a field's value is a list of blocks' numbers, and not one with an entry for each of `depth` blocks."""
    return (
        isinstance(value, list)
        and re.fullmatch(BLOCK_INDICES, name) is not None
        and all(isinstance(i, int) and 0 <= i < depth for i in value)
        and sorted(set(value)) == value
    )
