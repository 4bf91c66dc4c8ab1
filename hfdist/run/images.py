"""Whether the rows of a run have images, and what its model, its layout and its data must be then."""

from __future__ import annotations

import logging

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from hfdist.config.data import Packing, cache_dir
from hfdist.config.run import RunConfig
from hfdist.config.task import TaskName
from hfdist.data import Corpus, have_images
from hfdist.data.packing.packed_images import make_trial
from hfdist.data.tokenization.image_tokens import ImageTokens
from hfdist.errors import ConfigError
from hfdist.models import find_architecture
from hfdist.models.image_text import ImageBatch, feature_token, may_read_images
from hfdist.models.image_trials import find_positions, module_of_each_image, why_rows_mix
from hfdist.models.position_limit import most_positions
from hfdist.models.processor import load_processor
from hfdist.models.resolve import resolve_model

logger = logging.getLogger(__name__)

_KEY = "data.images.used"
_UNTRIED_AXES = ("context", "expert")
"""Keys of `strategy` that share sequences or experts: above 1, not tried with images yet."""


def check_images(config: RunConfig, architecture: PreTrainedConfig) -> None:
    """Set `data.images.used` where the model reads text alone, so that nobody reads columns of images.

    ConfigError: the config says that rows have images.
    """
    if may_read_images(architecture):
        return
    if config.data.images.used:
        what, found = "only a model of image and text reads images", f"true, with {architecture.model_type}"
        allowed = "a type with an AutoModelForImageTextToText class"
        raise ConfigError(what, where=_KEY, found=found, allowed=allowed, hint=f"{_KEY}=false")
    config.data.images.used = False


