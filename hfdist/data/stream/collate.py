"""From packed sequences to the tensors of a micro batch."""

from __future__ import annotations

import numpy as np
import torch

from hfdist.config.data import Packing
from hfdist.data.packing.sequence import IGNORED, INPUT_IDS, LABELS, NAMES, Sequence, Shape, make_rows


def collate(sequences: list[Sequence], packing: Packing, shape: Shape) -> dict[str, torch.Tensor]:
    """Stack sequences, int64.

    Args:
        sequences: one or more; lengths differ only under `none`.
        packing: of the stream.
        shape: of sequences.

    Returns:
        input_ids, labels and position_ids of shape [sequences, length]; under `none` attention_mask in place of
        position_ids, filled up to the longest.
    """
    if packing is not Packing.none:
        rows = make_rows(sequences, np.int64)
        return {name: torch.from_numpy(row.reshape(-1, shape.length)) for name, row in zip(NAMES, rows, strict=True)}
    own = [sequence.rows for sequence in sequences]
    length = max(row.shape[1] for row in own)
    input_ids = torch.full((len(own), length), shape.fill_id)
    labels = torch.full((len(own), length), IGNORED)
    attention_mask = torch.zeros((len(own), length), dtype=torch.int64)
    for number, row in enumerate(own):
        input_ids[number, : row.shape[1]] = torch.from_numpy(row[INPUT_IDS])
        labels[number, : row.shape[1]] = torch.from_numpy(row[LABELS])
        attention_mask[number, : row.shape[1]] = 1
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
