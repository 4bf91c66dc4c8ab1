"""The reward `overlong`: a soft punishment of long completions (DAPO, arXiv 2503.14476)."""

from __future__ import annotations

from collections.abc import Sequence

from hfdist.rewards.generation import Generation

_PUNISHED_SHARE = 0.2
"""The share of `task.max_new_tokens`, at its end, in which the punishment grows; as in the paper: 4,096 of 20,480."""


def overlong(generations: Sequence[Generation]) -> list[float]:
    """Give 0.0 up to four fifths of the most tokens; from there on it falls in a line, to -1.0 at the most tokens."""
    return [_punish(one.num_tokens, one.most_tokens) for one in generations]


def _punish(num_tokens: int, most_tokens: int) -> float:
    punished = _PUNISHED_SHARE * most_tokens
    # A reward of 0 is no negative zero.
    return min(0.0, max(-1.0, (most_tokens - punished - num_tokens) / max(punished, 1e-9)))
