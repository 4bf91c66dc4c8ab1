"""A small model's config of the same architecture as any model's."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from hfdist.errors import ConfigError
from hfdist.models.small_fields import TOWER_BLOCKS, WIDTH, FieldRules, are_block_indices


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
    rules = FieldRules(fields, depth, _kept_blocks(fields, depth, num_blocks), vocab_size)
    small = {
        name: _small_config(value, text, num_blocks if value is text else TOWER_BLOCKS, vocab_size)
        if isinstance(value, PreTrainedConfig)
        else rules.small(name, value)
        for name, value in fields.items()
    }
    _reconcile(small, fields)
    # The class works its derived fields out from the small ones, but for those where it puts the old value back.
    derived = _derived_fields(config, fields)
    try:
        made = _fields(make(**{name: value for name, value in small.items() if name not in derived}))
    except (TypeError, ValueError, StrictDataclassError):
        # The class puts values for a full size in their place.
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
    # A field that is None unless it is given, or no parameter at all, may be worked out.
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
    indices = [v for name, v in fields.items() if are_block_indices(name, v, depth)]
    kinds = [str([v[i] for v in lists] + [i in v for v in indices]) for i in range(depth)]
    # The last goes before all, since some classes insist on its kind; one of each kind goes before second ones.
    order = [depth - 1, *range(depth - 1)]
    rank = {block: sum(kinds[other] == kinds[block] for other in order[:place]) for place, block in enumerate(order)}
    kept = sorted(sorted(order, key=lambda block: min(rank[block], 2))[:num_blocks])
    return [kept[i % len(kept)] for i in range(num_blocks)]


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
    # An offset says where in its period a kind of block comes.
    for name in small:
        if name.endswith("_layer_offset"):
            small[name] = fields[name] % small[name.replace("_offset", "_period")]
    # These spell the order of kinds as a pattern, and how often it comes.
    if "attention_types" in small:
        small["attention_types"] = [[small["attention_layers"], 1]]
