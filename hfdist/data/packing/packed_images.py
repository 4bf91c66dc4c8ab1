"""The tensors of packed sequences whose documents have images: tokens, positions, and what a forward takes of images.

A row of two documents, the first with an image of 2 x 2 features (I), and the filling at its end:

documents         a a I I I I a | b b b | fill
position_ids      0 1 2 3 4 5 6 | 0 1 2 | 0 1        positions restart at each document, for the mask keeps them apart
  time            0 1 2 2 2 2 4 | 0 1 2 | 0 1        if the model has positions of its own for images, these three
  height          0 1 2 2 3 3 4 | 0 1 2 | 0 1        follow as rows 1 to 3 of position_ids
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
_TRIAL_SIZES = (((64, 48),), (), ((32, 32), (48, 64)))
"""Widths and heights in pixels of the images of each document of a trial: one image, none, and two."""
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
        images: the model's processor of images.
        needs_image: whether a batch without an image gets a small one, from which nothing is learned, as a document of
            its own after its first row.
        tells_rows: whether the batch says how much of each image tensor is of which row.

    Returns:
        input_ids and labels of shape [rows, tokens]; position_ids of the same shape, or of [4, rows, tokens] where
        images have positions; and the tensors of images that a forward takes, whose first axis is of images or patches.
    """
    token_names = (*images.text_names, _POSITIONS, IMAGE_DIGESTS)
    token_rows = [{name: values for name, values in row.items() if name in token_names} for row in rows]
    image_rows = [{name: values for name, values in row.items() if name not in token_names} for row in rows]
    if needs_image and not any(image_rows):
        small = images.none
        marked = _mark_features(small.tokens, images)
        token_rows[0] = _add_blank(token_rows[0], marked, images, small.inputs)
        image_rows[0] = _tensors(small.inputs)
    longest = max(len(row["input_ids"]) for row in token_rows)
    for number, row in enumerate(token_rows):
        missing = longest - len(row["input_ids"])
        if missing:
            token_rows[number] = _add_blank(row, np.full(missing, fill_id, dtype=np.int32), images)
    # Rows become the axis before that of tokens: [tokens] to [rows, tokens], and [4, tokens] to [4, rows, tokens].
    stacked = {name: torch.stack([row[name] for row in token_rows], -2) for name in token_rows[0]}
    return stacked | stack_images(image_rows, tells_rows=tells_rows)


