"""A packed sequence, the records of its pieces, and the tensors of a batch of sequences.

documents   a a a |  b b b b b | c c
input_ids   a a a b | b b b b | c c ...
position    0 1 2 0 | 0 1 2 3 | 0 1          restarts: models of transformers then mask across documents
labels      . a a . | . b b b | . c          . is ignored: nothing before it is of its document and its sequence

A negative token of a document is the complement of one that is context: `~id` becomes id, without a label. See
`data/marks.py` for what else it may say: a preference is one piece, in which a second document begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch.nn.utils.rnn import pad_sequence

from hfdist.config.batch import IGNORED as IGNORED
from hfdist.config.data import Packing
from hfdist.data import marks
from hfdist.data.order.lane_state import Place
from hfdist.data.order.records import Records, count_new_documents, make_records
from hfdist.data.packing.row_images import stack_images
from hfdist.data.tokenization.image_tokens import ImageTokens, Inputs
from hfdist.errors import CheckpointError

Integers = NDArray[np.int64]

_TYPE_OF = attrgetter("dtype")
INPUT_IDS, POSITION_IDS, LABELS = range(3)
NAMES = ("input_ids", "position_ids", "labels")
IMAGE_DIGESTS = "image_digests"
"""Key in a batch that says which images documents have: a hash at their first token, 0 where there is none."""
ORIGINS = "origins"
"""Key in a batch that says of which documents its rows are made: see `origins_of`."""


def text_positions(positions: torch.Tensor) -> torch.Tensor:
    """Give the positions of the text, [rows, tokens], which are the first of four kinds where images have their own."""
    return positions[0] if positions.ndim == 3 else positions


class Pieces(NamedTuple):
    """What the rows of one sequence, or of several end to end, are made of; most fields are those of `Sequence`."""

    tokens: NDArray[np.integer]
    """A copy, end to end; shape [tokens]."""
    lengths: Sequences[int]
    begins: Sequences[int] | Integers
    """Where each of its pieces begins."""
    blanks: Sequences[tuple[int, int]]

    @classmethod
    def of(cls, sequences: Sequences[Sequence]) -> Pieces:
        """Join sequences, one or more."""
        lengths = list(chain.from_iterable([one.lengths for one in sequences]))
        blanks, first = [], 0
        for one in sequences if any(one.blanks for one in sequences) else ():
            blanks += [(first + start, first + stop) for start, stop in one.blanks]
            first += sum(one.lengths)
        tokens = join_tokens(list(chain.from_iterable([one.parts for one in sequences])))
        return cls(tokens, lengths, [0, *accumulate(lengths[:-1])], blanks)


class PieceImages(NamedTuple):
    """The images of a piece. If it holds two documents, as a preference does, both have them."""

    inputs: Inputs
    """Their tensors."""
    digest: int
    """Hash of the images, in 8 signed bytes; 0: not told."""


class Problem(NamedTuple):
    """Why a document of a sequence teaches nothing: its row is bad, or an image of the row is damaged."""

    document: int
    """Canonical number."""
    message: str


class Sequence(NamedTuple):
    """A packed sequence. Its tokens are copied when it becomes part of a batch."""

    parts: Sequences[NDArray[np.integer]]
    """Tokens end to end; uint16, or int32 with complements. Pieces need not be parts."""
    lengths: Sequences[int]
    """Tokens of each of its pieces, and of what fills it up: positions restart at each."""
    blanks: Sequences[tuple[int, int]]
    """Begin and end of each stretch without targets: quarantined documents, and what fills up."""
    next_place: Place
    """Place where the next sequence begins."""
    num_tokens: int
    """Number of tokens, without filling."""
    num_documents: int
    """Documents that begin in it, or are passed over on the way."""
    records: Records
    """Records of pieces, and of documents passed over on the way; their sequence and pool are not set yet."""
    problems: tuple[Problem, ...] = ()
    """What is wrong with documents among them."""
    images: Mapping[int, PieceImages] | None = None
    """Its images, by the number of the piece that they stand in; None: it has none."""

    @property
    def rows(self) -> NDArray[np.int32]:
        """input_ids, position_ids and labels; shape [3, length]."""
        return np.stack(make_rows(Pieces.of([self]), np.int32))


@dataclass(frozen=True)
class Shape:
    """What sequences look like."""

    length: int
    """Tokens in a sequence; of a document by itself: at the most."""
    fill_id: int
    """Token that fills up, and that stands for quarantined ones."""


def without_tokens(
    length: int, shape: Shape, next_place: Place, records: Records | None = None, problems: tuple[Problem, ...] = ()
) -> Sequence:
    """Make a sequence that is all filling; `records` and `problems` are of documents passed over before it."""
    if records is None:
        records = make_records(0)
    own = [filling(length, shape)], [length], [(0, length)]
    return Sequence(*own, next_place, 0, count_new_documents(records), records, problems)


def after_the_end(unit: str, found: str) -> CheckpointError:
    """Build the error of a cursor that stands where there is no document, or no sequence of a window."""
    what = f"the data cursor stands after the end of a {unit}: the data have changed, or it is damaged"
    hint = "the data of the checkpoint, or a new run.name"
    return CheckpointError(what, where="cursor.places", found=found, hint=hint)


def filling(num_tokens: int, shape: Shape) -> NDArray[np.int32]:
    """Tokens that fill up, or that stand for others."""
    return np.full(num_tokens, shape.fill_id, dtype=np.int32)


def make_rows(pieces: Pieces, dtype: DTypeLike) -> tuple[NDArray[np.integer], NDArray[np.integer], NDArray[np.integer]]:
    """Make ids, positions and labels of tokens, int32 or int64.

    Returns:
        input_ids, position_ids and labels of all, end to end; each of shape [tokens].
    """
    tokens, lengths, begins = pieces.tokens, pieces.lengths, pieces.begins
    if tokens.dtype.kind == "i" and tokens.min() < 0:
        own_ids = marks.ids_of(tokens)
        ids, labels = own_ids.astype(dtype), marks.labels_of(tokens, own_ids).astype(dtype)
        lengths, begins = _split(lengths, begins, marks.begin(tokens))
    else:
        ids = tokens.astype(dtype)
        labels = ids.copy()
    places = _places(max(lengths).bit_length(), np.dtype(dtype))
    positions = np.frombuffer(bytearray().join([places[:length] for length in lengths]), dtype)
    labels[begins] = IGNORED
    for start, stop in pieces.blanks:
        labels[start:stop] = IGNORED
    return ids, positions, labels


@lru_cache(maxsize=2)
def _places(num_bits: int, dtype: np.dtype[np.generic]) -> memoryview:
    """Numbers from 0 on, of so many bits: making them would be a tenth of a batch."""
    return np.arange(1 << num_bits, dtype=dtype).data


def join_tokens(parts: Sequences[NDArray[np.integer]]) -> NDArray[np.integer]:
    """Put tokens end to end: a copy."""
    if len(set(map(_TYPE_OF, parts))) > 1:
        return np.concatenate(parts)
    # The same, in half the time for the few hundred tokens that a part has.
    joined = bytearray().join(parts)  # type: ignore[arg-type]  # arrays are buffers; Python 3.11 has no type for that
    return np.frombuffer(joined, parts[0].dtype)


def stack(pieces: Pieces, shape: Shape) -> dict[str, torch.Tensor]:
    """Stack sequences of one length, int64; see `collate`."""
    rows = make_rows(pieces, np.int64)
    return {name: torch.from_numpy(row.reshape(-1, shape.length)) for name, row in zip(NAMES, rows, strict=True)}


def collate(sequences: list[Sequence], packing: Packing, shape: Shape) -> dict[str, torch.Tensor]:
    """Stack sequences, int64.

    Returns:
        input_ids, labels and position_ids of shape [sequences, length]; under `none` attention_mask in place of
        position_ids, all filled up to the longest.
    """
    if packing is not Packing.none:
        return stack(Pieces.of(sequences), shape)
    rows = [make_rows(Pieces.of([one]), np.int64) for one in sequences]
    ids, _, labels = zip(*(map(torch.from_numpy, own) for own in rows), strict=True)
    masks = map(torch.ones_like, ids)
    return _fill_up({"input_ids": ids, "attention_mask": list(masks), "labels": labels}, shape.fill_id)


def _fill_up(rows: Mapping[str, Sequences[torch.Tensor]], fill_id: int) -> dict[str, torch.Tensor]:
    """Stack rows of tokens by their names, filled up to the longest."""
    fill = {"input_ids": fill_id, "labels": IGNORED}
    return {
        name: pad_sequence(list(own), batch_first=True, padding_value=fill.get(name, 0)) for name, own in rows.items()
    }


def origins_of(sequences: Sequences[Sequence]) -> torch.Tensor:
    """Say of which documents sequences are made, in their order; shape [sequences, most pieces, 4], int64.

    The number of a document, its epoch, the place of the piece's first token in the document, and the piece's tokens: 0
    where a sequence has fewer pieces.
    """
    made = [one.records[one.records["num_tokens"] > 0] for one in sequences]
    pieces = torch.zeros(len(made), max(1, *map(len, made)), 4, dtype=torch.long)
    for row, records in enumerate(made):
        columns = [records[name].astype(np.int64) for name in ("document", "epoch", "first_token", "num_tokens")]
        pieces[row, : len(records)] = torch.from_numpy(np.stack(columns, 1))
    return pieces


def stack_rows(
    rows: Sequences[Mapping[str, torch.Tensor]],
    fill_id: int,
    images: ImageTokens,
    *,
    needs_image: bool,
    tells_rows: bool = False,
) -> dict[str, torch.Tensor]:
    """Stack rows of one document each, with the tensors of their images.

    Args:
        rows: of `image_row`.
        fill_id: token that fills up.
        images: of the run.
        needs_image: whether a batch without an image gets a small one, after the tokens of its first row, which
            nothing is learned from: ranks that share the weights of its tower call it together.
        tells_rows: as of `stack_images`.

    Returns:
        input_ids, attention_mask and labels of shape [rows, tokens of the longest], and what the forward takes of
        images: their first axis is of images, patches or rows with images.
    """
    texts = [{name: values for name, values in row.items() if name in images.text_names} for row in rows]
    inputs = [{name: values for name, values in row.items() if name not in images.text_names} for row in rows]
    if needs_image and not any(inputs):
        ids, small = images.none
        added = images.row(np.array(ids, dtype=np.int64), np.isin(ids, images.ids), np.full(len(ids), IGNORED))
        texts[0] = {name: torch.cat([values, added[name]]) for name, values in texts[0].items()}
        inputs[0] = {name: torch.from_numpy(values) for name, values in small.items()}
    tokens = _fill_up({name: [text[name] for text in texts] for name in texts[0]}, fill_id)
    return tokens | stack_images(inputs, tells_rows=tells_rows)


def image_row(sequence: Sequence, images: ImageTokens) -> dict[str, torch.Tensor]:
    """Give the tensors of a sequence that is one document, each of shape [tokens], and those of its images."""
    pieces = Pieces.of([sequence])
    ids, _, labels = make_rows(pieces, np.int64)
    row = images.row(ids, marks.are_images(pieces.tokens), labels)
    inputs = next(iter(sequence.images.values())).inputs if sequence.images else {}
    return row | {name: torch.from_numpy(values) for name, values in inputs.items()}


def _split(
    lengths: Sequences[int], begins: Sequences[int] | Integers, more: NDArray[np.intp]
) -> tuple[Sequences[int], Sequences[int] | Integers]:
    """Give lengths and begins of documents: those of pieces, of which some hold two; `more` are the second ones."""
    if not len(more):
        return lengths, begins
    edges = np.union1d([*begins, sum(lengths)], more)
    return np.diff(edges).tolist(), edges[:-1]
