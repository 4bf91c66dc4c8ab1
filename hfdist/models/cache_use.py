"""Whether forwards of a model make a cache of keys and values, as its config says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedConfig


def set_use_cache(config: PreTrainedConfig, uses_cache: bool) -> None:
    """Set it in a config, and in that of its part for text, which a causal model may read alone."""
    for own in (config, config.get_text_config(decoder=True)):
        own.use_cache = uses_cache


@contextmanager
def without_cache(config: PreTrainedConfig) -> Iterator[None]:
    """Let forwards make no cache within the block, as in training."""
    text = config.get_text_config(decoder=True)
    before = [(own, getattr(own, "use_cache", None)) for own in (config, text)]
    set_use_cache(config, False)
    try:
        yield
    finally:
        for own, uses_cache in before:
            own.use_cache = uses_cache
