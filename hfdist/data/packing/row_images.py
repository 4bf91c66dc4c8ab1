"""The tensors of images in a batch, and how much of them each row has, so that a batch can be cut by rows.

input_ids                             3 rows
pixel_values                          8 patches, end to end
hfdist_rows_of.pixel_values           0  6  2
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from hfdist.data.tokenization.image_tokens import stack_inputs

_COUNTS = "hfdist_rows_of."
"""Begin of the key of the counts of a tensor; shape [rows], int64, in units of the tensor's first axis."""


def stack_images(rows: Sequence[Mapping[str, torch.Tensor]], *, tells_rows: bool) -> dict[str, torch.Tensor]:
    """Put the tensors of the images of rows one after the other.

    Args:
        rows: the tensors of each row; a row without images has none.
        tells_rows: whether to say, too, how much of each tensor is of which row.
    """
    batch = stack_inputs(rows)
    if not tells_rows:
        return batch
    counts = {_COUNTS + name: [len(row[name]) if name in row else 0 for row in rows] for name in batch}
    return batch | {key: torch.tensor(of_rows) for key, of_rows in counts.items()}


def split_images(batch: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Give the tensors of the images of each row of a batch that says how much of them is of which row."""
    parts = {name: batch[name].split(counts_of(batch, name).tolist()) for name in counted_names(batch)}
    num_rows = len(batch["input_ids"])
    return [{name: own[row] for name, own in parts.items() if len(own[row])} for row in range(num_rows)]


def counted_names(batch: Mapping[str, object]) -> list[str]:
    """Give the names of the tensors of images in a batch that says how much of them is of which row."""
    return [key.removeprefix(_COUNTS) for key in batch if key.startswith(_COUNTS)]


def counts_of(batch: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Give how much of a tensor is of each row; shape [rows], int64."""
    return batch[_COUNTS + name]


def without_counts(batch: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Give what a model is called on: tensors without their counts."""
    return ((name, value) for name, value in batch.items() if not name.startswith(_COUNTS))
