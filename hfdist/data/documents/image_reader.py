"""The reader of a sequence's images, which workers call while they read ahead: training never waits for an image.

A row whose image turns out to be damaged has its place in the sequence already. It keeps the place and teaches nothing:
its images become black, and its tokens have no targets.
"""

from __future__ import annotations

import hashlib
from itertools import accumulate

from PIL import Image

from hfdist.config.data import BadRows, DataConfig
from hfdist.data.documents.bad_rows import with_way_out
from hfdist.data.documents.corpus import Corpus
from hfdist.data.marks import are_images, begin
from hfdist.data.order.records import numbers_of
from hfdist.data.packing.sequence import PackedSequence, PieceImages, Problem
from hfdist.data.sources.base import ContentError
from hfdist.data.sources.images import decode
from hfdist.data.tokenization.image_tokens import ImageTokens
from hfdist.errors import DataError


class ImageReader:
    """Reads the images of sequences of whole documents, as tensors that a forward takes."""

    def __init__(self, corpus: Corpus, images: ImageTokens, config: DataConfig) -> None:
        self._corpus, self._images = corpus, images
        self._stops = config.on_bad_rows is BadRows.error

    def read(self, sequence: PackedSequence) -> PackedSequence:
        """Give a sequence with its images; a sequence without images stays as it is.

        DataError: an image is damaged and `data.on_bad_rows` is `error`, or the data have changed.
        """
        num_features = [int(are_images(part).sum()) for part in sequence.parts]
        if not any(num_features):
            return sequence
        documents = numbers_of(sequence.records).tolist()
        ends = list(accumulate(sequence.lengths))
        images: dict[int, PieceImages] = {}
        blanks, problems = [*sequence.blanks], [*sequence.problems]
        # Each document is a piece of the sequence; what only fills it up comes after them.
        for piece, document in enumerate(documents):
            if not num_features[piece]:
                continue
            num_repeats = 1 + len(begin(sequence.parts[piece]))
            images[piece], error = self._images_of(document, num_features[piece], num_repeats)
            if error is not None:
                blanks.append((ends[piece] - sequence.lengths[piece], ends[piece]))
                problems.append(Problem(document, str(error)))
        return sequence._replace(images=images, blanks=blanks, problems=tuple(problems))

    def _images_of(self, document: int, num_features: int, num_repeats: int) -> tuple[PieceImages, ContentError | None]:
        """Give the images of a document, or black ones and the error where an image is damaged.

        The document's tokens have the places of `num_features` features in all. Its images stand in it `num_repeats`
        times: in both answers of a preference.
        """
        files = self._corpus.images(document)
        if num_repeats * sum(self._images.num_features(file.size) for file in files) != num_features:
            what = "the row has other images than when its tokens were made"
            hint = "the images as they were; or another data.cache_dir, where tokens are made anew"
            raise DataError(what, where=str(self._corpus.origin(document)), hint=hint)
        hashed = hashlib.blake2b("".join(file.digest for file in files).encode(), digest_size=8)
        digest = int.from_bytes(hashed.digest(), "little", signed=True)
        try:
            return PieceImages(self._images.inputs([decode(file) for file in files]), digest), None
        except ContentError as error:
            shard, first = self._corpus.shard_of(document)
            error.where = f"{shard.name}, row {document - first}"
            if self._stops:
                origin, is_alone = str(self._corpus.origin(document)), len(self._corpus.shards) == 1
                raise with_way_out(error, shard, origin, is_alone=is_alone) from None
            black = [Image.new("RGB", file.size) for file in files]
            return PieceImages(self._images.inputs(black), digest), error
