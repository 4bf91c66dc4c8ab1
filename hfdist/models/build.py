"""Makes the run's model: its weights are read from files, or drawn at random from a seed and their names."""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.initialization import no_init_weights

from hfdist.config.model import Dtype, Init, ModelConfig
from hfdist.config.task import Head
from hfdist.errors import ConfigError, HfdistError, ResourceError, first_line
from hfdist.models.adapter_parts import describe_parts
from hfdist.models.heads import head_class
from hfdist.models.hub_client import reading_from_hub
from hfdist.models.initialize import initialize_by_name
from hfdist.models.names.hub_names import find_hub_names
from hfdist.models.names.weight_names import NameDifferences, read_names, without_report
from hfdist.models.partitioning import WHOLE, Partitioning
from hfdist.models.quantize import quantize_frozen
from hfdist.models.trainable import TrainableParameters
from hfdist.models.value_head import add_value_head, draw_value_head

logger = logging.getLogger(__name__)
_EXPLAINED = (ImportError, ValueError)
"""Errors of transformers that have a sentence for people; others may only say the name of a key."""


def build_model(
    config: ModelConfig,
    architecture: PreTrainedConfig,
    *,
    seed: int,
    layout: Partitioning = WHOLE,
    trained: TrainableParameters | None = None,
    head: Head = Head.tokens,
) -> PreTrainedModel:
    """Make as much of the model as this rank holds, on the CPU.

    TrainingArguments must exist before: transformers learns from them that ZeRO-3 partitions parameters in the
    constructor. The model is partitioned before random weights are drawn or those of a file are read and converted, so
    a rank touches memory for its own part only.

    Args:
        config: says where the weights come from, and their type.
        architecture: the model's config, as `find_architecture` gives it.
        seed: seeds random weights.
        layout: how the model is partitioned.
        trained: which parameters are trained; None: all.
        head: what the model gives at its end; a layer that scores is drawn where the file has none.

    Returns:
        The model with its weights and its adapter, partitioned by `layout`.

    Raises:
        ConfigError: the pretrained weights cannot be read or are of another model, or transformers refuses the
            architecture here.
    """
    trained = trained or TrainableParameters()
    _check_not_quantized(architecture)
    if config.init is Init.random:
        with _proposing_other_layout(layout):
            model = make_without_values(config, architecture, head=head)
        _draw(config, model, trained, seed, layout)
    else:
        _check_turned_weights(architecture, layout)
        model = _read(config, architecture, trained, seed, layout, head=head)
    if trained.has_values:
        draw_value_head(model, seed, layout)
    if trained.adapter.quantization is not None:
        quantize_frozen(model, trained.adapter.quantization, layout)
    return model


def check_weights(
    config: ModelConfig, architecture: PreTrainedConfig, trained: TrainableParameters, *, head: Head = Head.tokens
) -> None:
    """Compare the names and shapes in the files of a pretrained model with those of the model itself.

    Only the headers of the files are read, and the answer is the same for all layouts. Call it before there is a
    process group, and before transformers is told of ZeRO-3: it would then see missing names, but no other shapes.

    Args:
        config: names the model; nothing is compared for random weights.
        architecture: the model's config, as `find_architecture` gives it.
        trained: which parameters are trained; with an adapter, no weight of the model may be missing.
        head: what the model gives at its end.

    Raises:
        ConfigError: names or shapes differ and `model.allow_missing` does not allow it, or the weights are quantized.
    """
    if config.init is Init.random:
        return
    _check_not_quantized(architecture)
    assert config.name is not None  # checked with the config
    how = {"config": copy.deepcopy(architecture), "dtype": "auto", **_safely(config)}
    names = read_names(head_class(head, architecture).auto, config.name, where="model.name", head=head, **how)
    _check_names(names, config, trained)


def _check_names(names: NameDifferences, config: ModelConfig, trained: TrainableParameters) -> None:
    # Weights that are drawn beside an adapter are in no file: whoever opens the adapter would draw them anew.
    is_lost = trained.adapter.is_used and bool(names.missing)
    hint = "model.allow_missing=true, which draws what is missing at random, and leaves out what is unexpected"
    if is_lost:
        hint = "adapter=none, or a model that is whole: who opens the adapter could not have what is drawn here"
    name = trained.base.name or config.name
    names.check(where="model.name", name=str(name), may_differ=config.allow_missing and not is_lost, hint=hint)


def _safely(config: ModelConfig) -> dict[str, object]:
    # A .bin file is a pickle, which can run code: only safetensors are read.
    return {"use_safetensors": True, "revision": config.revision, "trust_remote_code": config.trust_remote_code}


def make_without_values(
    config: ModelConfig, architecture: PreTrainedConfig, *, head: Head = Head.tokens
) -> PreTrainedModel:
    """Make the whole model, tied, with whatever its memory holds in place of weights.

    Raises:
        ConfigError: transformers refuses the architecture here.
    """
    try:
        with no_init_weights():
            model: PreTrainedModel = head_class(head, architecture).auto.from_config(
                architecture, dtype=_dtype(config.dtype), trust_remote_code=config.trust_remote_code
            )
    except (HfdistError, MemoryError):
        raise
    except Exception as error:  # a config may hold anything
        reason = first_line(error) if isinstance(error, _EXPLAINED) else repr(error)[:300]
        found = config.attention.value
        if config.name:
            found += f", of {config.name}/config.json"
        raise ConfigError(
            f"transformers cannot make the model: {reason}",
            where="model.attention, model.config",
            found=found,
            hint="model.attention=auto",
        ) from error
    # `no_init_weights` leaves ties undone too; a tied parameter must be one before it is drawn.
    model.tie_weights()
    return model


