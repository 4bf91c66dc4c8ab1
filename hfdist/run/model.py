"""The model of a run: found on this machine, and changed for the training."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from transformers import PreTrainedConfig, PreTrainedModel

from hfdist.config.data import Packing
from hfdist.config.run import RunConfig
from hfdist.config.train import Precision
from hfdist.data import TokenStream
from hfdist.errors import ConfigError
from hfdist.models import find_architecture
from hfdist.models.adapter_trial import try_adapter
from hfdist.models.attention_choice import choose_attention
from hfdist.models.blocks import compile_blocks, compiles_blocks
from hfdist.models.float8 import use_float8
from hfdist.models.positions import counts_from_zero
from hfdist.models.probing import class_keeps_documents_apart
from hfdist.models.recompute import checkpoint_blocks
from hfdist.models.resolve import resolve_model
from hfdist.run.data import make_cache
from hfdist.strategies.base import Strategy
from hfdist.strategies.select import device_type_here
from hfdist.tune.embedding_losses import check_sizes
from hfdist.tune.learned_reward import check_reward_model

logger = logging.getLogger(__name__)


class FoundModel(NamedTuple):
    """A model on this machine, but for its weights."""

    config: RunConfig
    """The run's config, with folders of this machine in place of Hub ids and GGUF files."""
    architecture: PreTrainedConfig
    fetch_weights: Callable[[], object]
    why_together: str | None
    """Why packed documents are not computed one by one; None: they are, or another attention was chosen."""


def find_model(config: RunConfig) -> FoundModel:
    """See `Run.find_model`."""
    start = resolve_model(config.model, cache_dir=make_cache(config))
    head = config.task.name.traits.head
    architecture = find_architecture(start.model, sequence_length=config.data.sequence_length, head=head)
    try_adapter(start.model, architecture, config.adapter, head=head)
    if config.task.reward_model is not None:
        check_reward_model(config.task.reward_model)
    check_sizes(config.task, architecture)
    found = replace(config, model=start.model)
    why_together = choose_attention(found, architecture, device_type_here())
    return FoundModel(found, architecture, start.fetch_weights, why_together)


def check_packing(model: PreTrainedModel, stream: TokenStream, strategy: Strategy) -> None:
    """Warn where packed documents see each other.

    Raises:
        ConfigError: the model counts positions otherwise than packed documents have them.
    """
    packs = stream.plan.packing is not Packing.none
    if packs and not strategy.partitions_in_constructor and class_keeps_documents_apart(model) is False:
        logger.warning(
            "packed documents see each other in this model: %s does not mask by positions", model.config.model_type
        )
    if packs and not counts_from_zero(model):
        what = "packed documents have positions from 0, and this model counts otherwise in one document"
        found = f"{stream.plan.packing.value}, with {type(model).__name__}"
        hint = "data.packing=none"
        raise ConfigError(what, where="data.packing", found=found, allowed="none for this model", hint=hint)


def speed_up(config: RunConfig, model: PreTrainedModel, strategy: Strategy) -> None:
    """Let linear layers compute in float8, and compile the blocks, as the config says."""
    if config.train.precision is Precision.fp8:
        use_float8(model)
    if compiles_blocks(config, model):
        compile_blocks(model)


def save_memory(config: RunConfig, model: PreTrainedModel) -> None:
    """Let the backward pass compute blocks again, if the Trainer does not do so itself. Call it once that is built."""
    train = config.train
    if train.gradient_checkpointing and not train.is_checkpointed_by_trainer:
        checkpoint_blocks(model, train.recompute, offloads=train.activation_offload)
