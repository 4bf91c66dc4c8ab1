"""Reads from a model's config how many tokens it has positions for."""

from __future__ import annotations

from transformers import PreTrainedConfig


def most_positions(architecture: PreTrainedConfig) -> int | None:
    """Give the number of positions of a model, or of its part for text; None: its config names no limit."""
    limit = getattr(architecture.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None
