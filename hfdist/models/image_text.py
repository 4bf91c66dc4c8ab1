"""Models of image and text: which types they are, their three parts, and the parameters that images never reach.

    pixels  ->  tower  ->  projector  ->  language  ->  logits of text
                                             ^
                                   tokens, by the embeddings

tower        a vision encoder
projector    makes features of the tower's states: every parameter that is in neither of the other parts
language     reads features and tokens; the embeddings and the head belong to it
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from hfdist.errors import first_line
from hfdist.models.shrink import shrink_to_try

logger = logging.getLogger(__name__)

TOWER, PROJECTOR, LANGUAGE = "tower", "projector", "language"
_MARK = "hfdist_reads_images"
"""Attribute of a model that is trained on images: an `ImageBatch`."""
_OF_COPY = re.compile(r"(?<=\.)modules_to_save\.[^.]+\.")
"""The part of a parameter's name by which a copy that PEFT trains differs from the module that was copied."""


def may_read_images(architecture: PreTrainedConfig) -> bool:
    """Whether transformers makes a model of image and text from this config, without an encoder of text.

    Some types have a class for text alone, too. For these, the class that the checkpoint was saved with decides, which
    its config names.
    """
    image_class = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(architecture.model_type)
    text_class = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(architecture.model_type)
    if image_class is None or architecture.is_encoder_decoder:
        return False
    saved_classes = getattr(architecture, "architectures", None) or ()
    return text_class in (None, image_class) or image_class in saved_classes


def feature_token(architecture: PreTrainedConfig) -> int | None:
    """Give the id of the token in whose place a feature of an image comes; None: the config does not say."""
    for name in ("image_token_id", "image_token_index"):
        token: int | None = getattr(architecture, name, None)
        if token is not None:
            return token
    return None


def names_of_parts(model: PreTrainedModel) -> dict[str, list[str]]:
    """Give the names of the parameters of each part: tower, projector and language.

    A tied parameter belongs to the language if one of its names does. If the model has no tower that can be told from
    the rest, as Fuyu, all that reads pixels belongs to the projector.

    Args:
        model: the whole model, with or without an adapter.
    """
    language = {id(parameter) for module in _writers(model) for parameter in module.parameters()}
    tower: Any = model.get_encoder(modality="image")
    is_apart = isinstance(tower, nn.Module) and not any(id(p) in language for p in tower.parameters())
    in_tower = {id(parameter) for parameter in tower.parameters()} if is_apart else set()
    names: dict[str, list[str]] = {TOWER: [], PROJECTOR: [], LANGUAGE: []}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in language:
            names[LANGUAGE].append(name)
        elif id(parameter) in in_tower:
            names[TOWER].append(name)
        else:
            names[PROJECTOR].append(name)
    return names


def _writers(model: PreTrainedModel) -> Iterator[nn.Module]:
    """List the modules that belong to the language: the decoder, the input embeddings and the head."""
    yield model.get_decoder()
    for end in (model.get_input_embeddings(), model.get_output_embeddings()):
        if end is not None:
            yield end


class ImageBatch(NamedTuple):
    """An example of a batch with images: one row with a small image."""

    tensors: Mapping[str, torch.Tensor]
    """The forward's inputs for this row, and labels, by name."""
    features: frozenset[str] = frozenset()
    """Fields of `get_image_features` that blocks of the language model read besides hidden states."""

    @property
    def names(self) -> frozenset[str]:
        """Names of the tensors that describe images: those of another shape than the token ids."""
        tokens = self.tensors["input_ids"].shape
        return frozenset(name for name, tensor in self.tensors.items() if tensor.shape != tokens)

    @property
    def pixels(self) -> frozenset[str]:
        """Names of the tensors that the tower reads; a forward without them reads all tokens of the row as text."""
        return frozenset(name for name in self.names if self.tensors[name].is_floating_point())


