"""Switches the cache of keys and values of a model's forwards on and off, in its config."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedConfig


def set_use_cache(config: PreTrainedConfig, uses_cache: bool) -> None:
    """Set `use_cache` in a config and in the nested config of its part for text: models read either of them."""
    for level in (config, config.get_text_config(decoder=True)):
        level.use_cache = uses_cache


@contextmanager
def without_cache(config: PreTrainedConfig) -> Iterator[None]:
    """Let forwards make no cache in this context, as in training."""
    levels = (config, config.get_text_config(decoder=True))
    before = [getattr(level, "use_cache", None) for level in levels]
    set_use_cache(config, False)
    try:
        yield
    finally:
        for level, uses_cache in zip(levels, before, strict=True):
            level.use_cache = uses_cache
