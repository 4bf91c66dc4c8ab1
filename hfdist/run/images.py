"""Whether the rows of a run have images, and what its model, its layout and its data must be then."""

from __future__ import annotations

import logging

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from hfdist.config.data import Packing, cache_dir
from hfdist.config.run import RunConfig
from hfdist.data import Corpus, have_images
from hfdist.data.tokenization.image_tokens import ImageTokens
from hfdist.errors import ConfigError
from hfdist.models import find_architecture
from hfdist.models.image_text import ImageBatch, may_read_images
from hfdist.models.processor import load_processor
from hfdist.models.resolve import resolve_model

logger = logging.getLogger(__name__)

_KEY = "data.images.used"
_AXES = ("context", "expert")
"""Degrees of `strategy.*` above 1 that share sequences or experts, which is not tried with images yet."""


def check_images(config: RunConfig, architecture: PreTrainedConfig) -> None:
    """Set `data.images.used` where rows of the run can have no images, so that nobody reads their columns.

    ConfigError: the config says that they have some.
    """
    if may_read_images(architecture) and config.task.name.traits.is_of_next_tokens:
        return
    if config.data.images.used:
        what = "only a model of image and text reads images, and only to learn the next token"
        found = f"true, with {architecture.model_type} and task={config.task.name.value}"
        allowed = "a type with an AutoModelForImageTextToText class, with task=causal_lm"
        raise ConfigError(what, where=_KEY, found=found, allowed=allowed, hint=f"{_KEY}=false")
    config.data.images.used = False


def find_images(
    config: RunConfig, corpus: Corpus, architecture: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> ImageTokens | None:
    """Give what images of rows become, and set `data.images.used` and `data.packing`; None: rows have none.

    Raises:
        ConfigError: images that the layout does not take, or a model without its processor.
    """
    images = config.data.images
    if images.used is None:
        # Before the config is written down: a resume must not decide otherwise.
        images.used = have_images(corpus)
        if not images.used:
            logger.info("images: the rows have none, so what reads images is frozen")
    if not images.used:
        return None
    _check_layout(config)
    if config.data.packing is not Packing.none:
        logger.info(
            "data.packing=%s becomes none, as rows have images, and a sequence takes one row; to pack the texts alone: "
            "data.images.used=false",
            config.data.packing.value,
        )
        config.data.packing = Packing.none
    return ImageTokens(load_processor(config.model, architecture, tokenizer))


def make_example(config: RunConfig, architecture: PreTrainedConfig, images: ImageTokens) -> ImageBatch:
    """Give what a forward takes of a row with an image. PartitionError: a pipeline cannot read it."""
    example = images.example()
    if config.strategy.pipeline == 1:
        return ImageBatch(example)
    # It takes time that other layouts save.
    from hfdist.pipeline.image_check import find_features

    return find_features(architecture, example)


def images_of_past_run(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> ImageTokens | None:
    """Give what images of rows became in a run whose config was written down; None: its rows had none.

    ConfigError: its model is not here any more, or its processor is another.
    """
    if not config.data.images.used:
        return None
    model = resolve_model(config.model, cache_dir=cache_dir(config.data)).model
    architecture = find_architecture(model, sequence_length=config.data.sequence_length)
    return ImageTokens(load_processor(model, architecture, tokenizer))


def _check_layout(config: RunConfig) -> None:
    strategy = config.strategy
    divided = [f"strategy.{name}={degree}" for name in _AXES if (degree := getattr(strategy, name, 1)) > 1]
    if strategy.pipeline > 1 and strategy.sharding.is_deepspeed:
        # Data ranks with images and without would reduce other gradients.
        divided.append(f"strategy.sharding={strategy.sharding.value}")
    if divided:
        raise ConfigError(
            "this layout shares sequences, experts or optimizer states: not tried on rows with images yet",
            where=", ".join(one.partition("=")[0] for one in divided),
            found=", ".join(divided),
            allowed="ddp, ZeRO, FSDP2, strategy.pipeline, strategy.tensor",
            hint="strategy=fsdp2; or data.images.used=false, which trains on text alone",
        )