def read_images(model: PreTrainedModel, *, unreached: Collection[str], example: ImageBatch | None = None) -> None:
    """Let a model read the images of a run: freeze what nothing reaches, and mark it for `reads_images`; in place.

    Args:
        model: the whole model.
        unreached: names of parameters that images never reach, as `find_unreached` gives them.
        example: what the model's forward takes of a row with an image; None in a plan.
    """
    for name, parameter in model.named_parameters():
        if from_the_end(model, name) in unreached:
            parameter.requires_grad_(False)
    for name, module in model.named_modules():
        if not hasattr(module, "get_base_layer"):
            continue
        # A layer of PEFT, which would be trained beside a layer that images never reach.
        own_names = [own_name for own_name, _ in module.get_base_layer().named_parameters(recurse=False)]
        if any(from_the_end(model, f"{name}.{own_name}") in unreached for own_name in own_names):
            module.requires_grad_(False)
    setattr(model, _MARK, example or ImageBatch({}))


def read_text_alone(model: PreTrainedModel) -> None:
    """Freeze the tower and the projector of a whole model, which only images reach; in place."""
    parts = names_of_parts(model)
    for name in (*parts[TOWER], *parts[PROJECTOR]):
        model.get_parameter(name).requires_grad_(False)


def reads_images(model: nn.Module) -> bool:
    """Whether the model is trained on images.

    If so, each trained parameter gets a gradient in each step, be it of zeros, even where a batch has no image.
    """
    return hasattr(model, _MARK)


def image_example(model: nn.Module) -> ImageBatch | None:
    """Give what the model's forward takes of a row with an image; None: it reads no images, or this is a plan."""
    found: ImageBatch | None = getattr(model, _MARK, None)
    return found if found is not None and found.tensors else None


def from_the_end(model: nn.Module, name: str) -> str:
    """Give a parameter's name with indices of module lists counted from the end.

    So `layers.11.norm.weight` of 12 layers becomes `layers.-1.norm.weight`, as that of a model of another depth does. A
    copy of a module that PEFT trains has the name of the module.
    """
    parts: list[str] = _OF_COPY.sub("", name).split(".")
    module: Any = model
    for index, part in enumerate(parts):
        length = len(module) if isinstance(module, nn.ModuleList) else 0
        module = getattr(module, part, None)
        if length:
            parts[index] = str(int(part) - length)
        if not isinstance(module, nn.Module):
            break
    return ".".join(parts)


def make_small(architecture: PreTrainedConfig) -> PreTrainedModel:
    """Make a small model of image and text with the type's whole vocabulary, on the CPU, without dropout.

    It is the same on all ranks. Its weights are random, and none is zero. Whatever a type raises that cannot be made
    small is not caught here.
    """
    config = shrink_to_try(architecture, keeps_tokens=True)
    # The constructor makes it, since `from_config` would partition it under ZeRO-3.
    made: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        # torch.manual_seed would seed GPUs, too, which are not set back.
        torch.default_generator.manual_seed(0)
        small: PreTrainedModel = made(config).float().eval()
        for parameter in small.parameters():
            # Some parameters begin as zeros, through which no gradient would flow to the layers before them.
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return small


def find_unreached(architecture: PreTrainedConfig, batch: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """Find the parameters that get no gradient from images, by running a small model of the same type on one.

    LLaVA and its kin read the states before the tower's last block, so this block is never trained.

    Args:
        architecture: config of the model.
        batch: what a forward takes of a row with an image, and labels.

    Returns:
        Their names, as `from_the_end` gives them. Empty where no small model can be made, which is logged.
    """
    try:
        small = make_small(architecture)
        small(**batch).loss.backward()
    except Exception as error:  # whatever a model raises that cannot be made small
        logger.info("images: what they never reach in the model is not known: %s", first_line(error))
        return frozenset()
    return frozenset(from_the_end(small, name) for name, p in small.named_parameters() if p.grad is None)
