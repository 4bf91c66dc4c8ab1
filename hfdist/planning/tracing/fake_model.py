"""The model of a run on fake tensors: shapes and types without memory, prepared as in the run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import PreTrainedConfig, PreTrainedModel

from hfdist.config.run import RunConfig
from hfdist.config.task import Head, TaskName
from hfdist.models.build import make_without_values
from hfdist.models.dropout import switch_off_dropout
from hfdist.models.packed_weights import PackedLinear
from hfdist.models.quantize import check_installed, quantize_frozen
from hfdist.models.routers import leave_out_router_loss
from hfdist.models.stacked_experts import use_products
from hfdist.models.target_loss import fill_special_ids
from hfdist.models.trainable import TrainableParameters
from hfdist.strategies.base import Strategy


def make_planned(config: RunConfig, architecture: PreTrainedConfig) -> PreTrainedModel:
    """Make the model that a run would make, without values, where tensors are made; its task has changed it."""
    task = config.task.name
    # A constructor may write to the architecture.
    model = make_without_values(config.model, copy.deepcopy(architecture), head=task.traits.head)
    if getattr(model.config, "pad_token_id", 0) is None:
        # A run sets that of its tokenizer: a model for sequence classification asks for it.
        model.config.pad_token_id = 0
    if task.traits.head is Head.targets:
        fill_special_ids(model.config, 0)
    if task is not TaskName.causal_lm and not task.traits.head.is_padded:
        switch_off_dropout(model)
    return model


def make_fake_model(
    config: RunConfig,
    architecture: PreTrainedConfig,
    strategy: Strategy,
    before_split: Callable[[PreTrainedModel], None] = lambda _: None,
) -> PreTrainedModel:
    """Make the model that a run would give its strategy, whole. Call it in a FakeTensorMode.

    Args:
        config: config of the run; weights are neither read nor drawn.
        architecture: result of `find_architecture`; it is not changed.
        strategy: strategy of the run, which checks whether ranks can share the model.
        before_split: called with the model while it is whole.

    Raises:
        ConfigError: as the run itself would.
    """
    trained = TrainableParameters.of(config)
    # Not fake from the start: an adapter swaps tensors, which fake ones refuse.
    with unset_fake_temporarily(), torch.device("meta"):
        model = make_planned(config, architecture)
        trained.choose(model, seed=config.train.seed, layout=strategy)
    move_to_cpu(model)
    leave_out_router_loss(model)
    use_products(model)
    before_split(model)
    strategy.partition(model)
    return model


def quantize_fake(model: PreTrainedModel, config: RunConfig) -> None:
    """Put weights of 4 bits into the model where a run has them; in place.

    Call it in the FakeTensorMode in which the model was made.

    Raises:
        ConfigError: as the run itself would.
    """
    quantization = config.adapter.quantization
    if quantization is None:
        return
    check_installed(quantization)
    with unset_fake_temporarily():
        # bitsandbytes keeps a table from its first call on, which must be no fake.
        PackedLinear(nn.Linear(64, 1), quantization)
    quantize_frozen(model, quantization)


def move_to_cpu(model: nn.Module) -> None:
    """Put tensors of the CPU in the place of those of `meta`; one that has two names stays one."""
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            tensors = cast(dict[str, torch.Tensor | None], own)
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in moved:
                    on_cpu: torch.Tensor = torch.empty_like(tensor, device="cpu")
                    is_parameter = isinstance(tensor, nn.Parameter)
                    # The old tensor is kept, too: otherwise another one might get its id.
                    moved[id(tensor)] = nn.Parameter(on_cpu, tensor.requires_grad) if is_parameter else on_cpu, tensor
                tensors[name] = moved[id(tensor)][0]
