"""A data rank's batch of a step, split into micro batches."""

from __future__ import annotations

from typing import Any

import torch

from hfdist.config.batch import IGNORED
from hfdist.data.packing.row_images import counted_names, counts_of, without_counts
from hfdist.errors import ConfigError
from hfdist.models.routers import COUNTED

_NEVER_FILLED = {"labels": IGNORED, "shift_labels": IGNORED, COUNTED: False}
"""What rows that fill up a batch have in place of a copy."""


def split_batch(batch: dict[str, Any], num_microbatches: int) -> list[dict[str, Any]]:
    """Split a data rank's batch of a step along its first dimension, the same on every rank of its pipeline.

    A batch that does not divide, such as the last one of a dataset, is filled up with copies of its first row that
    have no target: a loss that is a sum over targets does not see them.

    Args:
        batch: tensors whose first dimension is the sequences; numbers, and tensors whose first dimension is 1 so that
            they stand for all sequences, go to every micro batch. Tensors of images go with their rows: see
            `stack_images`. The rows of positions of several kinds, as those of images, are their second dimension.
        num_microbatches: number of micro batches of a step.

    Raises:
        ConfigError: a tensor that is not split by sequences, such as the bounds of documents in a row without padding.
    """
    num_rows = len(batch["input_ids"])
    size = -(-num_rows // num_microbatches)
    missing = size * num_microbatches - num_rows
    of_images = counted_names(batch)
    parts: dict[str, list[object]] = {}
    for name, value in batch.items():
        if name in of_images:
            continue
        axis = _axis_of_rows(name, value)
        if not isinstance(value, torch.Tensor) or value.ndim == 0 or value.shape[axis] == 1 < num_rows:
            parts[name] = [value] * num_microbatches
            continue
        _check_has_rows(name, value, num_rows, axis)
        parts[name] = list((_fill_up(name, value, missing, axis) if missing else value).split(size, axis))
    found = [{name: values[index] for name, values in parts.items()} for index in range(num_microbatches)]
    for name in of_images:
        _split_images(name, batch, missing, found)
    return [dict(without_counts(part)) for part in found]


def _split_images(name: str, batch: dict[str, Any], missing: int, parts: list[dict[str, Any]]) -> None:
    """Put into each part what its rows have of a tensor of images; nothing where they have none."""
    of_first = batch[name][: int(counts_of(batch, name)[0])]
    values = torch.cat([batch[name], *[of_first] * missing]) if missing else batch[name]
    counts = [int(counts_of(part, name).sum()) for part in parts]
    for part, value in zip(parts, values.split(counts), strict=True):
        if len(value):
            part[name] = value


def _fill_up(name: str, value: torch.Tensor, missing: int, axis: int) -> torch.Tensor:
    filler = value.narrow(axis, 0, 1).repeat_interleave(missing, axis)
    if name in _NEVER_FILLED:
        filler = torch.full_like(filler, _NEVER_FILLED[name])
    return torch.cat([value, filler], axis)


def _axis_of_rows(name: str, value: object) -> int:
    """Give the dimension of a tensor that is its sequences: positions may be of text, time, height and width."""
    return 1 if name == "position_ids" and isinstance(value, torch.Tensor) and value.ndim == 3 else 0


def _check_has_rows(name: str, value: torch.Tensor, num_rows: int, axis: int) -> None:
    if value.shape[axis] != num_rows or name.startswith("cu_seq_lens"):
        raise ConfigError(
            "a pipeline splits a batch into micro batches by its sequences, and this tensor has none",
            where=f"batch['{name}']",
            found=f"shape {tuple(value.shape)}, with {num_rows} sequences",
            allowed=f"tensors of shape [{num_rows}, ...], and positions of shape [kinds, {num_rows}, tokens]",
            hint="another data_collator",
        )
