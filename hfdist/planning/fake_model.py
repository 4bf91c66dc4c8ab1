"""The model of a run on fake tensors: its shapes and types, with no memory behind them, and prepared as in the run."""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import torch
from accelerate.utils.operations import convert_outputs_to_fp32
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hfdist.config.run import RunConfig
from hfdist.config.train import Precision
from hfdist.models.blocks import checkpoint_blocks
from hfdist.models.build import make_without_values
from hfdist.models.routers import leave_out_router_loss
from hfdist.models.trainable import TrainableParameters
from hfdist.strategies.base import Strategy


def make_fake_model(config: RunConfig, architecture: PreTrainedConfig, strategy: Strategy) -> PreTrainedModel:
    """Make the model that a run would give its strategy, whole. Call it in a FakeTensorMode.

    Args:
        config: of the run; weights are neither read nor drawn.
        architecture: from `find_architecture`; it is not changed.
        strategy: that of the run, which checks whether ranks can share the model.

    Raises:
        ConfigError: as the run itself would.
    """
    trained = TrainableParameters.of(config)
    # A constructor may write to it.
    model = make_without_values(config.model, copy.deepcopy(architecture))
    trained.choose(model, seed=config.train.seed, layout=strategy)
    leave_out_router_loss(model)
    strategy.partition(model)
    return model


def prepare_as_trainer(model: nn.Module, config: RunConfig) -> None:
    """Checkpoint and autocast as the Trainer and accelerate do once the engine is built; in place."""
    train = config.train
    if train.gradient_checkpointing:
        checkpoint_blocks(_base(model), train.recompute, offloads=train.activation_offload)
    if train.precision is not Precision.fp32:
        dtype = torch.float16 if train.precision is Precision.fp16 else torch.bfloat16
        forward: Any = model.forward
        cast = torch.autocast("cpu", dtype)(getattr(forward, "__func__", forward))
        bound = MethodType(cast, model) if hasattr(forward, "__func__") else cast
        model.forward = (
            MethodType(convert_outputs_to_fp32(bound.__func__), model)
            if hasattr(forward, "__func__")
            else convert_outputs_to_fp32(cast)
        )
    model.train()


def _base(model: nn.Module) -> PreTrainedModel:
    assert isinstance(model, PreTrainedModel)
    return model