def _draw(
    config: ModelConfig, model: PreTrainedModel, trained: TrainableParameters, seed: int, layout: Partitioning
) -> None:
    """Put the adapter into a whole model, partition it, and draw its random weights; in place."""
    if trained.adapter.is_used:
        # Before the adapter is there: with it the names are others, and its own weights would be drawn over.
        initialize_by_name(model, seed, layout)
    trained.choose(model, seed=seed, layout=layout)
    _partition(model, trained, layout, _dtype(config.dtype))
    if not trained.adapter.is_used:
        initialize_by_name(model, seed, layout)


@contextmanager
def _proposing_other_layout(layout: Partitioning) -> Iterator[None]:
    """Say that another layout may help where transformers fails on parameters that are partitioned already."""
    try:
        yield
    except ConfigError as error:
        if layout.partitions_in_constructor:
            other = "strategy=fsdp2, if it works there: it partitions a model after it is made and read"
            error.hint = other if error.hint is None else f"{error.hint}; or {other}"
        raise


def _check_turned_weights(architecture: PreTrainedConfig, layout: Partitioning) -> None:
    """Refuse ZeRO-3 for types whose weights transformers transposes where their shape is not the model's.

    Partitioned parameters have no shape, so it would transpose all: square ones without a word, and for others rank 0
    alone would raise.
    """
    conversions = get_checkpoint_conversion_mapping(architecture.model_type) or ()
    operations = [operation for conversion in conversions for operation in getattr(conversion, "operations", ())]
    reads_shapes = any(getattr(operation, "check_dims", False) for operation in operations)
    if layout.partitions_in_constructor and reads_shapes:
        raise ConfigError(
            "transformers reads weights of this type by the shapes of parameters, which ZeRO-3 has partitioned already",
            where="strategy.sharding",
            found=f"zero3, with {architecture.model_type}",
            allowed="none, zero1, zero2, fsdp2",
            hint="strategy=fsdp2",
        )


@contextmanager
def _naming_memory(name: str) -> Iterator[None]:
    """Turn a lack of memory while the model `name` is read into a ResourceError."""
    try:
        yield
    except MemoryError as error:
        what, hint = "there is not enough memory to read the model", "hfdist plan ... says what a run needs"
        raise ResourceError(what, where="model.name", found=name, hint=hint) from error


def _read(
    config: ModelConfig,
    architecture: PreTrainedConfig,
    trained: TrainableParameters,
    seed: int,
    layout: Partitioning,
    *,
    head: Head,
) -> PreTrainedModel:
    """Make a model with the weights of a file, partitioned."""
    assert config.name is not None  # checked with the config
    dtype, is_partitioned = _dtype(config.dtype), layout.partitions_in_constructor
    with (
        _proposing_other_layout(layout),
        reading_from_hub("model.name", config.name),
        _naming_memory(config.name),
        without_report(),
    ):
        model, loading_info = head_class(head, architecture).auto.from_pretrained(
            config.name,
            output_loading_info=True,
            config=architecture,
            # The type of the file: then its pages are mapped, and only those of this rank's part are ever read. A model
            # that is partitioned already is an exception: its type cannot be changed later.
            dtype=dtype if is_partitioned else "auto",
            **_safely(config),
        )
    names = NameDifferences.of(loading_info, model, head=head)
    _check_names(names, config, trained)
    if names.missing or names.unexpected:
        logger.warning("model.allow_missing: %s", names)
    _draw_missing(model, loading_info["missing_keys"], dtype, seed, layout)
    if trained.reads_weights and not is_partitioned:
        nn.Module.to(model, dtype)
    trained.choose(model, seed=seed, layout=layout)
    _partition(model, trained, layout, dtype)
    if not is_partitioned:
        with trained.kept_in_float32(model):
            nn.Module.to(model, dtype)
    return model


def _draw_missing(
    model: PreTrainedModel, missing: Collection[str], dtype: torch.dtype, seed: int, layout: Partitioning
) -> None:
    """Give the weights that no file holds the values that random weights of this seed would have."""
    drawn = {name for name, _ in model.named_parameters(remove_duplicate=False)} & set(missing)
    if not drawn:
        return
    if not layout.partitions_in_constructor:
        # The type is set before they are drawn: that of a file may be another than the run's, and round them.
        for name in drawn:
            parameter = model.get_parameter(name)
            parameter.data = parameter.data.to(dtype)
    initialize_by_name(model, seed, layout, only=drawn)


def _partition(model: PreTrainedModel, trained: TrainableParameters, layout: Partitioning, dtype: torch.dtype) -> None:
    """Reduce a whole model to this rank's part, once all that needs the whole model has been noted; in place."""
    # Names are found while the model is whole.
    if trained.adapter.is_used:
        logger.info("adapter: %s", describe_parts(model))
    else:
        find_hub_names(model)
    if trained.has_values:
        # It comes after the names were found: the policy's files do not have it.
        add_value_head(model, dtype)
    layout.partition(model)


def _check_not_quantized(architecture: PreTrainedConfig) -> None:
    """Refuse a model whose files hold quantized weights."""
    quantization = getattr(architecture, "quantization_config", None)
    if quantization is not None:
        raise ConfigError(
            "the weights are quantized, and cannot be trained or adapted here",
            where="model.name",
            found=f"a quantization_config in its config.json: {str(quantization)[:200]}",
            hint="the repository that it was quantized from, with adapter=qlora",
        )


def _dtype(dtype: Dtype) -> torch.dtype:
    # `auto` is float32 even for a bfloat16 checkpoint: small updates vanish in bfloat16 weights, so the
    # optimizer must have float32 ones; `train.precision` chooses the type of the arithmetic.
    return torch.float32 if dtype is Dtype.auto else getattr(torch, dtype.value)
