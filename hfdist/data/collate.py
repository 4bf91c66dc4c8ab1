"""From packed sequences to the tensors of a micro batch."""

from __future__ import annotations

import torch

from hfdist.config.data import Packing
from hfdist.data.packing.sequence import IGNORED, INPUT_IDS, LABELS, NAMES, Sequence, Shape, write_rows


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
        tensors = torch.empty((len(NAMES), len(sequences), shape.length), dtype=torch.int64)
        write_rows(sequences, tensors.view(len(NAMES), -1).numpy())
        return dict(zip(NAMES, tensors.unbind(), strict=True))
    rows = [sequence.rows for sequence in sequences]
    length = max(row.shape[1] for row in rows)
    input_ids = torch.full((len(rows), length), shape.fill_id)
    labels = torch.full((len(rows), length), IGNORED)
    attention_mask = torch.zeros((len(rows), length), dtype=torch.int64)
    for number, row in enumerate(rows):
        input_ids[number, : row.shape[1]] = torch.from_numpy(row[INPUT_IDS])
        labels[number, : row.shape[1]] = torch.from_numpy(row[LABELS])
        attention_mask[number, : row.shape[1]] = 1
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
