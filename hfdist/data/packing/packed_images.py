"""Sequences of several documents, some of which have images: their tensors, with positions of the model's own kind.

documents         a a I I I I a | b b b | fill
positions         0 1 2 3 4 5 6 | 0 1 2 | 0 1        they restart: the mask keeps documents apart
  time            0 1 2 2 2 2 4 | 0 1 2 | 0 1        the model's own three, where it has such, after those of the text
  height          0 1 2 2 3 3 4 | 0 1 2 | 0 1
  width           0 1 2 3 2 3 4 | 0 1 2 | 0 1
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Sequences
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from hfdist.data import marks
from hfdist.data.order.lane_state import Place
from hfdist.data.order.records import make_records
from hfdist.data.packing.row_images import stack_images
from hfdist.data.packing.sequence import (
    IMAGE_DIGESTS,
    NAMES,
    POSITION_IDS,
    PieceImages,
    Pieces,
    Sequence,
    image_row,
    make_rows,
    stack_rows,
)
from hfdist.data.tokenization.image_tokens import ImageTokens, Inputs, stack_inputs

_POSITIONS = NAMES[POSITION_IDS]
_TRIED = (((64, 48),), (), ((32, 32), (48, 64)))
"""Sizes of the images of each document of a trial."""
_TEXT_BEFORE, _TEXT_AFTER = "What is in this picture?", "It is a red square, and a cat looks at it."


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
    texts = [{name: values for name, values in row.items() if name in names} for row in rows]
    inputs = [{name: values for name, values in row.items() if name not in names} for row in rows]
    if needs_image and not any(inputs):
        ids, small = images.none
        texts[0] = _with_blank(texts[0], _mark_features(ids, images), images, small)
        inputs[0] = _tensors(small)
    longest = max(len(text["input_ids"]) for text in texts)
    for number, text in enumerate(texts):
        if missing := longest - len(text["input_ids"]):
            texts[number] = _with_blank(text, np.full(missing, fill_id, dtype=np.int32), images)
    stacked = {name: torch.stack([text[name] for text in texts], -2) for name in texts[0]}
    return stacked | stack_images(inputs, tells_rows=tells_rows)


def _with_blank(
    text: Mapping[str, torch.Tensor], tokens: marks.Tokens, images: ImageTokens, inputs: Inputs | None = None
) -> dict[str, torch.Tensor]:
    """Put a document without targets, of these tokens and perhaps with an image, after those of a row."""
    documents = [] if inputs is None else [_Document(0, len(tokens), PieceImages(inputs, digest=0))]
    blank = _row(Pieces(tokens, [len(tokens)], [0], [(0, len(tokens))]), documents, images)
    # The blank document has no digests of images: zeros stand for them.
    none = torch.zeros_like(blank["input_ids"])
    return {name: torch.cat([values, blank.get(name, none)], -1) for name, values in text.items()}


class _Document(NamedTuple):
    """A document with images, and where in a row it stands."""

    start: int
    stop: int
    images: PieceImages


def packed_row(sequence: Sequence, images: ImageTokens, *, tells_images: bool = False) -> dict[str, torch.Tensor]:
    """Give what a forward takes of a packed sequence, and the tensors of its images.

    Args:
        sequence: packed, with its images.
        images: of the run.
        tells_images: whether to say, too, which images a document has: `IMAGE_DIGESTS`.

    Returns:
        Of shape [tokens], positions perhaps [4, tokens]; the first axis of those of images is of images or patches.
    """
    pieces = Pieces.of([sequence])
    documents = list(_documents(pieces, sequence.images or {}))
    row = _row(pieces, documents, images)
    if tells_images:
        row[IMAGE_DIGESTS] = torch.zeros_like(row["input_ids"])
        for document in documents:
            row[IMAGE_DIGESTS][document.start] = document.images.digest
    return row | stack_inputs([_tensors(document.images.inputs) for document in documents])


def _tensors(inputs: Inputs) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(values) for name, values in inputs.items()}


def _documents(pieces: Pieces, images: Mapping[int, PieceImages]) -> Iterator[_Document]:
    """Give the documents with images: one of a piece, or both of a preference."""
    for piece, of_piece in images.items():
        start = int(pieces.begins[piece])
        stop = start + pieces.lengths[piece]
        edges = [start, *(start + marks.begin(pieces.tokens[start:stop])).tolist(), stop]
        yield from (_Document(*edge, of_piece) for edge in pairwise(edges))


def _row(pieces: Pieces, documents: Sequences[_Document], images: ImageTokens) -> dict[str, torch.Tensor]:
    """Give what a forward takes of the tokens of a sequence, each of shape [tokens]; positions may be [4, tokens]."""
    ids, positions, labels = make_rows(pieces, np.int64)
    row = images.row(ids, marks.are_images(pieces.tokens), labels)
    # A model that gets a mask does not look for documents in positions.
    del row["attention_mask"]
    row[_POSITIONS] = torch.from_numpy(positions)
    if images.positions is None:
        return row
    of_images = row[_POSITIONS].repeat(4, 1)
    for start, stop, of_piece in documents:
        document = {name: values[None, start:stop] for name, values in row.items() if name != _POSITIONS}
        of_images[1:, start:stop] = images.positions(document | _tensors(of_piece.inputs))[:, 0]
    return row | {_POSITIONS: of_images}


def make_trial(images: ImageTokens) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Make a batch of one packed sequence with and without images, and a batch for each of its documents.

    All tokens of texts are targets, so that each one is compared.
    """
    parts, inputs = [], {}
    for number, sizes in enumerate(_TRIED):
        pictures = [Image.new("RGB", size, (90 * number, 40, 120)) for size in sizes]
        # A text after each: positions of types that have their own look for where an image ends.
        after = images.tokens_of_text(_TEXT_AFTER)
        places = [token for picture in pictures for token in (*images.tokens_of(picture), *after)]
        parts.append(_mark_features([*images.tokens_of_text(_TEXT_BEFORE), *places, *after], images))
        if pictures:
            inputs[number] = images.inputs(pictures)
    packed = _sequence(parts, inputs)
    alone = [_sequence([part], {0: inputs[n]} if n in inputs else {}) for n, part in enumerate(parts)]
    rows = [stack_rows([image_row(one, images)], 0, images, needs_image=False) for one in alone]
    return stack_packed_rows([packed_row(packed, images)], 0, images, needs_image=False), rows


def _mark_features(ids: Sequences[int], images: ImageTokens) -> marks.Tokens:
    """Give tokens of which those of images have their mark, and all others are targets."""
    tokens = np.array(ids, dtype=np.int32)
    return np.where(np.isin(tokens, images.ids), ~(tokens | marks.IMAGE), tokens)


def _sequence(parts: Sequences[marks.Tokens], inputs: Mapping[int, Inputs]) -> Sequence:
    lengths = [len(part) for part in parts]
    images = {piece: PieceImages(of_piece, digest=0) for piece, of_piece in inputs.items()}
    return Sequence(parts, lengths, [], Place(), sum(lengths), len(parts), make_records(0), images=images)
