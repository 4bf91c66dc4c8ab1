"""The model of a run on fake tensors: shapes and types without memory, prepared as in the run."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from types import MethodType
from typing import Any, cast

import torch
from accelerate.utils.operations import convert_outputs_to_fp32
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import PreTrainedConfig, PreTrainedModel

from hfdist.config.run import RunConfig
from hfdist.config.train import Precision
from hfdist.models.build import make_without_values
from hfdist.models.loss import LossHead
from hfdist.models.quantize import PackedLinear, check_installed, quantize_frozen
from hfdist.models.recompute import checkpoint_blocks
from hfdist.models.routers import leave_out_router_loss
from hfdist.models.stacked_experts import use_products
from hfdist.models.trainable import TrainableParameters
from hfdist.strategies.base import Strategy
from hfdist.strategies.engine import Batch


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
        # A constructor may write to the architecture.
        model = make_without_values(config.model, copy.deepcopy(architecture))
        trained.choose(model, seed=config.train.seed, layout=strategy)
    _move_to_cpu(model)
    leave_out_router_loss(model)
    use_products(model)
    before_split(model)
    strategy.partition(model)
    return model


def quantize_fake(model: PreTrainedModel, config: RunConfig) -> None:
    """Put weights of 4 bits into the model where a run has them; in place, and in the FakeTensorMode it was made in.

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


def _move_to_cpu(model: nn.Module) -> None:
    """Put tensors of the CPU in the place of those of `meta`; one that has two names stays one."""
    moved: dict[int, Any] = {}
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is None:
                    continue
                if id(tensor) not in moved:
                    here: torch.Tensor = torch.empty_like(tensor, device="cpu")
                    is_parameter = isinstance(tensor, nn.Parameter)
                    # The old tensor is kept, too: otherwise another one might get its id.
                    moved[id(tensor)] = nn.Parameter(here, tensor.requires_grad) if is_parameter else here, tensor
                own[name] = moved[id(tensor)][0]


def prepare_as_trainer(model: nn.Module, config: RunConfig) -> None:
    """Checkpoint and autocast as the Trainer and accelerate do once the engine is built; in place."""
    train = config.train
    if train.gradient_checkpointing:
        checkpoint_blocks(cast(PreTrainedModel, model), train.recompute, offloads=train.activation_offload)
    if train.precision is not Precision.fp32:
        dtype = torch.float16 if train.precision is Precision.fp16 else torch.bfloat16
        autocast = torch.autocast("cpu", dtype, cache_enabled=False)
        model.forward = MethodType(convert_outputs_to_fp32(autocast(type(model).forward)), model)
    model.train()


def loss_function(model: nn.Module, loss_head: LossHead | None) -> Callable[..., torch.Tensor]:
    """Give what computes the loss of a micro batch as the Trainer does: (prepared model or stage, batch, num_items)."""
    parameters = inspect.signature(type(model).forward).parameters.values()
    takes_counts = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)

    def compute_loss(prepared: nn.Module, batch: Batch, num_items: torch.Tensor | None) -> torch.Tensor:
        named = {"num_items_in_batch": num_items} if takes_counts else {}
        with nullcontext() if loss_head is None else loss_head.deferring(prepared):
            return cast(torch.Tensor, prepared(**batch, **named).loss)

    return compute_loss
