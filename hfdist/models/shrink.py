"""Makes a small config of the same architecture as a given one, so that a small model can be tried in its place."""

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
        config: the config of any model; it is not changed.
        num_blocks: number of transformer blocks of the small model; None: at most four.
        vocab_size: the most tokens that the small model knows; ids of special tokens are brought below it.

    Raises:
        ConfigError: the config's class refuses the small fields.
    """
    # Classes change the nested configs that they are made with: blt sets the implementation of attention in them.
    config = copy.deepcopy(config)
    text = config.get_text_config(decoder=True)
    if not _depth(text):
        # The blocks are counted in another nested config: the deepest one.
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
    """Give a small config whose model runs on any CPU: with eager attention, and without a loss over routers.

    Args:
        config: the config of any model; it is not changed.
        keeps_tokens: whether the small model knows all tokens of the vocabulary.

    Raises:
        ConfigError: the config's class refuses the small fields.
    """
    small = shrink(config, vocab_size=config.get_text_config().vocab_size) if keeps_tokens else shrink(config)
    small._attn_implementation = "eager"
    text = small.get_text_config()
    if getattr(text, "output_router_logits", False):
        # A loss over routers depends on the whole batch, so trials of single rows would differ.
        text.output_router_logits = False
    return small


def _small_config(
    config: PreTrainedConfig, text: PreTrainedConfig, num_blocks: int, vocab_size: int
) -> PreTrainedConfig:
    """Make the small config of `config`, which is `text`, holds it, or stands beside it as a tower does."""
    make: Callable[..., PreTrainedConfig] = type(config)
    fields, depth = _fields(config), _depth(config)
    rules = FieldRules(fields, depth, _kept_blocks(fields, depth, num_blocks), vocab_size)
    small: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, PreTrainedConfig):
            small[name] = _small_config(value, text, num_blocks if value is text else TOWER_BLOCKS, vocab_size)
        else:
            small[name] = rules.small(name, value)
    _reconcile(small, fields)
    # Derived fields are left out: the class works them out from the small ones.
    derived = _derived_fields(config, fields)
    try:
        made = _fields(make(**{name: value for name, value in small.items() if name not in derived}))
    except (TypeError, ValueError, StrictDataclassError):
        # Without them the class takes defaults for a full size, which do not go with the small fields.
        return make(**small)
    # Where the class puts the value for a full size back, the small value is given after all.
    derived -= {name for name in derived if small[name] != fields[name] and made.get(name) == fields[name]}
    return make(**{name: value for name, value in small.items() if name not in derived})


def _fields(config: PreTrainedConfig) -> dict[str, object]:
    """Give the fields of a config under the names that its class takes; nested configs stay configs."""
    stored = {config.attribute_map.get(field.name, field.name): field.name for field in dataclasses.fields(config)}
    return {
        stored.get(name, name): value
        for name, value in (config.to_dict() | _nested(config)).items()
        if not name.startswith("_") and name not in ("model_type", "transformers_version", "label2id")
    }


def _nested(config: PreTrainedConfig) -> dict[str, PreTrainedConfig]:
    """Give the configs that are fields of a config, by name: of its part for text, of towers."""
    return {name: value for name, value in vars(config).items() if isinstance(value, PreTrainedConfig)}


def _derived_fields(config: PreTrainedConfig, fields: Mapping[str, object]) -> set[str]:
    """Name the fields that a config's class works out from others, as it does with a head's size from the width.

    Lists with an entry for each block are not meant: which kinds of blocks stay is chosen here.
    """
    make: Callable[..., PreTrainedConfig] = type(config)
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
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
    """Give the number of blocks of a config itself, without nested ones; 0: it has none."""
    for name in ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers", "depth", "num_blocks"):
        depth = getattr(config, name, None)
        if isinstance(depth, int):
            return depth
    return 0


def _kept_blocks(fields: Mapping[str, Any], depth: int, num_blocks: int) -> list[int]:
    """Choose the blocks that a small model keeps, by number: of each kind two, where there is room.

        kinds of blocks    a a a b a b c        three blocks: 0 3 6        five blocks: 0 1 3 5 6

    The last block comes first, since some classes insist on its kind; then the first block of each other kind, then a
    second one, then any. If there are fewer blocks than asked for, some are named again.
    """
    if not depth:
        return list(range(num_blocks))
    lists = [values for values in fields.values() if isinstance(values, list) and len(values) == depth]
    indices = [values for name, values in fields.items() if are_block_indices(name, values, depth)]
    # Blocks are of one kind if all lists say the same of them.
    kinds = [str([v[block] for v in lists] + [block in v for v in indices]) for block in range(depth)]
    order = [depth - 1, *range(depth - 1)]
    num_like_it: dict[int, int] = {}
    for place, block in enumerate(order):
        num_like_it[block] = sum(kinds[earlier] == kinds[block] for earlier in order[:place])
    # The sort is stable: among third and later blocks of a kind, their order decides.
    kept = sorted(sorted(order, key=lambda block: min(num_like_it[block], 2))[:num_blocks])
    return [kept[number % len(kept)] for number in range(num_blocks)]


def _reconcile(small: dict[str, Any], fields: Mapping[str, Any]) -> None:
    """Make the small fields agree that depend on each other, in place; `fields` are those of the full config."""
    # Mamba's heads fill its inner width.
    expand = small.get("mamba_expand", small.get("expand"))
    pairs = (("mamba_n_heads", "mamba_d_head"), ("mamba_num_heads", "mamba_head_dim"), ("num_heads", "head_dim"))
    for heads, size in pairs:
        if expand and heads in small and size in small:
            small[heads] = int(expand * WIDTH) // small[size]
    # A head of latent attention consists of a rotated part and another one. In some types the size of a head is that of
    # both, in others that of the rotated part.
    if "qk_rope_head_dim" in small and "qk_nope_head_dim" in small:
        for whole in ("head_dim", "qk_head_dim"):
            if fields.get(whole) == fields["qk_rope_head_dim"]:
                small[whole] = small["qk_rope_head_dim"]
            elif fields.get(whole) == fields["qk_rope_head_dim"] + fields["qk_nope_head_dim"]:
                small[whole] = small["qk_rope_head_dim"] + small["qk_nope_head_dim"]
    # The last blocks may take keys and values from earlier ones, among which there must be one of each kind.
    if small.get("num_kv_shared_layers") and small.get("layer_types"):
        kinds = small["layer_types"]
        most = min(fields["num_kv_shared_layers"], len(kinds) // 2)
        possible = [number for number in range(most + 1) if set(kinds[: len(kinds) - number]) == set(kinds)]
        small["num_kv_shared_layers"] = max(possible)
    # An offset says where in its period a kind of block comes.
    for name in small:
        if name.endswith("_layer_offset"):
            small[name] = fields[name] % small[name.replace("_offset", "_period")]
    # GPT-Neo's `attention_types` gives the order of kinds as a pattern, and how often the pattern comes.
    if "attention_types" in small:
        small["attention_types"] = [[small["attention_layers"], 1]]
