"""A packed sequence, the records of its pieces, and the tensors of a batch of such sequences.

    documents   a a a |  b b b b b | c c
    input_ids   a a a b | b b b b | c c ...
    position    0 1 2 0 | 0 1 2 3 | 0 1          restarts: models of transformers then mask across documents
    labels      . a a . | . b b b | . c          . is ignored: no token before it is of its document and its sequence

A negative token of a document is `~id` of a token that is context: it becomes id, without a label. Other marks of a
negative token say that it stands for an image, or that a second document begins in the piece, as in a preference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
"""Key in a batch of hashes of each document's images, at its first token; 0 elsewhere. Shape [rows, tokens]."""
ORIGINS = "origins"
"""Key in a batch of the documents that its rows are made of, as `origins_of` gives them."""


def text_positions(positions: torch.Tensor) -> torch.Tensor:
    """Give the positions of the text, [rows, tokens], which are the first of four kinds where images have their own."""
    return positions[0] if positions.ndim == 3 else positions


class Pieces(NamedTuple):
    """The pieces of one sequence, or of several end to end, from which the rows of a batch are made."""

    tokens: NDArray[np.integer]
    """A copy of all tokens, end to end; shape [tokens]."""
    lengths: Sequence[int]
    """Number of tokens of each piece, and of each filling."""
    begins: Sequence[int] | Integers
    """Place of each piece's first token among the tokens."""
    blanks: Sequence[tuple[int, int]]
    """Begin and end of each stretch of tokens without targets."""

    @classmethod
    def of(cls, sequences: Sequence[PackedSequence]) -> Pieces:
        """Join the pieces of sequences, one or more."""
        lengths = list(chain.from_iterable([one.lengths for one in sequences]))
        blanks = []
        # Most batches have none: the lengths need not be summed then.
        if any(one.blanks for one in sequences):
            first = 0
            for one in sequences:
                blanks += [(first + start, first + stop) for start, stop in one.blanks]
                first += sum(one.lengths)
        tokens = join_tokens(list(chain.from_iterable([one.parts for one in sequences])))
        return cls(tokens, lengths, [0, *accumulate(lengths[:-1])], blanks)


class PieceImages(NamedTuple):
    """The images of a piece. If the piece holds two documents, as a preference does, both have these images."""

    inputs: Inputs
    """The tensors of the images by name, as a model's forward takes them."""
    digest: int
    """Hash of the images, in 8 signed bytes; 0: not told."""


class Problem(NamedTuple):
    """Why a document of a sequence teaches nothing: its row is bad, or an image of the row is damaged."""

    document: int
    """Canonical number of the document."""
    message: str
    """What is wrong with the row, for people."""


class PackedSequence(NamedTuple):
    """A packed sequence. Its tokens are copied when it becomes part of a batch."""

    parts: Sequence[NDArray[np.integer]]
    """Arrays of its tokens, which stand end to end; uint16, or int32 with negative tokens. They need not be pieces."""
    lengths: Sequence[int]
    """Number of tokens of each piece, and of the filling at the end: positions restart at each."""
    blanks: Sequence[tuple[int, int]]
    """Begin and end of each stretch without targets: quarantined documents, and the filling."""
    next_place: Place
    """Place where the next sequence begins."""
    num_tokens: int
    """Number of tokens, without filling."""
    num_documents: int
    """Number of documents that begin in this sequence, or are passed over before or in it."""
    records: Records
    """Records of its pieces and of documents passed over; their fields `sequence` and `pool` are not set yet."""
    problems: tuple[Problem, ...] = ()
    """Problems of documents among these records: of those passed over, and of those with a damaged image."""
    images: Mapping[int, PieceImages] | None = None
    """The images of each piece that has some, by the piece's number; None: no piece has."""

    @property
    def rows(self) -> NDArray[np.int32]:
        """input_ids, position_ids and labels; shape [3, length]."""
        return np.stack(make_rows(Pieces.of([self]), np.int32))


