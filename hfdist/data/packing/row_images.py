"""The tensors of images in a batch, with counts of how much of each one is of which row: then rows can be cut apart.

input_ids                             3 rows
pixel_values                          8 patches, end to end
hfdist_rows_of.pixel_values           0  6  2      patches of each row
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from hfdist.data.tokenization.image_tokens import stack_inputs

_COUNTS = "hfdist_rows_of."
"""Prefix of a tensor's name; with it, a batch has the tensor's counts: how much of its first axis is of each row."""


def stack_images(rows: Sequence[Mapping[str, torch.Tensor]], *, tells_rows: bool) -> dict[str, torch.Tensor]:
    """Put the tensors of the images of rows one after the other.

    Args:
        rows: the tensors of each row by name; a row without images has none.
        tells_rows: whether to add the counts of each tensor; shape [rows], int64.

    Returns:
        The joined tensors by name, and their counts.
    """
    batch = stack_inputs(rows)
    if not tells_rows:
        return batch
    counts: dict[str, torch.Tensor] = {}
    for name in batch:
        lengths = [len(row[name]) if name in row else 0 for row in rows]
        counts[_COUNTS + name] = torch.tensor(lengths)
    return batch | counts


def split_images(batch: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Give the tensors of the images of each row, by name, from a batch with their counts."""
    rows: list[dict[str, torch.Tensor]] = [{} for _ in batch["input_ids"]]
    for name in counted_names(batch):
        parts = batch[name].split(counts_of(batch, name).tolist())
        for row, part in zip(rows, parts, strict=True):
            if len(part):
                row[name] = part
    return rows


def counted_names(batch: Mapping[str, object]) -> list[str]:
    """Give the names of the tensors in a batch that have counts."""
    return [key.removeprefix(_COUNTS) for key in batch if key.startswith(_COUNTS)]


def counts_of(batch: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Give the counts of a tensor: how much of its first axis is of each row; shape [rows], int64."""
    return batch[_COUNTS + name]


def without_counts(batch: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Give the names and values of a batch but for the counts, which no model takes."""
    return ((name, value) for name, value in batch.items() if not name.startswith(_COUNTS))
