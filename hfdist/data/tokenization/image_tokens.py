"""What a model's own processor makes of images: the text in the place of each, and the tensors that a forward takes.

row          text with a place for an image, and its size
expansion    <image><image><image><image>            of a blank image of that size: no pixel is decoded yet
inputs       pixel_values, image_grid_thw, ...       in a loader, from pixels
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from transformers import ProcessorMixin

from hfdist.data.sources.base import ContentError
from hfdist.errors import ConfigError, first_line

Inputs = Mapping[str, NDArray[Any]]
"""Arrays by the names that a forward has for them; the first axis is of images, patches or rows."""
Positions = Callable[[Mapping[str, torch.Tensor]], torch.Tensor]
_KINDS = ("mm_token_type_ids", "token_type_ids")
"""Names that forwards have for which tokens stand for images."""
_KNOWN_SIZES = 4096
_SMALL_SIZES = ((32, 32), (256, 32), (448, 32))
"""Images of which the one with the fewest tokens stands where there is none: some types cut squares into tiles."""


class ImageTokens:
    """A model's processor, as rows and batches need it.

    Args:
        processor: with the run's tokenizer.
        positions: gives the model's own positions of a document with images, of shape [3, 1, tokens], from what a
            forward takes of it; None: images have those of text.
        feature_id: the token that the model has a feature in the place of, as its config says it; None: it says none.

    Raises:
        ConfigError: it does not say what it writes for an image.
    """

    def __init__(
        self, processor: ProcessorMixin, positions: Positions | None = None, feature_id: int | None = None
    ) -> None:
        own: Any = processor
        self._processor, self.positions = own, positions
        self._expansion = lru_cache(_KNOWN_SIZES)(self._expand)
        try:
            self.token = str(getattr(own, "image_placeholder_token", None) or own.image_token)
            """What the chat template writes for an image."""
            self.ids = np.array([number for number in {*own.image_token_ids, feature_id} if number is not None])
            """Tokens that stand for features in the text of an image."""
            if not self.num_features((32, 32)):
                raise ValueError("no token that it writes for an image stands for a feature")
            if unknown := self._unknown_of_tokens():
                raise ValueError(f"it also gives {unknown} of each token, which is not known here")
        except (AttributeError, KeyError, TypeError, NotImplementedError, ValueError, IndexError) as error:
            raise ConfigError(
                "this type's processor does not say what it writes for an image",
                where="model.name",
                found=f"{type(processor).__name__}: {first_line(error)}",
                allowed="a processor with image_token and replace_image_token, as most of transformers' types have",
                hint="data.images.used=false trains on text alone",
            ) from error

    def expansion(self, size: tuple[int, int]) -> str:
        """Give the text in the place of an image of a width and a height; ContentError: the processor takes none."""
        try:
            return self._expansion(size)[0]
        except ValueError as error:
            # Qwen's, for one, takes no image that is 200 times as long as it is wide.
            what = f"the model's processor does not take an image of this size: {first_line(error)}"
            raise ContentError(what, found=f"{size[0]} x {size[1]}") from error

    def num_features(self, size: tuple[int, int]) -> int:
        """Give the number of tokens that stand for features of an image of a width and a height."""
        return self._expansion(size)[1]

    def _expand(self, size: tuple[int, int]) -> tuple[str, int]:
        made = self._call([Image.new("RGB", size)], return_text_replacement_offsets=True, return_tensors="pt")
        [[replaced]], [ids] = made["text_replacement_offsets"], made["input_ids"]
        return str(replaced["replacement"]), int(np.isin(ids, self.ids).sum())

    def _unknown_of_tokens(self) -> str | None:
        """Give the name of what the processor says of each token beside what `row` has."""
        # Two, so that no tensor of images has the one row that tokens have.
        made = self._call([Image.new("RGB", (64, 32))] * 2, return_tensors="pt")
        shape = made["input_ids"].shape
        return next((name for name in made if name not in self.text_names and made[name].shape == shape), None)

    def inputs(self, images: Sequence[Image.Image]) -> dict[str, NDArray[Any]]:
        """Give the tensors of the images of a row, which has one or more."""
        made = self._call(images, return_tensors="pt")
        return {name: torch.as_tensor(value).numpy() for name, value in made.items() if name not in self.text_names}

    text_names = ("input_ids", "attention_mask", "labels", *_KINDS)
    """Names of what a batch has for each token."""

    def row(
        self, ids: NDArray[np.integer], are_features: NDArray[np.bool_], labels: NDArray[np.integer]
    ) -> dict[str, torch.Tensor]:
        """Give what a forward takes of the tokens of a row; all are of shape [tokens], int64."""
        made = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
        made["attention_mask"] = torch.ones_like(made["input_ids"])
        return made | ({} if self.kinds is None else {self.kinds: torch.from_numpy(are_features.astype(np.int64))})

    def are_features(self, ids: Sequence[int]) -> NDArray[np.bool_]:
        """Whether each token of a prompt stands for a feature; shape [tokens]. What the model answers has no images."""
        return np.isin(np.asarray(ids), self.ids)

    @cached_property
    def kinds(self) -> str | None:
        """The forward's name for which tokens stand for images; None: it asks for none."""
        made = self._call([Image.new("RGB", (32, 32))], return_tensors="pt")
        return next((name for name in _KINDS if name in made), None)

    @property
    def forward_names(self) -> tuple[str, ...]:
        """Names of what a forward takes of images besides tokens, their positions and their mask."""
        return (*self.none[1], *(() if self.kinds is None else (self.kinds,)))

    @cached_property
    def none(self) -> tuple[list[int], dict[str, NDArray[Any]]]:
        """Tokens and tensors of a small image, for batches without one."""
        images = [Image.new("RGB", size) for size in _SMALL_SIZES]
        tokens = [self.tokens_of(image) for image in images]
        # A processor may make a narrow image so small that nothing is left of it.
        seen = [number for number, own in enumerate(tokens) if np.isin(own, self.ids).any()]
        number = min(seen, key=lambda n: len(tokens[n]))
        return tokens[number], self.inputs([images[number]])

    def tokens_of(self, image: Image.Image) -> list[int]:
        """Give the tokens in the place of an image."""
        made = self._call([image], add_special_tokens=False, return_tensors="pt")
        return [int(token) for token in made["input_ids"][0]]

    def tokens_of_text(self, text: str) -> list[int]:
        """Give the tokens of a text without images."""
        return list(self._processor.tokenizer.encode(text, add_special_tokens=False))

    def example(self) -> dict[str, torch.Tensor]:
        """Give a batch of one row with a small image, all of whose tokens but the first are targets."""
        tokens, inputs = self.none
        ids = np.array([*tokens, 0, 1, 2, 3], dtype=np.int64)
        row = self.row(ids, np.isin(ids, self.ids), ids.copy())
        return {name: values[None] for name, values in row.items()} | {
            name: torch.from_numpy(values) for name, values in inputs.items()
        }

    @cached_property
    def digest(self) -> str:
        """Hash of all that decides what becomes of an image."""
        processor = self._processor
        parts = [type(processor).__name__, self.token, self.ids.tolist(), processor.image_processor.to_dict()]
        numbers = {name: value for name, value in vars(processor).items() if isinstance(value, (int, float, str))}
        written = json.dumps([*parts, numbers], sort_keys=True, default=str)
        return hashlib.blake2b(written.encode(), digest_size=12).hexdigest()

    def _call(self, images: Sequence[Image.Image], **how: object) -> Mapping[str, Any]:
        made: Mapping[str, Any] = self._processor(text=[self.token * len(images)], images=list(images), **how)
        return made


def stack_inputs(rows: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Put the tensors of rows one after the other; axes of other lengths are filled up with zeros at their ends."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: _stack([row[name].numpy() for row in rows if name in row]) for name in names}


def _stack(arrays: Sequence[NDArray[Any]]) -> torch.Tensor:
    most = np.max([array.shape[1:] for array in arrays], axis=0, initial=0) if arrays[0].ndim > 1 else ()
    filled = [
        np.pad(array, [(0, 0), *((0, int(size) - own) for size, own in zip(most, array.shape[1:], strict=True))])
        for array in arrays
    ]
    return torch.from_numpy(np.concatenate(filled))
