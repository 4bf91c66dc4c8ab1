"""Bytes that travel between islands in a round, or between islands and a parameter server in a step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hfdist.config.islands import CUT_ELEMENTS, IslandMethod, IslandsConfig
from hfdist.strategies.traffic import StepSizes


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
    """Bytes that a parameter server takes of all islands, or its shard with most; 0: weights do not come to it."""
    server_sent_bytes: float
    server_shards: int


def exchanged_elements(sizes: StepSizes, *, pipeline: int, expert: int, is_sharded: bool) -> int:
    """Count the weights that all ranks of an island exchange together: trained ones, and copies of large ones.

    Small copies are left out: the norms that each tensor rank has.

    Args:
        sizes: the sizes of the whole model.
        pipeline: `strategy.pipeline`.
        expert: `strategy.expert`.
        is_sharded: whether ranks share out the optimizer's state.
    """
    trained = round(sizes.parameters * sizes.trained_share)
    if sizes.trained_share < 1:
        return trained
    # Ranks share out only what they hold if they hold all of it alike (see `OwnedPieces`).
    if pipeline > 1 and sizes.is_tied:
        trained += sizes.embedding
    if not is_sharded:
        trained += (expert - 1) * (sizes.parameters - sizes.experts)
    return trained


def island_traffic(config: IslandsConfig, num_elements: int, largest: int = 0) -> IslandTraffic | None:
    """Give what islands exchange; None: there are no islands.

    Args:
        config: `islands.*`.
        num_elements: see `exchanged_elements`.
        largest: elements of the largest tensor; of more than CUT_ELEMENTS a shard of a server has parts.
    """
    if not config.is_used:
        return None
    coded = config.codec.num_bytes(num_elements)
    if config.method is IslandMethod.parameter_server:
        # The largest parts are shared out first, so that others fill up what they leave.
        share = max(num_elements / config.server_shards, min(largest, CUT_ELEMENTS)) / num_elements
        weights = 4 * num_elements
        return IslandTraffic(
            steps=1,
            members=config.count,
            sent_bytes=coded,
            taken_bytes=weights,
            server_taken_bytes=config.count * coded * share,
            server_sent_bytes=config.count * weights * share,
            server_shards=config.server_shards,
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
        server_shards=1,
    )