def find_images(
    config: RunConfig, corpus: Corpus, architecture: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> ImageTokens | None:
    """Give the tokens that images of rows become, and set `data.images.used` and `data.packing`; None: no images.

    Raises:
        ConfigError: images that the task, the layout or `data.packing` does not take, or a model without its processor.
    """
    images = config.data.images
    if images.used is None:
        # Before the config is written down: a resume must not decide otherwise.
        images.used = have_images(corpus)
        if not images.used:
            logger.info("images: the rows have none, so what reads images is frozen")
    if not images.used:
        return None
    _check_task(config.task.name)
    _check_layout(config)
    if config.task.name.traits.is_reinforcement:
        _check_answers(config)
        _check_room(config, architecture)
    processor = load_processor(config.model, architecture, tokenizer)
    found = ImageTokens(processor, find_positions(architecture), feature_token(architecture))
    _check_calls(config, architecture, found)
    # Before the config is written down, too: a resume finds each row at its place by the packing.
    config.data.packing = _choose_packing(config, architecture, found)
    return found


def _choose_packing(config: RunConfig, architecture: PreTrainedConfig, images: ImageTokens) -> Packing:
    """Choose how rows with images become sequences; ConfigError: `data.packing` asks for another way."""
    asked = config.data.packing
    where, allowed = "data.packing", "best_fit, none; auto: best_fit where it computes the same"
    if asked is Packing.none:
        return asked
    if asked is Packing.concat:
        what = "rows have images, and documents end to end are cut, an image too"
        raise ConfigError(what, where=where, found=asked.value, allowed=allowed, hint="data.packing=best_fit")
    reason = why_rows_mix(architecture, lambda: make_trial(images))
    if reason is None:
        return Packing.best_fit
    if asked is Packing.auto:
        logger.info("a sequence takes one row, as packed rows with images would not be computed alike: %s", reason)
        return Packing.none
    what = f"packed rows with images are not computed as by themselves: {reason}"
    found = f"{asked.value}, with {architecture.model_type}"
    if config.task.name is not TaskName.causal_lm:
        what = f"pairs of answers are packed, and {what}"
        hint = "a model of another type; or data.images.used=false, which trains on text alone"
        raise ConfigError(what, where="task", found=f"{config.task.name.value}, {found}", hint=hint)
    raise ConfigError(what, where=where, found=found, allowed="none for this model", hint="data.packing=none")


def make_example(config: RunConfig, architecture: PreTrainedConfig, images: ImageTokens) -> ImageBatch:
    """Give the tensors that a forward takes of a row with an image; PartitionError: a pipeline cannot read them."""
    example = images.example()
    if config.strategy.pipeline == 1:
        return ImageBatch(example)
    # Imported here alone: the import takes time that other layouts save.
    from hfdist.pipeline.image_check import find_features

    examples = [example]
    if config.data.packing is not Packing.none:
        # Training rows are packed, and held-out rows have a sequence each: stages read both.
        examples.append(make_trial(images).packed)
    return find_features(architecture, examples)


def images_of_past_run(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> ImageTokens | None:
    """Give the tokens that images of rows became in an earlier run, by its saved config; None: its rows had none.

    ConfigError: its model is not here any more, or its processor is another.
    """
    if not config.data.images.used:
        return None
    model = resolve_model(config.model, cache_dir=cache_dir(config.data)).model
    architecture = find_architecture(model, sequence_length=config.data.sequence_length)
    return ImageTokens(load_processor(model, architecture, tokenizer), feature_id=feature_token(architecture))


def _check_calls(config: RunConfig, architecture: PreTrainedConfig, images: ImageTokens) -> None:
    """Refuse ZeRO-3 for a type of which each image calls a module: ranks would gather other weights together."""
    if not config.strategy.partitions_in_constructor:
        return
    _, without_image = images.none
    names = without_image.keys()

    def make_batches() -> list[dict[str, torch.Tensor]]:
        return [batch for batch in make_trial(images).alone if names <= batch.keys()]

    module = module_of_each_image(architecture, make_batches)
    if module is not None:
        raise ConfigError(
            "ZeRO-3 gathers weights in each call of a module, and this type calls one for each image",
            where="strategy.sharding",
            found=f"zero3, with {module} of {architecture.model_type}",
            allowed="ddp, zero1, zero2, fsdp2",
            hint="strategy=fsdp2; or data.images.used=false, which trains on text alone",
        )


def _check_task(task: TaskName) -> None:
    """Refuse a task that reads no images."""
    if not task.traits.reads_images:
        raise ConfigError(
            "this task does not read images yet, and rows have some",
            where="task",
            found=task.value,
            allowed=", ".join(name.value for name in TaskName if name.traits.reads_images),
            hint=f"{_KEY}=false, which trains on the text of rows whose images are in a column",
        )


def _check_answers(config: RunConfig) -> None:
    """Refuse what is not tried where prompts with images are answered."""
    task, strategy = config.task, config.strategy
    task_keys = [f"task.{key}" for key in task.used_for_text_alone]
    layout_keys = []
    if strategy.pipeline > 1:
        layout_keys.append("strategy.pipeline")
    if strategy.partitions_in_constructor:
        layout_keys.append("strategy.sharding")
    changes = []
    if layout_keys:
        changes.append("strategy=fsdp2")
    if task_keys:
        changes.append(f"without {' and '.join(task_keys)}")
    if not changes:
        return
    raise ConfigError(
        "prompts with images are answered by the ranks themselves, and this was not tried with it yet",
        where=", ".join([*task_keys, *layout_keys]),
        allowed="one process, ddp, zero1, zero2, fsdp2, strategy.tensor",
        hint=f"{', '.join(changes)}; or {_KEY}=false, which trains on text alone",
    )


def _check_room(config: RunConfig, architecture: PreTrainedConfig) -> None:
    """Check that the longest prompt need not be cut for its answer: a cut could leave an image without its tokens."""
    positions = most_positions(architecture)
    length, new_tokens = config.data.sequence_length, config.task.max_new_tokens
    # Without room for any prompt another error says so.
    if positions is not None and new_tokens < positions < length + new_tokens:
        raise ConfigError(
            "prompts with images cannot be cut, and the longest leaves the model no room for an answer",
            where="data.sequence_length",
            found=length,
            allowed=f"<= {positions - new_tokens}: the model's positions less task.max_new_tokens={new_tokens}",
            hint=f"data.sequence_length={positions - new_tokens}",
        )


def _check_layout(config: RunConfig) -> None:
    """Refuse a layout that was not tried with images."""
    strategy = config.strategy
    refused = {f"strategy.{name}": getattr(strategy, name) for name in _UNTRIED_AXES if getattr(strategy, name) > 1}
    if strategy.pipeline > 1 and strategy.sharding.is_deepspeed:
        # Data ranks with images and without would reduce other gradients.
        refused["strategy.sharding"] = strategy.sharding.value
    if refused:
        raise ConfigError(
            "this layout shares sequences, experts or optimizer states: not tried on rows with images yet",
            where=", ".join(refused),
            found=", ".join(f"{key}={value}" for key, value in refused.items()),
            allowed="ddp, ZeRO without a pipeline, FSDP2, strategy.pipeline, strategy.tensor",
            hint="strategy=fsdp2; or data.images.used=false, which trains on text alone",
        )
