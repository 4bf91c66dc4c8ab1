"""How much of the tensors of images in a batch is of which row, by which rows with their images come apart again.

input_ids                             3 rows
pixel_values                          8 patches, end to end
hfdist_rows_of.pixel_values           0  6  2
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch

_COUNTS = "hfdist_rows_of."
"""Begin of the key of the counts of a tensor; shape [rows], int64, in units of the tensor's first axis."""


def count_by_row(
    rows: Sequence[Mapping[str, torch.Tensor]], batch: Mapping[str, torch.Tensor], text_names: Collection[str]
) -> dict[str, torch.Tensor]:
    """Count how much of each tensor of images is of which row.

    Args:
        rows: what was stacked.
        batch: of these rows.
        text_names: names of what a batch has for each token.
    """
    names = [name for name in batch if name not in text_names]
    return {_COUNTS + name: torch.tensor([len(row[name]) if name in row else 0 for row in rows]) for name in names}


def counted_names(batch: Mapping[str, object]) -> list[str]:
    """Give the names of the tensors of images in a batch that says how much of them is of which row."""
    return [key.removeprefix(_COUNTS) for key in batch if key.startswith(_COUNTS)]


def counts_of(batch: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Give how much of a tensor is of each row; shape [rows], int64."""
    return batch[_COUNTS + name]


def without_counts(batch: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Give what a model is called on: tensors without their counts."""
    return ((name, value) for name, value in batch.items() if not name.startswith(_COUNTS))
