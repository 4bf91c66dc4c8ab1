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
"""Keys of a batch, each of shape [rows, most texts of a row, most tokens of a text].

IDS has the tokens of texts, MASK a 1 for each of them, SEGMENTS a 1 for tokens of the second text of a pair, and LABELS
the tokens of labels, -1 after the last. Where a row has fewer texts there is one token of padding, and no label."""


def take_apart(batch: Batch, padding: int) -> Batch:
    """Add the texts of a batch to it, under IDS, MASK, SEGMENTS and LABELS.

    Args:
        batch: `input_ids` and `labels` of shape [rows, tokens], with `position_ids` if documents are packed.
        padding: the model's padding token.
    """
    ids, labels = batch["input_ids"], batch["labels"]
    is_label = labels >= 0
    begins = _find_begins(batch, is_label)
    is_text = _find_texts(begins, is_label)
    if not bool(is_text.any()):
        return batch | _no_texts(ids, padding)
    texts = TextsApart.of(begins, is_text)
    text_labels = TextsApart.of(begins, is_label)
    # The row of each text, and the text's number in its row.
    rows = texts.tokens[texts.places == 0] // ids.shape[1]
    number_in_row = torch.arange(len(rows), device=rows.device) - torch.searchsorted(rows, rows)
    most_texts = int(number_in_row.max()) + 1

    def by_rows(values: torch.Tensor, fill: int) -> torch.Tensor:
        """Put values of texts, [texts, tokens], in their rows: [rows, most texts, tokens]."""
        spread = values.new_full((len(ids), most_texts, values.shape[1]), fill)
        spread[rows, number_in_row] = values
        return spread

    mask = by_rows(texts.mask, 0)
    # A model must see a token of each row.
    mask[..., 0] = 1
    label_tokens = text_labels.take_apart(ids).masked_fill(text_labels.mask == 0, -1)
    return batch | {
        IDS: by_rows(texts.take_apart(ids, fill=padding), padding),
        MASK: mask,
        # Tokens of the second text of a pair have a mark below IGNORED.
        SEGMENTS: by_rows(texts.take_apart((labels < IGNORED).long()), 0),
        LABELS: by_rows(label_tokens, -1),
    }


def _find_begins(batch: Batch, is_label: torch.Tensor) -> torch.Tensor:
    """Whether a text, or what fills up a row, begins at a token; shape [rows, tokens]."""
    begins = pad(is_label[:, :-1], (1, 0), value=True) & ~is_label
    if "position_ids" in batch:
        begins |= batch["position_ids"] == 0
    begins[:, 0] = True
    return begins


def _find_texts(begins: torch.Tensor, is_label: torch.Tensor) -> torch.Tensor:
    """Whether a token is one of a text that has a label after it; shape [rows, tokens]."""
    number = (begins.flatten().cumsum(0) - 1).view(begins.shape)
    has_label = torch.zeros(begins.numel(), dtype=torch.bool, device=begins.device)
    has_label[number[is_label]] = True
    return has_label[number] & ~is_label


def _no_texts(ids: torch.Tensor, padding: int) -> Batch:
    """Give one token of padding, and no label, for each row."""
    ones = ids.new_ones(len(ids), 1, 1)
    return {IDS: ones * padding, MASK: ones, SEGMENTS: ones * 0, LABELS: -ones}


def have_labels(batch: Batch) -> torch.Tensor:
    """Whether a text is there and has labels; shape [rows, texts].

    Rows that fill up the micro batches of a pipeline have no labels.
    """
    return (batch[LABELS][..., 0] >= 0) & (batch["labels"] != IGNORED).any(1)[:, None]