@dataclass(frozen=True)
class Shape:
    """The length of sequences, and the token that fills them up."""

    length: int
    """Tokens in a sequence; where each document is a sequence of its own: the most tokens in one."""
    fill_id: int
    """Token that fills up sequences, and that stands for the tokens of quarantined documents."""


def without_tokens(
    length: int, shape: Shape, next_place: Place, records: Records | None = None, problems: tuple[Problem, ...] = ()
) -> PackedSequence:
    """Make a sequence of `length` tokens that is all filling.

    `records` and `problems` are of documents that are passed over before it; None: there are none.
    """
    if records is None:
        records = make_records(0)
    return PackedSequence(
        parts=[filling(length, shape)],
        lengths=[length],
        blanks=[(0, length)],
        next_place=next_place,
        num_tokens=0,
        num_documents=count_new_documents(records),
        records=records,
        problems=problems,
    )


def after_the_end(unit: str, found: str) -> CheckpointError:
    """Build the error of a cursor that stands after the end of its `unit`, a document or a window.

    `found` says where it stands and how long the unit is.
    """
    what = f"the data cursor stands after the end of a {unit}: the data have changed, or it is damaged"
    hint = "the data of the checkpoint, or a new run.name"
    return CheckpointError(what, where="cursor.places", found=found, hint=hint)


def filling(num_tokens: int, shape: Shape) -> NDArray[np.int32]:
    """Make tokens that fill up a sequence, or that stand for tokens of a quarantined document; shape [num_tokens]."""
    return np.full(num_tokens, shape.fill_id, dtype=np.int32)


def make_rows(pieces: Pieces, dtype: DTypeLike) -> tuple[NDArray[np.integer], NDArray[np.integer], NDArray[np.integer]]:
    """Make the ids, positions and labels of pieces.

    Args:
        pieces: the pieces of one or more sequences.
        dtype: the type of the three arrays, int32 or int64.

    Returns:
        input_ids, position_ids and labels of all sequences, end to end; each of shape [tokens].
    """
    tokens, lengths, begins = pieces.tokens, pieces.lengths, pieces.begins
    if tokens.dtype.kind == "i" and tokens.min() < 0:
        own_ids = marks.ids_of(tokens)
        ids, labels = own_ids.astype(dtype), marks.labels_of(tokens, own_ids).astype(dtype)
        lengths, begins = _split_at(lengths, begins, marks.begin(tokens))
    else:
        ids = tokens.astype(dtype)
        labels = ids.copy()
    places = _places(max(lengths).bit_length(), np.dtype(dtype))
    # Positions of all documents, joined as bytes: a call of numpy for each would take several times as long.
    positions = np.frombuffer(bytearray().join([places[:length] for length in lengths]), dtype)
    labels[begins] = IGNORED
    for start, stop in pieces.blanks:
        labels[start:stop] = IGNORED
    return ids, positions, labels


@lru_cache(maxsize=2)
def _places(num_bits: int, dtype: np.dtype[np.generic]) -> memoryview:
    """Give all numbers of so many bits from 0 on; kept, as making them would be a tenth of the time of a batch."""
    return np.arange(1 << num_bits, dtype=dtype).data


def join_tokens(parts: Sequence[NDArray[np.integer]]) -> NDArray[np.integer]:
    """Put arrays of tokens end to end in a new array."""
    if len(set(map(_TYPE_OF, parts))) > 1:
        return np.concatenate(parts)
    # Arrays of one type are joined as bytes: half the time of numpy for the few hundred tokens that a part has.
    joined = bytearray().join(parts)  # type: ignore[arg-type]  # arrays are buffers; Python 3.11 has no type for that
    return np.frombuffer(joined, parts[0].dtype)


def stack(pieces: Pieces, shape: Shape) -> dict[str, torch.Tensor]:
    """Stack pieces of sequences of one length: input_ids, position_ids and labels, [sequences, length], int64."""
    rows = make_rows(pieces, np.int64)
    return {name: torch.from_numpy(row.reshape(-1, shape.length)) for name, row in zip(NAMES, rows, strict=True)}


