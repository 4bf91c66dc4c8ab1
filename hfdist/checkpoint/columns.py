"""Columns of a matrix that several ranks hold: the rank that writes some of its rows gets them from the others.

A file then has one long run for them, hashed as it is written, and not thousands of short ones of each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
import torch.distributed as dist

from hfdist.checkpoint.regions import Column
from hfdist.collectives import rank

WINDOW_BYTES = 256 * 2**20
"""What all ranks together have on the way at a time."""


class ColumnTransfer(NamedTuple):
    """Columns of some rows, from the rank that holds them to the one that writes the rows: maybe the same."""

    number: int
    """Number of the transfer among those of its sender and its writer."""
    window: int
    """Transfers of one window are on the way together."""
    sender: int
    writer: int
    rows: int
    """Index of these rows among the items that the writer writes."""
    num_rows: int
    column: Column
    pitch: int
    dtype: torch.dtype
    source: int | None
    """Index of the columns among the sources of this rank; None: another rank has them."""


def join_columns(
    transfers: Sequence[ColumnTransfer], sources: Sequence[torch.Tensor], group: dist.ProcessGroup | None
) -> dict[int, torch.Tensor]:
    """Give the rows that this rank writes, by their index, as 1-D tensors. All ranks with transfers call it.

    Args:
        transfers: of this rank, in the order of tensors that all ranks have.
        sources: of this rank; they flatten to the columns, row by row.
        group: of all ranks, for tensors of the host; None: the default one.
    """
    joined: dict[int, torch.Tensor] = {}
    for _, window in groupby(transfers, key=lambda transfer: transfer.window):
        arriving, works, sent = [], [], []
        for transfer in window:
            own = None if transfer.source is None else sources[transfer.source].reshape(transfer.num_rows, -1)
            if transfer.writer != rank():
                assert own is not None
                sent.append(own.cpu().contiguous())
                works.append(dist.isend(_bytes(sent[-1]), transfer.writer, group, transfer.number))
                continue
            if own is None:
                own = torch.empty(transfer.num_rows, transfer.column.stop - transfer.column.start, dtype=transfer.dtype)
                works.append(dist.irecv(_bytes(own), transfer.sender, group, transfer.number))
            arriving.append((transfer, own))
        for work in works:
            assert work is not None  # this rank is in the group
            work.wait()
        for transfer, own in arriving:
            if transfer.rows not in joined:
                joined[transfer.rows] = torch.empty(transfer.num_rows, transfer.pitch, dtype=transfer.dtype)
            joined[transfer.rows][:, transfer.column.start : transfer.column.stop] = own
    return {index: rows.flatten() for index, rows in joined.items()}


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(torch.uint8).view(-1)
