"""Which documents were in a step that had to be skipped."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hfdist.collectives import on_rank_zero
from hfdist.data import LEDGER, TokenStream
from hfdist.data.stream.ledger import read_records
from hfdist.errors import printable

_MOST_NAMES = 4
"""That a message names; the audit shows the others."""


class Skipped(NamedTuple):
    """A step that no rank has taken."""

    step: int
    data_ranks: tuple[int, ...]
    """Those whose loss was not finite; none: the losses were, and the gradient was not."""
    end_sample: int
    """Number of the run's sequence behind its last one."""

    def __str__(self) -> str:
        if not self.data_ranks:
            return "its gradient is not finite, though its loss is"
        ranks = f"rank{'s' * (len(self.data_ranks) > 1)} {', '.join(map(str, self.data_ranks))}"
        return f"its loss is not finite on data {ranks}"


def describe(trainer: Any, skipped: list[Skipped]) -> tuple[str, ...]:
    """Lines: what was wrong with the first, and its documents where the run has a ledger, which must be written.

    Call on all ranks.
    """
    first, *later = skipped
    names = on_rank_zero(partial(_name_documents, trainer, first))
    more = f" and {len(names) - _MOST_NAMES:,} more" if len(names) > _MOST_NAMES else ""
    read = [f"it read {', '.join(names[:_MOST_NAMES])}{more}"] if names else []
    return (str(first), *read, *(f"step {entry.step}: {entry}" for entry in later))


def quarantine_hint(trainer: Any, skipped: Skipped) -> str:
    """How to look at the documents and to take them out. Call on all ranks."""
    names = on_rank_zero(partial(_name_documents, trainer, skipped))
    if not names:
        return ""
    rows = ",".join(f'"{name}"' for name in names[:_MOST_NAMES])
    audit = f"python recipes/audit.py run={trainer.args.output_dir} step={skipped.step}"
    return f"{audit} shows the documents; 'data.quarantine=[{rows}]' takes some out; or "


def _name_documents(trainer: Any, skipped: Skipped) -> list[str]:
    """SOURCE:FILE:ROW of what was trained on; only of the data ranks whose loss was not finite, if any."""
    stream = trainer.train_dataset
    if not isinstance(stream, TokenStream) or stream.ledger is None:
        return []
    topology, num_lanes = trainer.strategy.topology, stream.config.lanes
    documents: dict[int, None] = {}
    for sample in range(skipped.end_sample - trainer.strategy.batch.global_batch_size, skipped.end_sample):
        number, lane = divmod(sample, num_lanes)
        if skipped.data_ranks and lane % topology.data_size not in skipped.data_ranks:
            continue
        records = read_records(Path(trainer.args.output_dir) / LEDGER, lane)
        begin, end = np.searchsorted(records["sequence"], [number, number + 1]).tolist()
        records = records[begin:end]
        documents |= dict.fromkeys(records["document"][records["num_tokens"] > 0].tolist())
    return [printable(str(stream.corpus.origin(document))) for document in documents]
