"""Whether the rows of a run have images, and what its model, its layout and its data must be then."""

from __future__ import annotations

import logging

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from hfdist.config.data import Packing
from hfdist.config.run import RunConfig
from hfdist.data import Corpus, have_images
from hfdist.data.tokenization.image_tokens import ImageTokens
from hfdist.errors import ConfigError
from hfdist.models.image_text import may_read_images
from hfdist.models.processor import load_processor

logger = logging.getLogger(__name__)

_KEY = "data.images.used"
_AXES = ("tensor", "pipeline", "context", "expert")
"""Degrees of `strategy.*` above 1 that divide a model or its sequences, which no tower is divided for yet."""


def takes_images(config: RunConfig, architecture: PreTrainedConfig) -> bool:
    """Whether rows of the run may have images: its model reads them, and its task is that of the next token."""
    return may_read_images(architecture) and config.task.name.traits.is_of_next_tokens


def find_images(
    config: RunConfig, corpus: Corpus, architecture: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> ImageTokens | None:
    """Give what images of rows become, and set `data.images.used` and `data.packing`; None: rows have none.

    Raises:
        ConfigError: images that the model, the task or the layout does not take, or a model without its processor.
    """
    images = config.data.images
    if not takes_images(config, architecture):
        if images.used:
            what, found = "only a model of image and text reads images, and only to learn the next token", architecture
            allowed = "a type with an AutoModelForImageTextToText class, with task=causal_lm"
            raise ConfigError(what, where=_KEY, found=f"true, with {found.model_type}", allowed=allowed)
        return None
    if images.used is None:
        # Before the config is written down: a resume must not decide otherwise.
        images.used = have_images(corpus)
    if not images.used:
        logger.info("images: the rows have none, so what reads images is frozen")
        return None
    _check_layout(config)
    if config.data.packing is not Packing.none:
        logger.info("data.packing: none, as rows have images: %s would put several into one sequence", config.data.packing.value)
        config.data.packing = Packing.none
    return ImageTokens(load_processor(config.model, architecture, tokenizer))


def _check_layout(config: RunConfig) -> None:
    strategy = config.strategy
    divided = [f"strategy.{name}={degree}" for name in _AXES if (degree := getattr(strategy, name, 1)) > 1]
    if divided:
        raise ConfigError(
            "this layout divides the model or its sequences, and not yet a tower that reads images",
            where=", ".join(one.partition("=")[0] for one in divided),
            found=", ".join(divided),
            allowed="ddp, zero1, zero2, zero3, fsdp2, with or without strategy.replicate",
            hint="strategy=fsdp2; or data.images.used=false, which trains on text alone",
        )
