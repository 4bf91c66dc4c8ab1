"""How much of each source a run has read, how well sequences were filled, and what was cut or left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hfdist.config.data import DataConfig, Packing, TooLong
from hfdist.data.order.cursor import Cursor
from hfdist.data.order.records import Records, Status
from hfdist.data.stream.lane import Plan


class PoolReport(NamedTuple):
    """What a run has read of one pool of documents."""

    name: str
    sequences: int
    share: float
    """Of all sequences."""
    tokens: int
    epochs: float
    """Passes over it: documents begun or passed over, by those that are there; the audit counts the same."""
    filled: float
    """Share of its sequences' places that held tokens."""


def report(cursor: Cursor, plan: Plan) -> list[PoolReport]:
    """Sum up a merged cursor, by pool."""
    num_sequences = sum(progress.sequences for state in cursor.lanes.values() for progress in state.pools)
    reports = []
    for number, pool in enumerate(plan.pools):
        progress = [state.pools[number] for state in cursor.lanes.values()]
        sequences = sum(own.sequences for own in progress)
        tokens = sum(own.tokens for own in progress)
        documents = sum(own.documents for own in progress)
        epochs = documents / max(sum(sum(shard.runs) for shard in pool.shards), 1)
        places = max(sequences * plan.shape.length, 1)
        reports.append(
            PoolReport(pool.name, sequences, sequences / max(num_sequences, 1), tokens, epochs, tokens / places)
        )
    return reports


def describe_losses(ledger: Sequence[Records], config: DataConfig) -> str | None:
    """Say how many documents of a ledger were cut or left out, for whatever reason but the held-out split; None: none.

    Args:
        ledger: records of all lanes.
        config: `data.*`.
    """
    counts = dict.fromkeys(_LOSSES.values(), 0)
    num_read = num_cut = 0
    for records in ledger:
        for fate, what in _LOSSES.items():
            counts[what] += int((records["fate"] == fate).sum())
        begins = (records["fate"] == Status.trained) & (records["first_token"] == 0)
        num_read += int(begins.sum())
        num_cut += int((begins & (records["of_tokens"] > config.sequence_length)).sum())
    is_cut = config.packing is Packing.none or config.too_long is not TooLong.split
    told = {f"cut to {config.sequence_length:,} tokens": num_cut if is_cut else 0, **counts}
    losses = ", ".join(f"{count:,} {what}" for what, count in told.items() if count)
    return f"{num_read:,} documents read, {losses}" if losses else None


_LOSSES = {
    Status.too_long: "left out as too long",
    Status.no_target: "left out without a target",
    Status.bad: "left out as bad",
    Status.empty: "empty",
}
