"""A model's own processor of images: it gives the text in the place of an image, and the tensors that a forward takes.

row          text with a place for an image, and the image's size
expansion    <image><image><image><image>            made of a blank image of that size: no pixel is decoded yet
inputs       pixel_values, image_grid_thw, ...       made in a loader, of the pixels
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from transformers import ProcessorMixin

from hfdist.data.sources.base import ContentError
from hfdist.errors import ConfigError, first_line

Inputs = Mapping[str, NDArray[Any]]
"""Arrays by the names that a forward has for them; the first axis is images, patches or rows."""
Positions = Callable[[Mapping[str, torch.Tensor]], torch.Tensor]
"""A function that gives positions of shape [3, 1, tokens] for what a forward takes of a document."""
_KINDS = ("mm_token_type_ids", "token_type_ids")
"""Names that forwards have for the tensor which says of each token whether it stands for an image."""
_KNOWN_SIZES = 4096
"""Sizes of images whose expansions are kept."""
_SMALL_SIZES = ((32, 32), (256, 32), (448, 32))
"""Sizes that are tried for `none`, the small image of batches without one: some processors cut squares into tiles."""


class _Expansion(NamedTuple):
    """The text that a processor writes for an image of one size."""

    text: str
    num_features: int
    """Number of its tokens that stand for features."""


class SmallImage(NamedTuple):
    """A small image, which stands in batches without one."""

    tokens: list[int]
    """Ids of the tokens in its place."""
    inputs: dict[str, NDArray[Any]]
    """Tensors that a forward takes of it, by name."""


class ImageTokens:
    """A model's processor, as rows and batches need it. Sizes are widths and heights in pixels.

    Args:
        processor: Processor of the model, with the run's tokenizer.
        positions: Function that gives the model's own positions of a document with images; None: they are those of
            text.
        feature_id: Id of the token in whose place the model puts a feature, as its config says; None: it says none.

    Raises:
        ConfigError: The processor does not say what it writes for an image.
    """

    def __init__(
        self, processor: ProcessorMixin, positions: Positions | None = None, feature_id: int | None = None
    ) -> None:
        # Any: processors of images have attributes that their base class does not declare.
        own: Any = processor
        self._processor, self.positions = own, positions
        self._expansion = lru_cache(_KNOWN_SIZES)(self._expand)
        try:
            self.token = str(getattr(own, "image_placeholder_token", None) or own.image_token)
            """Text that the chat template writes for an image."""
            self.ids = np.array([number for number in {*own.image_token_ids, feature_id} if number is not None])
            """Ids of the tokens that stand for features of an image."""
            if not self.num_features((32, 32)):
                raise ValueError("no token that it writes for an image stands for a feature")
            unknown = self._unknown_of_tokens()
            if unknown is not None:
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
        """Give the text in the place of an image of a size; ContentError: the processor takes no image of that size."""
        try:
            return self._expansion(size).text
        except ValueError as error:
            # Qwen's, for one, takes no image that is 200 times as long as it is wide.
            what = f"the model's processor does not take an image of this size: {first_line(error)}"
            raise ContentError(what, found=f"{size[0]} x {size[1]}") from error

    def num_features(self, size: tuple[int, int]) -> int:
        """Give the number of tokens that stand for features of an image of a size."""
        return self._expansion(size).num_features

    def _expand(self, size: tuple[int, int]) -> _Expansion:
        """Let the processor write a blank image of a size."""
        made = self._call([Image.new("RGB", size)], return_text_replacement_offsets=True, return_tensors="pt")
        [[replaced]], [ids] = made["text_replacement_offsets"], made["input_ids"]
        return _Expansion(str(replaced["replacement"]), int(np.isin(ids, self.ids).sum()))

    def _unknown_of_tokens(self) -> str | None:
        """Give the name of a tensor with a value for each token that `row` does not make; None: there is none."""
        # Two images, since a tensor of one image could have the shape of the tokens, which is one row.
        made = self._call([Image.new("RGB", (64, 32))] * 2, return_tensors="pt")
        shape = made["input_ids"].shape
        return next((name for name in made if name not in self.text_names and made[name].shape == shape), None)

    def inputs(self, images: Sequence[Image.Image]) -> dict[str, NDArray[Any]]:
        """Give the tensors that a forward takes of the images of a row, of which there are one or more, by name."""
        made = self._call(images, return_tensors="pt")
        return {name: torch.as_tensor(value).numpy() for name, value in made.items() if name not in self.text_names}

    text_names = ("input_ids", "attention_mask", "labels", *_KINDS)
    """Names of the tensors that have a value for each token."""

    def row(
        self, ids: NDArray[np.integer], are_features: NDArray[np.bool_], labels: NDArray[np.integer]
    ) -> dict[str, torch.Tensor]:
        """Give the tensors that a forward takes of a row's tokens, by name; all have the shape [tokens], int64."""
        made = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
        made["attention_mask"] = torch.ones_like(made["input_ids"])
        if self.kinds is not None:
            made[self.kinds] = torch.from_numpy(are_features.astype(np.int64))
        return made

    def are_features(self, ids: Sequence[int]) -> NDArray[np.bool_]:
        """Whether each token of a prompt stands for a feature; shape [tokens]. What the model answers has no images."""
        return np.isin(np.asarray(ids), self.ids)

    @cached_property
    def kinds(self) -> str | None:
        """The forward's name of the tensor that says which tokens stand for images; None: it takes no such tensor."""
        made = self._call([Image.new("RGB", (32, 32))], return_tensors="pt")
        return next((name for name in _KINDS if name in made), None)

    @property
    def forward_names(self) -> tuple[str, ...]:
        """Names of the tensors that a forward takes because of images, besides tokens, positions and mask."""
        names = tuple(self.none.inputs)
        return names if self.kinds is None else (*names, self.kinds)

    @cached_property
    def none(self) -> SmallImage:
        """A small image that stands in batches without one, so that all ranks run the same layers."""
        images = [Image.new("RGB", size) for size in _SMALL_SIZES]
        tokens = [self.tokens_of(image) for image in images]
        # A processor may make a narrow image so small that nothing is left of it.
        seen = [number for number, ids in enumerate(tokens) if np.isin(ids, self.ids).any()]
        number = min(seen, key=lambda n: len(tokens[n]))
        return SmallImage(tokens[number], self.inputs([images[number]]))

    def tokens_of(self, image: Image.Image) -> list[int]:
        """Give the ids of the tokens in the place of an image."""
        made = self._call([image], add_special_tokens=False, return_tensors="pt")
        return [int(token) for token in made["input_ids"][0]]

    def tokens_of_text(self, text: str) -> list[int]:
        """Give the ids of the tokens of a text without images."""
        return list(self._processor.tokenizer.encode(text, add_special_tokens=False))

    def example(self) -> dict[str, torch.Tensor]:
        """Give a batch of one row with a small image, all of whose tokens but the first are targets."""
        tokens, inputs = self.none
        # A few tokens of text follow the image.
        ids = np.array([*tokens, 0, 1, 2, 3], dtype=np.int64)
        row = self.row(ids, np.isin(ids, self.ids), ids.copy())
        return {name: values[None] for name, values in row.items()} | {
            name: torch.from_numpy(values) for name, values in inputs.items()
        }

    @cached_property
    def digest(self) -> str:
        """Hash of all that decides the tokens and tensors of an image."""
        processor = self._processor
        parts = [type(processor).__name__, self.token, self.ids.tolist(), processor.image_processor.to_dict()]
        numbers = {name: value for name, value in vars(processor).items() if isinstance(value, (int, float, str))}
        written = json.dumps([*parts, numbers], sort_keys=True, default=str)
        return hashlib.blake2b(written.encode(), digest_size=12).hexdigest()

    def _call(self, images: Sequence[Image.Image], **how: object) -> Mapping[str, Any]:
        """Call the processor with a text that is only images, and the options `how`."""
        made: Mapping[str, Any] = self._processor(text=[self.token * len(images)], images=list(images), **how)
        return made


def stack_inputs(rows: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Join the tensors of rows along their first axis, by name; zeros fill other axes up where they are shorter."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: _stack([row[name].numpy() for row in rows if name in row]) for name in names}


def _stack(arrays: Sequence[NDArray[Any]]) -> torch.Tensor:
    """Join arrays along their first axis; zeros at the ends of other axes make them alike."""
    largest = [max(sizes) for sizes in zip(*(array.shape[1:] for array in arrays), strict=True)]
    filled: list[NDArray[Any]] = []
    for array in arrays:
        missing = [(0, size - own) for size, own in zip(largest, array.shape[1:], strict=True)]
        filled.append(np.pad(array, [(0, 0), *missing]))
    return torch.from_numpy(np.concatenate(filled))
