"""Bytes that travel between islands in a round, or between islands and a parameter server in a step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hfdist.config.islands import IslandMethod, IslandsConfig


@dataclass(frozen=True, kw_only=True)
class IslandTraffic:
    """Bytes between two exchanges of the whole model, where nobody comes, is lost, or saves."""

    steps: int
    """Steps of a round; 1 with a parameter server."""
    members: int
    """Islands that exchange."""
    sent_bytes: float
    """Bytes that one island sends, over all its ranks."""
    taken_bytes: float
    server_taken_bytes: float
    """Bytes that a parameter server takes of all islands; 0: weights do not come to the server."""
    server_sent_bytes: float


def island_traffic(config: IslandsConfig, num_elements: int) -> IslandTraffic | None:
    """Give what islands exchange; None: there are no islands.

    Args:
        config: `islands.*`.
        num_elements: of all trained weights.
    """
    if not config.is_used:
        return None
    coded = config.codec.num_bytes(num_elements)
    if config.method is IslandMethod.parameter_server:
        weights = 4 * num_elements
        return IslandTraffic(
            steps=1,
            members=config.count,
            sent_bytes=coded,
            taken_bytes=weights,
            server_taken_bytes=config.count * coded,
            server_sent_bytes=config.count * weights,
        )
    members = math.ceil(config.participation * config.count)
    # Each gives its parts to the others, and then each the mean of its own part.
    mean = 2 * (members - 1) / members * coded
    return IslandTraffic(
        steps=config.every,
        members=members,
        sent_bytes=mean,
        taken_bytes=mean,
        server_taken_bytes=0,
        server_sent_bytes=0,
    )
