"""Sequences of several documents, some of which have images: their tensors, with positions of the model's own kind.

documents         a a I I I I a | b b b | fill
positions         0 1 2 3 4 5 6 | 0 1 2 | 0 1        they restart: the mask keeps documents apart
  time            0 1 2 2 2 2 4 | 0 1 2 | 0 1        the model's own three, where it has such, after those of the text
  height          0 1 2 2 3 3 4 | 0 1 2 | 0 1
  width           0 1 2 3 2 3 4 | 0 1 2 | 0 1
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Sequences
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from hfdist.data import marks
from hfdist.data.order.lane_state import Place
from hfdist.data.order.records import make_records
from hfdist.data.packing.row_images import stack_images
from hfdist.data.packing.sequence import (
    NAMES,
    POSITION_IDS,
    Pieces,
    Sequence,
    Shape,
    image_row,
    make_rows,
    stack_rows,
)
from hfdist.data.tokenization.image_tokens import ImageTokens, Inputs

_POSITIONS = NAMES[POSITION_IDS]
_TRIED = (((64, 48),), (), ((32, 32), (48, 64)))
"""Sizes of the images of each document of a trial."""
_BEFORE, _AFTER = "What is in this picture?", "It is a red square, and a cat looks at it."


def stack_packed(
    sequences: Sequences[Sequence], shape: Shape, images: ImageTokens, *, needs_image: bool, tells_rows: bool = False
) -> dict[str, torch.Tensor]:
    """Stack sequences of one length, with the tensors of their images.

    Args:
        sequences: packed, with their images.
        shape: of sequences.
        images: of the run.
        needs_image: as of `stack_rows`. The small image is a document of its own after the first sequence, and the
            others get as many tokens that fill up.
        tells_rows: as of `stack_images`.

    Returns:
        input_ids and labels of shape [sequences, length]; position_ids of the same, or of [4, sequences, length] where
        images have positions; and what the forward takes of images: their first axis is of images or patches.
    """
    rows = [_row(one.parts, one.lengths, one.blanks, one.images or {}, images) for one in sequences]
    inputs = [list((one.images or {}).values()) for one in sequences]
    if needs_image and not any(inputs):
        ids, small = images.none
        length, part = len(ids), np.where(np.isin(ids, images.ids), ~(np.array(ids) | marks.IMAGE), ids)
        inputs[0], blanks = [small], [(0, length)]
        added = _row([part.astype(np.int32)], [length], blanks, {0: small}, images)
        others = _row([np.full(length, shape.fill_id, dtype=np.int32)], [length], blanks, {}, images)
        rows = [
            {name: torch.cat([values, (others if number else added)[name]], -1) for name, values in row.items()}
            for number, row in enumerate(rows)
        ]
    stacked = {name: torch.stack([row[name] for row in rows], -2) for name in rows[0]}
    tensors = [[{name: torch.from_numpy(values) for name, values in own.items()} for own in row] for row in inputs]
    return stacked | stack_images(tensors, tells_rows=tells_rows)


def _row(
    parts: Sequences[NDArray[np.integer]],
    lengths: Sequences[int],
    blanks: Sequences[tuple[int, int]],
    inputs: Mapping[int, Inputs],
    images: ImageTokens,
) -> dict[str, torch.Tensor]:
    """Give what a forward takes of the tokens of a sequence, each of shape [tokens]; positions may be [4, tokens]."""
    begins = [0, *accumulate(lengths)]
    ids, positions, labels = make_rows(Pieces(parts, lengths, begins[:-1], blanks), np.int64)
    are_features = np.concatenate([marks.are_images(part) for part in parts])
    row = images.row(ids, are_features, labels)
    # With a mask, nobody looks for documents in positions.
    del row["attention_mask"]
    row[_POSITIONS] = torch.from_numpy(positions)
    if images.positions is None:
        return row
    of_images = row[_POSITIONS].repeat(4, 1)
    for piece, own in inputs.items():
        start, stop = begins[piece : piece + 2]
        document = {name: values[None, start:stop] for name, values in row.items() if name != _POSITIONS}
        document |= {name: torch.from_numpy(values) for name, values in own.items()}
        of_images[1:, start:stop] = images.positions(document)[:, 0]
    return row | {_POSITIONS: of_images}


def make_trial(images: ImageTokens) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Make a batch of one packed sequence with and without images, and a batch for each of its documents.

    All tokens of texts are targets, so that each one is compared.
    """
    parts, inputs = [], {}
    for number, sizes in enumerate(_TRIED):
        pictures = [Image.new("RGB", size, (90 * number, 40, 120)) for size in sizes]
        # A text after each: positions of types that have their own look for where an image ends.
        after = images.tokens_of_text(_AFTER)
        places = [token for picture in pictures for token in (*images.tokens_of(picture), *after)]
        ids = np.array([*images.tokens_of_text(_BEFORE), *places, *after], dtype=np.int32)
        parts.append(np.where(np.isin(ids, images.ids), ~(ids | marks.IMAGE), ids))
        if pictures:
            inputs[number] = images.inputs(pictures)
    packed = _sequence(parts, inputs)
    alone = [_sequence([part], {0: inputs[n]} if n in inputs else {}) for n, part in enumerate(parts)]
    shape = Shape(sum(packed.lengths), 0)
    rows = [stack_rows([image_row(one, images)], 0, images, needs_image=False) for one in alone]
    return stack_packed([packed], shape, images, needs_image=False), rows


def _sequence(parts: Sequences[NDArray[np.int32]], inputs: Mapping[int, Inputs]) -> Sequence:
    lengths = [len(part) for part in parts]
    return Sequence(parts, lengths, [], Place(), sum(lengths), len(parts), make_records(0), images=inputs)
