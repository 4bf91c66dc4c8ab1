"""Held-out documents with images, a row of tokens each: the rows are cached, and images are decoded when asked for.

row of the array       document | number of tokens n | n tokens | zeros
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from hfdist.config.data import DataConfig, RowFormat
from hfdist.data.documents.corpus import Corpus
from hfdist.data.documents.image_reader import ImageReader
from hfdist.data.marks import are_images
from hfdist.data.order.lane_state import Place
from hfdist.data.order.records import make_records
from hfdist.data.packing.packed_images import packed_row
from hfdist.data.packing.sequence import PackedSequence, image_row
from hfdist.data.tokenization.image_tokens import ImageTokens


class ImageRow(NamedTuple):
    """A document by its canonical number, and its tokens; marks in them say which are targets and images."""

    document: int
    tokens: NDArray[np.integer]


_BEFORE_TOKENS = 2
"""Columns of the array before the tokens: the document, and the number of tokens."""


def write_rows(rows: Sequence[ImageRow]) -> NDArray[np.int32]:
    """Write one or more rows into an array, as wide as the longest row needs; shape [rows, columns]."""
    longest = max(len(row.tokens) for row in rows)
    written = np.zeros((len(rows), _BEFORE_TOKENS + longest), dtype=np.int32)
    for line, row in zip(written, rows, strict=True):
        line[:_BEFORE_TOKENS] = row.document, len(row.tokens)
        line[_BEFORE_TOKENS : _BEFORE_TOKENS + len(row.tokens)] = row.tokens
    return written


class HeldOutImages(Dataset[dict[str, torch.Tensor]]):
    """The items of held-out rows: what a forward takes of a row's tokens and images.

    Items are not filled up: they may differ in length, and in the names of their tensors. The item of a preference has
    two documents, its answers.
    """

    def __init__(self, rows: NDArray[np.int32], corpus: Corpus, images: ImageTokens, config: DataConfig) -> None:
        """Take the `rows` that `write_rows` has written."""
        self._rows, self._corpus, self._images = rows, corpus, images
        self._reader = ImageReader(corpus, images, config)
        self._are_pairs = config.format is RowFormat.preference
        self._keeps_columns = config.keep_columns

    def __len__(self) -> int:
        return len(self._rows)

    def has_image(self, index: int) -> bool:
        """Whether an item has an image, without decoding it."""
        return bool(are_images(self._read(index).tokens).any())

    def images_of(self, index: int) -> dict[str, torch.Tensor]:
        """Give what a forward takes of the images of an item, which is no pair; DataError: they cannot be read."""
        return {name: values for name, values in self[index].items() if name not in self._images.text_names}

    def columns(self, index: int) -> Iterator[Mapping[str, object]]:
        """Give the other columns of an item's document; nothing where `data.keep_columns` keeps none."""
        if self._keeps_columns:
            yield from self._corpus.columns([self._read(index).document]).values()

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        document, tokens = self._read(index)
        length = len(tokens)
        records = make_records(1, document=document, num_tokens=length)
        # A sequence of this document alone.
        sequence = self._reader.read(PackedSequence([tokens], [length], [], Place(), length, 1, records))
        if self._are_pairs:
            return packed_row(sequence, self._images, tells_images=True)
        return image_row(sequence, self._images)

    def _read(self, index: int) -> ImageRow:
        row = self._rows[index]
        document, num_tokens = row[:_BEFORE_TOKENS].tolist()
        return ImageRow(document, np.array(row[_BEFORE_TOKENS : _BEFORE_TOKENS + num_tokens]))
