"""Sequences of several documents, some of which have images: their tensors, with positions of the model's own kind.

documents         a a I I I I a | b b b | fill
positions         0 1 2 3 4 5 6 | 0 1 2 | 0 1        they restart: the mask keeps documents apart
  time            0 1 2 2 2 2 4 | 0 1 2 | 0 1        the model's own three, where it has such, after those of the text
  height          0 1 2 2 3 3 4 | 0 1 2 | 0 1
  width           0 1 2 3 2 3 4 | 0 1 2 | 0 1
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Sequences
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from hfdist.data import marks
from hfdist.data.order.lane_state import Place
from hfdist.data.order.records import make_records
from hfdist.data.packing.row_images import stack_images
from hfdist.data.packing.sequence import (
    IMAGE_DIGESTS,
    NAMES,
    POSITION_IDS,
    Pieces,
    Sequence,
    Shape,
    image_row,
    make_rows,
    stack_rows,
)
from hfdist.data.tokenization.image_tokens import ImageTokens, Inputs, stack_inputs

_POSITIONS = NAMES[POSITION_IDS]
_TRIED = (((64, 48),), (), ((32, 32), (48, 64)))
"""Sizes of the images of each document of a trial."""
_BEFORE, _AFTER = "What is in this picture?", "It is a red square, and a cat looks at it."


def stack_packed(
    sequences: Sequences[Sequence],
    shape: Shape,
    images: ImageTokens,
    *,
    needs_image: bool,
    tells_rows: bool = False,
    tells_images: bool = False,
) -> dict[str, torch.Tensor]:
    """Stack sequences of one length, with the tensors of their images.

    Args:
        sequences: packed, with their images.
        shape: of sequences.
        images: of the run.
        needs_image: as of `stack_packed_rows`.
        tells_rows: as of `stack_packed_rows`.
        tells_images: as of `packed_row`.

    Returns:
        As `stack_packed_rows`.
    """
    rows = [packed_row(one, images, tells_images=tells_images) for one in sequences]
    return stack_packed_rows(rows, shape.fill_id, images, needs_image=needs_image, tells_rows=tells_rows)


def stack_packed_rows(
    rows: Sequences[Mapping[str, torch.Tensor]],
    fill_id: int,
    images: ImageTokens,
    *,
    needs_image: bool,
    tells_rows: bool = False,
) -> dict[str, torch.Tensor]:
    """Stack rows of packed documents, with the tensors of their images.

    Args:
        rows: of `packed_row`; shorter ones are filled up by a document of their own.
        fill_id: token that fills up.
        images: of the run.
        needs_image: as of `stack_rows`. The small image is a document of its own after the first row.
        tells_rows: as of `stack_images`.

    Returns:
        input_ids and labels of shape [rows, tokens]; position_ids of the same, or of [4, rows, tokens] where images
        have positions; and what the forward takes of images: their first axis is of images or patches.
    """
    names = (*images.text_names, _POSITIONS, IMAGE_DIGESTS)
    own = [{name: values for name, values in row.items() if name in names} for row in rows]
    inputs = [{name: values for name, values in row.items() if name not in names} for row in rows]
    if needs_image and not any(inputs):
        ids, small = images.none
        part = np.where(np.isin(ids, images.ids), ~(np.array(ids) | marks.IMAGE), ids).astype(np.int32)
        added = _row([part], [len(ids)], [(0, len(ids))], {0: small}, images)
        own[0] = _joined(own[0], added)
        inputs[0] = {name: torch.from_numpy(values) for name, values in small.items()}
    longest = max(len(row["input_ids"]) for row in own)
    for number, row in enumerate(own):
        if missing := longest - len(row["input_ids"]):
            filler = np.full(missing, fill_id, dtype=np.int32)
            own[number] = _joined(row, _row([filler], [missing], [(0, missing)], {}, images))
    stacked = {name: torch.stack([row[name] for row in own], -2) for name in own[0]}
    return stacked | stack_images([[one] if one else [] for one in inputs], tells_rows=tells_rows)


def _joined(row: Mapping[str, torch.Tensor], more: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Put tokens after those of a row; they have no images that are told."""
    none = torch.zeros_like(more["input_ids"])
    return {name: torch.cat([values, more.get(name, none)], -1) for name, values in row.items()}


def packed_row(sequence: Sequence, images: ImageTokens, *, tells_images: bool = False) -> dict[str, torch.Tensor]:
    """Give what a forward takes of a packed sequence, and the tensors of its images.

    Args:
        sequence: packed, with its images. Each document of a piece, as of a preference, has those of the piece.
        images: of the run.
        tells_images: whether to say, too, which images a document has: `IMAGE_DIGESTS`.

    Returns:
        Of shape [tokens], positions perhaps [4, tokens]; the first axis of those of images is of images or patches.
    """
    given = sequence.images or {}
    row = _row(sequence.parts, sequence.lengths, sequence.blanks, given, images)
    documents = list(_documents(sequence.parts, sequence.lengths, given))
    if tells_images:
        row[IMAGE_DIGESTS] = torch.zeros_like(row["input_ids"])
        for start, _, inputs in documents:
            row[IMAGE_DIGESTS][start] = _digest(inputs)
    return row | stack_inputs(
        [{name: torch.from_numpy(values) for name, values in own.items()} for _, _, own in documents]
    )


def _documents(
    parts: Sequences[NDArray[np.integer]], lengths: Sequences[int], inputs: Mapping[int, Inputs]
) -> Iterator[tuple[int, int, Inputs]]:
    """Give where each document with images begins and ends, and its images."""
    tokens, begins = np.concatenate(parts), [0, *accumulate(lengths)]
    for piece, own in inputs.items():
        start, stop = begins[piece : piece + 2]
        edges = [start, *(start + marks.begin(tokens[start:stop])).tolist(), stop]
        yield from ((*edge, own) for edge in pairwise(edges))


def _digest(inputs: Inputs) -> int:
    """Give a hash of the tensors of images; 8 bytes."""
    found = hashlib.blake2b(digest_size=8)
    for name in sorted(inputs):
        found.update(np.ascontiguousarray(inputs[name]).tobytes())
    return int.from_bytes(found.digest(), "little", signed=True)


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
    for start, stop, own in _documents(parts, lengths, inputs):
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
