"""The model's config as the planned run will have it: its vocabulary, its labels, its attention."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedConfig

from hfdist.config.data import cache_dir
from hfdist.config.model import Init
from hfdist.config.run import RunConfig
from hfdist.config.task import Head, TaskName
from hfdist.models import find_architecture, fit_vocabulary
from hfdist.models.attention_choice import choose_attention
from hfdist.models.encoders import check_pipeline, check_reads_texts
from hfdist.models.label_names import own_labels, set_labels
from hfdist.models.resolve import resolve_model
from hfdist.models.target_loss import check_target_loss
from hfdist.models.tokenizer import load_pretrained_tokenizer


def find_planned_architecture(config: RunConfig, device_type: str = "cpu") -> PreTrainedConfig:
    """Give the model's config with the vocabulary that the run will have, as far as no data are read for it.

    Args:
        config: the run's config.
        device_type: `cpu` or `cuda`: where the run is to be.

    Raises:
        ConfigError: as the run itself would: there is no such model, or it cannot do what the task asks.
    """
    model, folder = config.model, cache_dir(config.data)
    takes_size = model.init is Init.random and "vocab_size" not in model.config
    if not takes_size or model.tokenizer.name is None:
        # A tokenizer must not be fetched for nothing.
        model = replace(model, tokenizer=replace(model.tokenizer, name=None, revision=None))
    model = resolve_model(model, cache_dir=folder).model
    config = replace(config, model=model)

    head = config.task.name.traits.head
    longest = config.data.longest_side if head is Head.targets else config.data.sequence_length
    architecture = find_architecture(model, sequence_length=longest, head=head)
    if head.gives_labels:
        _set_labels(config, architecture)
    reads_rows = _reads_rows(config, architecture)

    if model.tokenizer.name is not None:
        tokenizer = load_pretrained_tokenizer(model, cache_dir=folder)
        fit_vocabulary(architecture, tokenizer, model)
    elif takes_size:
        # The run trains its tokenizer, which gets at most so many tokens.
        architecture.get_text_config().vocab_size = model.tokenizer.vocab_size
    if not reads_rows:
        choose_attention(config, architecture, device_type)
    return architecture


def _set_labels(config: RunConfig, architecture: PreTrainedConfig) -> None:
    """Set the labels in the model's config, in place, as far as they are known before the rows are read."""
    labels = config.data.labels
    # A ranking has one number, and no names.
    names = [] if config.task.name is TaskName.rerank else labels.names or own_labels(architecture)
    set_labels(architecture, replace(labels, names=names))


def _reads_rows(config: RunConfig, architecture: PreTrainedConfig) -> bool:
    """Check what the task asks of the model; True: each text is in a row of its own, so nothing has to be packed.

    Raises:
        ConfigError: the model cannot do it.
    """
    head = config.task.name.traits.head
    if head is Head.targets:
        check_target_loss(config.model, architecture)
        return True
    if head is not Head.none and not head.is_padded:
        return False
    is_encoder = check_reads_texts(architecture, head=head, longest=config.data.sequence_length)
    if is_encoder:
        check_pipeline(architecture, head=head, pipeline=config.strategy.pipeline)
    return is_encoder or head.is_padded