def collate(sequences: list[PackedSequence], packing: Packing, shape: Shape) -> dict[str, torch.Tensor]:
    """Stack sequences to the tensors of a batch, int64.

    Returns:
        input_ids, labels and position_ids of shape [sequences, length]. Under the packing `none`, attention_mask in
        place of position_ids, and all rows are filled up to the longest.
    """
    if packing is not Packing.none:
        return stack(Pieces.of(sequences), shape)
    rows: dict[str, list[torch.Tensor]] = {"input_ids": [], "attention_mask": [], "labels": []}
    for sequence in sequences:
        ids, _, labels = make_rows(Pieces.of([sequence]), np.int64)
        rows["input_ids"].append(torch.from_numpy(ids))
        rows["attention_mask"].append(torch.ones(len(ids), dtype=torch.int64))
        rows["labels"].append(torch.from_numpy(labels))
    return _fill_up(rows, shape.fill_id)


def _fill_up(rows: Mapping[str, Sequence[torch.Tensor]], fill_id: int) -> dict[str, torch.Tensor]:
    """Stack the rows of each kind of tensor, filled up to the longest row."""
    fill = {"input_ids": fill_id, "labels": IGNORED}
    return {
        name: pad_sequence(list(values), batch_first=True, padding_value=fill.get(name, 0))
        for name, values in rows.items()
    }


_ORIGIN = ("document", "epoch", "first_token", "num_tokens")
"""Fields of a record that `origins_of` gives."""


def origins_of(sequences: Sequence[PackedSequence]) -> torch.Tensor:
    """Give the documents that sequences are made of, piece by piece; shape [sequences, most pieces, 4], int64.

    The four numbers of a piece are its document, the epoch, the place of its first token in the document, and its
    number of tokens; all are 0 where a sequence has fewer pieces.
    """
    records_of_pieces = [one.records[one.records["num_tokens"] > 0] for one in sequences]
    most_pieces = max(1, *map(len, records_of_pieces))
    origins = torch.zeros(len(sequences), most_pieces, len(_ORIGIN), dtype=torch.long)
    for row, records in enumerate(records_of_pieces):
        columns = [records[name].astype(np.int64) for name in _ORIGIN]
        origins[row, : len(records)] = torch.from_numpy(np.stack(columns, 1))
    return origins


def stack_rows(
    rows: Sequence[Mapping[str, torch.Tensor]],
    fill_id: int,
    images: ImageTokens,
    *,
    needs_image: bool,
    tells_rows: bool = False,
) -> dict[str, torch.Tensor]:
    """Stack rows of one document each, with the tensors of their images.

    Args:
        rows: tensors of each row, made by `image_row`.
        fill_id: token that fills up shorter rows.
        images: what images of the run become.
        needs_image: whether a batch without an image gets a small one after the tokens of its first row, from which
            nothing is learned: ranks that share the weights of an image tower must call it together.
        tells_rows: whether the batch says how much of each image tensor is of which row.

    Returns:
        input_ids, attention_mask and labels of shape [rows, tokens of the longest row]; and the tensors of images that
        a forward takes, whose first axis is of images, patches or rows with images.
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


def image_row(sequence: PackedSequence, images: ImageTokens) -> dict[str, torch.Tensor]:
    """Give the tensors of a sequence that is one document, each of shape [tokens], and those of its images."""
    pieces = Pieces.of([sequence])
    ids, _, labels = make_rows(pieces, np.int64)
    row = images.row(ids, marks.are_images(pieces.tokens), labels)
    inputs: Inputs = {}
    if sequence.images:
        of_document = next(iter(sequence.images.values()))
        inputs = of_document.inputs
    return row | {name: torch.from_numpy(values) for name, values in inputs.items()}


def _split_at(
    lengths: Sequence[int], begins: Sequence[int] | Integers, second_begins: NDArray[np.intp]
) -> tuple[Sequence[int], Sequence[int] | Integers]:
    """Give the lengths and begins of documents from those of pieces, some of which hold a second document."""
    if not len(second_begins):
        return lengths, begins
    edges = np.union1d([*begins, sum(lengths)], second_begins)
    return np.diff(edges).tolist(), edges[:-1]
