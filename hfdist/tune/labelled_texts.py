"""The texts of a batch, each in a row of its own, and its labels, which stand after it.

a batch, [rows, tokens]     texts, [rows, most texts of a row, longest]     their labels, [.., .., most labels]
  row 0   a a a 3                     a a a   . . .                                   3   -1
  row 1   b b 1 c c c 0               b b .   c c c                                   1    0

In `labels` of the batch, tokens of labels are targets, and tokens of texts are not.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from hfdist.config.batch import IGNORED
from hfdist.models.texts_apart import TextsApart
from hfdist.strategies.engine import Batch

IDS, MASK, SEGMENTS, LABELS = "text_ids", "text_mask", "text_segments", "text_labels"
"""Keys of a batch, each of shape [rows, most texts of a row, most tokens of a text]; LABELS has tokens of labels, -1
after the last. Where a row has fewer texts there is one token of padding, and no label."""


def take_apart(batch: Batch, padding: int) -> Batch:
    """Add the texts of a batch to it; `padding`: the model's token."""
    ids, labels = batch["input_ids"], batch["labels"]
    is_label = labels >= 0
    begins = pad(is_label[:, :-1], (1, 0), value=True) & ~is_label
    if "position_ids" in batch:
        begins |= batch["position_ids"] == 0
    begins[:, 0] = True
    number = (begins.flatten().cumsum(0) - 1).view(ids.shape)
    has_label = torch.zeros(ids.numel(), dtype=torch.bool, device=ids.device)
    has_label[number[is_label]] = True
    is_text = has_label[number] & ~is_label
    if not bool(is_text.any()):
        return batch | _nothing(ids, padding)
    texts = TextsApart.of(begins, is_text)
    own_labels = TextsApart.of(begins, is_label)
    firsts = texts.tokens[texts.places == 0]
    rows = firsts // ids.shape[1]
    among_row = torch.arange(len(rows), device=rows.device) - torch.searchsorted(rows, rows)
    most = int(among_row.max()) + 1

    def by_rows(values: torch.Tensor, fill: int) -> torch.Tensor:
        spread = values.new_full((len(ids), most, values.shape[1]), fill)
        spread[rows, among_row] = values
        return spread

    mask = by_rows(texts.mask, 0)
    # A model must see a token of each row.
    mask[..., 0] = 1
    shown = own_labels.take_apart(ids).masked_fill(own_labels.mask == 0, -1)
    return batch | {
        IDS: by_rows(texts.take_apart(ids, fill=padding), padding),
        MASK: mask,
        SEGMENTS: by_rows(texts.take_apart((labels < IGNORED).long()), 0),
        LABELS: by_rows(shown, -1),
    }


def _nothing(ids: torch.Tensor, padding: int) -> Batch:
    one = ids.new_ones(len(ids), 1, 1)
    return {IDS: one * padding, MASK: one, SEGMENTS: one * 0, LABELS: -one}


def have_labels(batch: Batch) -> torch.Tensor:
    """Whether a text is there and has labels; shape [rows, texts].

    Rows that fill up the micro batches of a pipeline have none.
    """
    return (batch[LABELS][..., 0] >= 0) & (batch["labels"] != IGNORED).any(1)[:, None]
