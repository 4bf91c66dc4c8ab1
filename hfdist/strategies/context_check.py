"""Context parallelism of a model: which method fits it, and whether a small one trains alike."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from hfdist.collectives import device_of
from hfdist.config.strategy import ContextMethod
from hfdist.errors import ConfigError
from hfdist.models.architecture import count_heads
from hfdist.models.document_attention import BY_DOCUMENTS, dense_name
from hfdist.models.positions import Positions, all_tokens, find_positions
from hfdist.models.probing import keeps_documents_apart, small_model
from hfdist.strategies.context import ContextParallel
from hfdist.strategies.gradients.reduction import average_gradients
from hfdist.strategies.self_check import MASK, POSITIONS, BatchSharding, LayoutHooks, find_problem

_GATHERABLE = ("sdpa", "eager")
"""Implementations of attention that take a mask of some rows."""

_CHECKED_TOKENS = 32
"""About the number of tokens in a sequence of the trial."""


def make_context_parallel(
    model: nn.Module, group: dist.ProcessGroup, method: ContextMethod, *, num_tensor_ranks: int = 1
) -> ContextParallel:
    """Let the ranks of `group` share the sequences of `model`, after a small one has shown that it trains alike.

    A collective over the group.

    Raises:
        ConfigError: a model whose ranks would need more of a sequence than attention gives them, or a method that does
            not fit it.
    """
    if not isinstance(model, PreTrainedModel):
        raise _refused(type(model).__name__, "a model that is not one of transformers")
    # Ulysses shares out the heads that a tensor rank has.
    method = choose_method(model, group.size() * num_tensor_ranks, method)
    trial = _Trial(model, group, method)
    if (problem := trial.find_problem()) is not None:
        raise _refused(type(model).__name__, problem)
    return ContextParallel(model, group, method, keeps_apart=trial.keeps_apart, positions=trial.positions)


def choose_method(model: PreTrainedModel, size: int, method: ContextMethod) -> ContextMethod:
    """Choose how attention sees a whole sequence; ConfigError: `method` does not fit the model. No collective."""
    config = model.config.get_text_config(decoder=True)
    uneven = {name: n for name, n in count_heads(config) if n % size}
    # By names, which a split model keeps: all stages choose alike.
    has_sinks = any(name.endswith("sinks") for module in model.modules() for name in module._parameters)
    can_gather = dense_name(config._attn_implementation) in _GATHERABLE
    if method is ContextMethod.gather and not can_gather:
        what = "keys and values can be gathered only for an attention that takes a mask of some rows"
        found, allowed = config._attn_implementation, ", ".join(_GATHERABLE)
        hint = "strategy.context_method=ulysses, or model.attention=sdpa"
        raise ConfigError(what, where="strategy.context_method", found=found, allowed=allowed, hint=hint)
    if method is ContextMethod.gather or (method is ContextMethod.auto and (uneven or has_sinks) and can_gather):
        return ContextMethod.gather
    if uneven or has_sinks:
        what = "ulysses shares heads out to the ranks" + ("" if uneven else ", and these heads have parameters")
        found = ", ".join(f"{name}: {n}" for name, n in uneven.items()) or "sinks"
        raise ConfigError(
            f"{what}: {size} ranks of the context and tensor axes do not go with this model",
            where="strategy.context, strategy.context_method",
            found=found,
            allowed="a degree that divides all numbers of heads, or strategy.context_method=gather",
            hint="strategy.context_method=gather model.attention=sdpa",
        )
    return ContextMethod.ulysses


class _Trial:
    """Trains a small model of the class on the ranks of a group, and learns what such models do by themselves."""

    def __init__(self, model: PreTrainedModel, group: dist.ProcessGroup, method: ContextMethod) -> None:
        self._model, self._group, self._method = model, group, method
        self.keeps_apart = True
        """Whether models of the class keep packed documents apart."""
        self.positions: Positions = all_tokens
        """Gives the positions of sequences that come without any."""

    def find_problem(self) -> str | None:
        """Say why it does not train as in one process. A collective over the group."""
        size = self._group.size()
        # A number that the ranks do not divide.
        num_tokens = 2 * size * max(1, _CHECKED_TOKENS // (2 * size)) - 1
        sharding, device = BatchSharding(token_ranks=size), device_of(self._group)
        return find_problem(
            self._make, self._distribute, sharding, device, num_tokens=num_tokens, inputs=(POSITIONS, MASK)
        )

    def _make(self) -> PreTrainedModel:
        small = small_model(self._model)
        base = self._model.config.get_text_config(decoder=True)._attn_implementation
        if base in (*_GATHERABLE, *BY_DOCUMENTS.values()):
            small.set_attn_implementation(base)
        self.keeps_apart = keeps_documents_apart(small) is not False
        self.positions = find_positions(small) or all_tokens
        return small

    def _distribute(self, small: PreTrainedModel) -> LayoutHooks:
        group, size, method = self._group, self._group.size(), self._method
        if method is ContextMethod.ulysses:
            # The small model has fewer heads.
            method = choose_method(small, size, ContextMethod.auto)
        context = ContextParallel(small, group, method, keeps_apart=self.keeps_apart, positions=self.positions)

        def reduce(loss: torch.Tensor) -> None:
            # A rank may not use parameters that others use.
            average_gradients(list(small.parameters()), group)
            dist.all_reduce(loss, group=group)
            loss.div_(size)

        return LayoutHooks(reduce=reduce, sharded=context.sharded)


def _refused(kind: str, found: str) -> ConfigError:
    return ConfigError(
        f"{kind} does not train alike where ranks share a sequence: not all that it needs of other tokens "
        "comes through attention, or its loss does not count targets",
        where="strategy.context",
        found=found,
        allowed="1 for this model",
        hint="strategy.context=1, with strategy=fsdp2 train.gradient_checkpointing=true to save memory",
    )
