"""How many tokens a model can read, as its config says."""

from __future__ import annotations

from transformers import PreTrainedConfig


def most_positions(architecture: PreTrainedConfig) -> int | None:
    """Give the number of positions of a model, of its part for text where it has several; None: it names no limit."""
    limit = getattr(architecture.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None
