"""The model of a run: found on this machine, and changed for the training."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hfdist.config.data import Packing
from hfdist.config.model import ModelConfig
from hfdist.config.paths import expand_user
from hfdist.config.run import RunConfig
from hfdist.config.task import Head, Pooling, TaskConfig, TaskName
from hfdist.config.train import Precision
from hfdist.errors import ConfigError
from hfdist.models import find_architecture
from hfdist.models.adapter_trial import try_adapter
from hfdist.models.attention_choice import choose_attention
from hfdist.models.blocks import compile_blocks, compiles_blocks
from hfdist.models.build import make_without_values
from hfdist.models.encoders import check_pipeline, check_reads_no_further, check_reads_texts, takes_texts_apart
from hfdist.models.float8 import use_float8
from hfdist.models.loss.embedding_losses import check_sizes
from hfdist.models.positions import counts_from_zero
from hfdist.models.probing import class_keeps_documents_apart
from hfdist.models.recompute import checkpoint_blocks
from hfdist.models.resolve import resolve_model
from hfdist.models.target_loss import check_target_loss
from hfdist.models.value_head import check_value_head
from hfdist.run.data import make_cache
from hfdist.strategies.base import Strategy
from hfdist.strategies.select import device_type_here
from hfdist.tune.embedding_folder import read_pooling
from hfdist.tune.learned_reward import check_reward_model
from hfdist.tune.reward import find_scorer

logger = logging.getLogger(__name__)


class FoundModel(NamedTuple):
    """A model whose config and tokenizer are on this machine; its weights may not be yet."""

    config: RunConfig
    """The run's config, with folders of this machine in place of Hub ids and GGUF files."""
    architecture: PreTrainedConfig
    """The model's own config, as transformers has it."""
    fetch_weights: Callable[[], object]
    """Brings the weights to this machine."""
    why_together: str | None
    """Why packed documents are not computed one by one; None: they are, or another attention was chosen."""


def find_model(config: RunConfig) -> FoundModel:
    """Bring a model's config and tokenizer to this machine, and settle how its texts are read and pooled.

    Raises:
        ConfigError: the model is not found, or its type cannot do what the task asks.
    """
    start = resolve_model(config.model, cache_dir=make_cache(config))
    head = config.task.name.traits.head
    longest = config.data.longest_side if head is Head.targets else config.data.sequence_length
    architecture = find_architecture(start.model, sequence_length=longest, head=head)
    try_adapter(start.model, architecture, config.adapter, head=head)
    _check_task(config.task, start.model, architecture)
    is_encoder = _is_encoder(config, architecture)
    if config.task.name is TaskName.embed and config.task.pooling is Pooling.auto:
        # Settled before the config is written down.
        config.task.pooling = _choose_pooling(start.model, is_encoder)
    found = replace(config, model=start.model)
    why_together = None
    if not (is_encoder or head.is_padded):
        why_together = choose_attention(found, architecture, device_type_here())
    return FoundModel(found, architecture, start.fetch_weights, why_together)


def _choose_pooling(model: ModelConfig, is_encoder: bool) -> Pooling:
    """Give the pooling that an embedding model's folder names; without one, what fits the type of model."""
    named = None if model.name is None else read_pooling(Path(expand_user(model.name)))
    if named is not None:
        return named
    return Pooling.mean if is_encoder else Pooling.last


def _check_task(task: TaskConfig, model: ModelConfig, architecture: PreTrainedConfig) -> None:
    """Raise a ConfigError where a type of model cannot do what a task asks."""
    head, has_values = task.name.traits.head, task.name.traits.has_values
    if head is Head.score or has_values:
        # The modules alone, without memory for weights: their names and shapes say whether they fit.
        with torch.device("meta"):
            empty = make_without_values(model, architecture, head=head)
            if head is Head.score:
                find_scorer(empty)
            if has_values:
                check_value_head(empty)
    if head is Head.tokens:
        check_reads_no_further(architecture)
    if head is Head.targets:
        check_target_loss(model, architecture)
    if task.reward_model is not None:
        check_reward_model(task.reward_model)
    check_sizes(task, architecture)


def _is_encoder(config: RunConfig, architecture: PreTrainedConfig) -> bool:
    """Whether the model is an encoder, whose tokens see what comes after them, so that texts have a row each.

    ConfigError: the model cannot read the task's texts.
    """
    head = config.task.name.traits.head
    may_be_encoder = head in (Head.none, Head.masked) or head.gives_labels
    if not may_be_encoder:
        return False
    is_encoder = check_reads_texts(architecture, head=head, longest=config.data.sequence_length)
    if is_encoder:
        check_pipeline(architecture, head=head, pipeline=config.strategy.pipeline)
    return is_encoder


def check_packing(model: PreTrainedModel, packing: Packing, strategy: Strategy, head: Head) -> None:
    """Warn if packed documents see each other in a model; `head` says what the model gives at its end.

    Raises:
        ConfigError: the model counts positions otherwise than packed documents have them.
    """
    if packing is Packing.none or takes_texts_apart(model, head):
        return
    if not strategy.partitions_in_constructor:
        # With ZeRO-3 no rank has whole weights to try it with.
        reason = why_documents_mix(model)
        if reason is not None:
            logger.warning("%s", reason)
    if not counts_from_zero(model):
        what = "packed documents have positions from 0, and this model counts otherwise in one document"
        found = f"{packing.value}, with {type(model).__name__}"
        hint = "data.packing=none"
        raise ConfigError(what, where="data.packing", found=found, allowed="none for this model", hint=hint)


def why_documents_mix(model: PreTrainedModel) -> str | None:
    """Say why packed documents see each other; None: they do not, or it cannot be tried here."""
    if class_keeps_documents_apart(model) is not False:
        return None
    return f"packed documents see each other in this model: {model.config.model_type} does not mask by positions"


def speed_up(config: RunConfig, model: PreTrainedModel, strategy: Strategy) -> None:
    """Let linear layers compute in float8, and compile the blocks, as the config says."""
    if config.train.precision is Precision.fp8:
        use_float8(model)
    if compiles_blocks(config, model):
        compile_blocks(model)


def save_memory(config: RunConfig, model: PreTrainedModel) -> None:
    """Let the backward pass compute blocks again, where the Trainer, which must be built, does not do so."""
    train = config.train
    if train.gradient_checkpointing and not train.is_checkpointed_by_trainer:
        checkpoint_blocks(model, train.recompute, offloads=train.activation_offload)
