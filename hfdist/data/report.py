"""How much of each source a run has read, and how well sequences were filled."""

from __future__ import annotations

from typing import NamedTuple

from hfdist.data.cursor import Cursor, Place
from hfdist.data.lane import Plan
from hfdist.data.order import LaneOrder


class PoolReport(NamedTuple):
    """What a run has read of one pool of documents."""

    name: str
    sequences: int
    share: float
    """Of all sequences."""
    tokens: int
    epochs: float
    """Passes over it, as a mean over the lanes."""
    filled: float
    """Share of its sequences' places that held tokens."""


def report(cursor: Cursor, plan: Plan) -> list[PoolReport]:
    """Sum up a merged cursor, by pool."""
    num_sequences = sum(progress.sequences for state in cursor.lanes.values() for progress in state.pools)
    reports = []
    for number, (pool, order) in enumerate(zip(plan.pools, plan.orders, strict=True)):
        progress = {lane: state.pools[number] for lane, state in cursor.lanes.items()}
        sequences = sum(own.sequences for own in progress.values())
        tokens = sum(own.tokens for own in progress.values())
        epochs = sum(_epochs(order, lane, own.place) for lane, own in progress.items()) / len(progress)
        places = max(sequences * plan.shape.length, 1)
        reports.append(
            PoolReport(pool.name, sequences, sequences / max(num_sequences, 1), tokens, epochs, tokens / places)
        )
    return reports


def _epochs(order: LaneOrder, lane: int, place: Place) -> float:
    return place.epoch + place.position / max(order.lane_length(place.epoch, lane), 1)
