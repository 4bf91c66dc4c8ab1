"""From packed sequences to the tensors of a micro batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from hfdist.config.data import Packing
from hfdist.data.packing.sequence import IGNORED, INPUT_IDS, LABELS, NAMES, Shape


def collate(rows: Sequence[NDArray[np.int32]], packing: Packing, shape: Shape) -> dict[str, torch.Tensor]:
    """Stack sequences, int64.

    Args:
        rows: of each sequence, shape [3, length]; lengths differ only under `none`.
        packing: of the stream.
        shape: of sequences.

    Returns:
        input_ids, labels and position_ids of shape [sequences, length]; under `none` attention_mask in place of
        position_ids, filled up to the longest.
    """
    if packing is not Packing.none:
        stacked = torch.from_numpy(np.stack(rows)).long()
        return dict(zip(NAMES, stacked.unbind(1), strict=True))
    length = max(row.shape[1] for row in rows)
    input_ids = torch.full((len(rows), length), shape.fill_id)
    labels = torch.full((len(rows), length), IGNORED)
    attention_mask = torch.zeros((len(rows), length), dtype=torch.int64)
    for number, row in enumerate(rows):
        input_ids[number, : row.shape[1]] = torch.from_numpy(row[INPUT_IDS])
        labels[number, : row.shape[1]] = torch.from_numpy(row[LABELS])
        attention_mask[number, : row.shape[1]] = 1
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
