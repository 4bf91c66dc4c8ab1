"""The tensors of packed sequences whose documents have images, with the positions that the model gives to images.

documents         a a I I I I a | b b b | fill
positions         0 1 2 3 4 5 6 | 0 1 2 | 0 1        they restart: the mask keeps documents apart
  time            0 1 2 2 2 2 4 | 0 1 2 | 0 1        three more kinds, if the model has positions of its own for
  height          0 1 2 2 3 3 4 | 0 1 2 | 0 1        images; the text's come first
  width           0 1 2 3 2 3 4 | 0 1 2 | 0 1
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    PackedSequence,
    PieceImages,
    Pieces,
    image_row,
    make_rows,
    stack_rows,
)
from hfdist.data.tokenization.image_tokens import ImageTokens, Inputs, stack_inputs

_POSITIONS = NAMES[POSITION_IDS]
_TRIED = (((64, 48),), (), ((32, 32), (48, 64)))
"""Sizes in pixels of the images of each document of a trial: one image, none, and two."""
_TEXT_BEFORE, _TEXT_AFTER = "What is in this picture?", "It is a red square, and a cat looks at it."
"""Texts of each document of a trial, before and after its images."""


def stack_packed_rows(
    rows: Sequence[Mapping[str, torch.Tensor]],
    fill_id: int,
    images: ImageTokens,
    *,
    needs_image: bool,
    tells_rows: bool = False,
) -> dict[str, torch.Tensor]:
    """Stack rows of packed documents, with the tensors of their images.

    Args:
        rows: tensors of each row, made by `packed_row`; the filling of a shorter row is a document of its own.
        fill_id: token that fills up shorter rows.
        images: what images of the run become.
        needs_image: whether a batch without an image gets a small one, from which nothing is learned, as a document of
            its own after its first row.
        tells_rows: whether the batch says how much of each image tensor is of which row.

    Returns:
        input_ids and labels of shape [rows, tokens]; position_ids of the same shape, or of [4, rows, tokens] where
        images have positions; and the tensors of images that a forward takes, whose first axis is of images or patches.
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
    """Put one more document after the documents of a row: of these tokens, without targets, perhaps with an image."""
    documents = [] if inputs is None else [_Document(0, len(tokens), PieceImages(inputs, digest=0))]
    blank = _row(Pieces(tokens, [len(tokens)], [0], [(0, len(tokens))]), documents, images)
    # The blank document has no digests of images: zeros stand for them.
    none = torch.zeros_like(blank["input_ids"])
    return {name: torch.cat([values, blank.get(name, none)], -1) for name, values in text.items()}


class _Document(NamedTuple):
    """A document with images in a row."""

    start: int
    """Place of its first token in the row."""
    stop: int
    """Place after its last token."""
    images: PieceImages


def packed_row(sequence: PackedSequence, images: ImageTokens, *, tells_images: bool = False) -> dict[str, torch.Tensor]:
    """Give the tensors of a packed sequence and of its images, as a row for `stack_packed_rows`.

    Args:
        sequence: the sequence, with its images.
        images: what images of the run become.
        tells_images: whether to add hashes of each document's images, under the key `IMAGE_DIGESTS`.

    Returns:
        Tensors of shape [tokens], positions perhaps of [4, tokens]; the first axis of image tensors is of images or
        patches.
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
    """Give the arrays of images as tensors."""
    return {name: torch.from_numpy(values) for name, values in inputs.items()}


def _documents(pieces: Pieces, images: Mapping[int, PieceImages]) -> Iterator[_Document]:
    """Give the documents with images: one of a piece, or both of a preference."""
    for piece, of_piece in images.items():
        start = int(pieces.begins[piece])
        stop = start + pieces.lengths[piece]
        second_begins = start + marks.begin(pieces.tokens[start:stop])
        for begin, end in pairwise([start, *second_begins.tolist(), stop]):
            yield _Document(begin, end, of_piece)


def _row(pieces: Pieces, documents: Sequence[_Document], images: ImageTokens) -> dict[str, torch.Tensor]:
    """Give the tensors of the tokens of a sequence, each of shape [tokens]; positions may be of [4, tokens]."""
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
    """Make the two sides of a test that packing changes nothing: a batch of a packed row, and one for each document.

    All tokens of texts are targets, so that each one is compared.

    Returns:
        The batch of the packed sequence, some of whose documents have images; and a batch for each of its documents.
    """
    parts, inputs = [], {}
    for number, sizes in enumerate(_TRIED):
        pictures = [Image.new("RGB", size, (90 * number, 40, 120)) for size in sizes]
        # A text after each: positions of types that have their own look for where an image ends.
        after = images.tokens_of_text(_TEXT_AFTER)
        ids = [*images.tokens_of_text(_TEXT_BEFORE)]
        for picture in pictures:
            ids += [*images.tokens_of(picture), *after]
        parts.append(_mark_features([*ids, *after], images))
        if pictures:
            inputs[number] = images.inputs(pictures)
    packed = _sequence(parts, inputs)
    alone = [_sequence([part], {0: inputs[n]} if n in inputs else {}) for n, part in enumerate(parts)]
    rows = [stack_rows([image_row(one, images)], 0, images, needs_image=False) for one in alone]
    return stack_packed_rows([packed_row(packed, images)], 0, images, needs_image=False), rows


def _mark_features(ids: Sequence[int], images: ImageTokens) -> marks.Tokens:
    """Give tokens in which each place of an image has the mark of images, and all others are targets."""
    tokens = np.array(ids, dtype=np.int32)
    return np.where(np.isin(tokens, images.ids), ~(tokens | marks.IMAGE), tokens)


def _sequence(parts: Sequence[marks.Tokens], inputs: Mapping[int, Inputs]) -> PackedSequence:
    """Make a packed sequence of documents, whose images are given by the document's number."""
    lengths = [len(part) for part in parts]
    images = {piece: PieceImages(of_piece, digest=0) for piece, of_piece in inputs.items()}
    return PackedSequence(parts, lengths, [], Place(), sum(lengths), len(parts), make_records(0), images=images)
