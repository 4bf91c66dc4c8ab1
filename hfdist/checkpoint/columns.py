"""Columns of a matrix that several ranks hold: before a save, the rank that writes some rows gets their columns.

    rank 0 holds  a a .    rank 1 holds  . . b       rank 0 writes the first row:  a a b    it gets b from rank 1
                  a a .                  . . b       rank 1 writes the second:     a a b    it gets a a from rank 0

So a file has one long run for the rows, hashed as it is written, and not thousands of short ones of each rank.
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
"""Bytes that all ranks together have on the way at a time."""


class ColumnTransfer(NamedTuple):
    """Columns of some rows, from a rank that holds them to the rank that writes the rows, which may be the same."""

    number: int
    """Number of the transfer among those from its sender to its writer."""
    window: int
    """Number of its window: the transfers of one window are on the way together."""
    sender: int
    writer: int
    rows: int
    """Index of these rows among the items that the writer writes."""
    num_rows: int
    column: Column
    """Which columns, and who holds them."""
    pitch: int
    """Elements of a whole row."""
    dtype: torch.dtype
    source: int | None
    """Index of the columns among the sources of this rank; None: this rank does not send them."""


def join_columns(
    transfers: Sequence[ColumnTransfer], sources: Sequence[torch.Tensor], group: dist.ProcessGroup | None
) -> dict[int, torch.Tensor]:
    """Send the columns that other ranks write, and put the rows together that this rank writes.

    All ranks that have transfers call it at the same time.

    Args:
        transfers: the transfers from or to this rank, in the order of tensors that all ranks have.
        sources: the columns that this rank holds; each flattens to the elements of its rows, one row after another.
        group: a group of all ranks that carries tensors of the host; None: the default group.

    Returns:
        The rows that this rank writes, as 1-D tensors on the CPU, by their index among the items that it writes.
    """
    joined: dict[int, torch.Tensor] = {}
    for _, window in groupby(transfers, key=lambda transfer: transfer.window):
        works: list[dist.Work | None] = []
        # Tensors must live until they have arrived.
        sent: list[torch.Tensor] = []
        written: list[tuple[ColumnTransfer, torch.Tensor]] = []
        for transfer in window:
            if transfer.source is not None:
                columns = sources[transfer.source].reshape(transfer.num_rows, -1)
            else:
                width = transfer.column.stop - transfer.column.start
                columns = torch.empty(transfer.num_rows, width, dtype=transfer.dtype)
                works.append(dist.irecv(_bytes(columns), transfer.sender, group, transfer.number))
            if transfer.writer == rank():
                written.append((transfer, columns))
            else:
                sent.append(columns.cpu().contiguous())
                works.append(dist.isend(_bytes(sent[-1]), transfer.writer, group, transfer.number))
        for work in works:
            assert work is not None  # this rank is in the group
            work.wait()
        for transfer, columns in written:
            if transfer.rows not in joined:
                joined[transfer.rows] = torch.empty(transfer.num_rows, transfer.pitch, dtype=transfer.dtype)
            joined[transfer.rows][:, transfer.column.start : transfer.column.stop] = columns
    return {index: rows.flatten() for index, rows in joined.items()}


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    """View a tensor as bytes, so that any type can travel."""
    return rows.view(torch.uint8).view(-1)