def _add_blank(
    row: Mapping[str, torch.Tensor], tokens: marks.Tokens, images: ImageTokens, inputs: Inputs | None = None
) -> dict[str, torch.Tensor]:
    """Give a row with one more document at its end: of these tokens, without targets, perhaps with an image.

    `row` has the tensors of tokens alone; `inputs` has those of the document's image.
    """
    documents = [] if inputs is None else [_Document(0, len(tokens), PieceImages(inputs, digest=0))]
    blank = _token_tensors(Pieces(tokens, [len(tokens)], [0], [(0, len(tokens))]), documents, images)
    # The blank document has no digests of images: zeros stand for them.
    zeros = torch.zeros_like(blank["input_ids"])
    return {name: torch.cat([values, blank.get(name, zeros)], -1) for name, values in row.items()}


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
        images: the model's processor of images.
        tells_images: whether to add hashes of each document's images, under the key `IMAGE_DIGESTS`.

    Returns:
        Tensors of shape [tokens], positions perhaps of [4, tokens]; the first axis of image tensors is of images or
        patches.
    """
    pieces = Pieces.of([sequence])
    documents = list(_find_documents(pieces, sequence.images or {}))
    row = _token_tensors(pieces, documents, images)
    if tells_images:
        row[IMAGE_DIGESTS] = torch.zeros_like(row["input_ids"])
        for document in documents:
            row[IMAGE_DIGESTS][document.start] = document.images.digest
    return row | stack_inputs([_tensors(document.images.inputs) for document in documents])


def _tensors(inputs: Inputs) -> dict[str, torch.Tensor]:
    """Give the arrays of images as tensors."""
    return {name: torch.from_numpy(values) for name, values in inputs.items()}


def _find_documents(pieces: Pieces, images: Mapping[int, PieceImages]) -> Iterator[_Document]:
    """Give the documents with images: a piece is one document, or the two of a preference, which share its images."""
    for piece, piece_images in images.items():
        start = int(pieces.begins[piece])
        stop = start + pieces.lengths[piece]
        second_begins = start + marks.begin(pieces.tokens[start:stop])
        for begin, end in pairwise([start, *second_begins.tolist(), stop]):
            yield _Document(begin, end, piece_images)


def _token_tensors(pieces: Pieces, documents: Sequence[_Document], images: ImageTokens) -> dict[str, torch.Tensor]:
    """Give the tensors of the tokens of pieces, each of shape [tokens]; position_ids may be of [4, tokens].

    `documents` are those that have images.
    """
    ids, positions, labels = make_rows(pieces, np.int64)
    row = images.row(ids, marks.are_images(pieces.tokens), labels)
    # A model that gets a mask does not look for documents in positions.
    del row["attention_mask"]
    row[_POSITIONS] = torch.from_numpy(positions)
    if images.positions is None:
        return row
    # Text has the same position in all four rows; documents with images get their own in the last three.
    position_ids = row[_POSITIONS].repeat(4, 1)
    for start, stop, piece_images in documents:
        document = {name: values[None, start:stop] for name, values in row.items() if name != _POSITIONS}
        own = images.positions(document | _tensors(piece_images.inputs))
        # The model's positions have the shape [3, 1, tokens], for a batch of this document alone.
        position_ids[1:, start:stop] = own.squeeze(1)
    return row | {_POSITIONS: position_ids}


class PackingTrial(NamedTuple):
    """The same documents in two ways, for a test that packing changes nothing. All tokens of texts are targets."""

    packed: dict[str, torch.Tensor]
    """A batch of one row, in which all documents are packed; some of them have images."""
    alone: list[dict[str, torch.Tensor]]
    """A batch for each of the documents."""


def make_trial(images: ImageTokens) -> PackingTrial:
    """Make documents with one image, none and two, and batches of them: packed, and each one alone."""
    documents: list[marks.Tokens] = []
    inputs: dict[int, Inputs] = {}
    for number, sizes in enumerate(_TRIAL_SIZES):
        pictures = [Image.new("RGB", size, (90 * number, 40, 120)) for size in sizes]
        documents.append(_trial_document(pictures, images))
        if pictures:
            inputs[number] = images.inputs(pictures)
    packed = packed_row(_sequence(documents, inputs), images)
    alone: list[dict[str, torch.Tensor]] = []
    for number, document in enumerate(documents):
        own_inputs = {0: inputs[number]} if number in inputs else {}
        row = image_row(_sequence([document], own_inputs), images)
        alone.append(stack_rows([row], 0, images, needs_image=False))
    return PackingTrial(stack_packed_rows([packed], 0, images, needs_image=False), alone)


def _trial_document(pictures: Sequence[Image.Image], images: ImageTokens) -> marks.Tokens:
    """Write a document of a text, the pictures with a text after each, and a text at its end."""
    # A text after each: positions of types that have their own look for where an image ends.
    after = images.tokens_of_text(_TEXT_AFTER)
    ids = [*images.tokens_of_text(_TEXT_BEFORE)]
    for picture in pictures:
        ids += [*images.tokens_of(picture), *after]
    return _mark_features([*ids, *after], images)


def _mark_features(ids: Sequence[int], images: ImageTokens) -> marks.Tokens:
    """Give tokens in which each place of an image has the mark of images, and all others are targets."""
    tokens = np.array(ids, dtype=np.int32)
    # With all bits inverted a token is negative, so that it is no target.
    marked = ~(tokens | marks.IMAGE)
    return np.where(np.isin(tokens, images.ids), marked, tokens)


def _sequence(documents: Sequence[marks.Tokens], inputs: Mapping[int, Inputs]) -> PackedSequence:
    """Make a packed sequence of documents; `inputs` has the tensors of their images by the document's number."""
    lengths = [len(document) for document in documents]
    return PackedSequence(
        parts=documents,
        lengths=lengths,
        blanks=[],
        next_place=Place(),
        num_tokens=sum(lengths),
        num_documents=len(documents),
        records=make_records(0),
        images={number: PieceImages(own, digest=0) for number, own in inputs.items()},
    )
