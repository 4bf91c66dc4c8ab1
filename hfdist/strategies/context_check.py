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
from hfdist.strategies.gradients.reduction import sum_gradients
from hfdist.strategies.self_check import MASK, POSITIONS, BatchSharding, LayoutHooks, find_problem

_GATHERABLE = ("sdpa", "eager")
"""Implementations of attention that take a mask of some rows."""

_CHECKED_TOKENS = 32
"""About as many tokens has a sequence of the trial."""


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
    keeps_apart, positions = _check_small(model, group, method)
    return ContextParallel(model, group, method, keeps_apart=keeps_apart, positions=positions)


def choose_method(model: PreTrainedModel, size: int, method: ContextMethod) -> ContextMethod:
    """Choose how attention sees a whole sequence; ConfigError: `method` does not fit the model. No collective."""
    config = model.config.get_text_config(decoder=True)
    uneven = {name: n for name, n in count_heads(config) if n % size}
    # Of a model that is split, too: all stages choose alike.
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


def _check_small(model: PreTrainedModel, group: dist.ProcessGroup, method: ContextMethod) -> tuple[bool, Positions]:
    """Compare a small model of the same class on the ranks of the group with itself in one process.

    Returns:
        Whether it keeps packed documents apart, and the positions that it makes by itself.
    """
    keeps_apart = True
    positions: Positions = all_tokens
    size = group.size()

    def make() -> PreTrainedModel:
        nonlocal keeps_apart, positions
        small = small_model(model)
        base = model.config.get_text_config(decoder=True)._attn_implementation
        if base in (*_GATHERABLE, *BY_DOCUMENTS.values()):
            small.set_attn_implementation(base)
        keeps_apart = keeps_documents_apart(small) is not False
        positions = find_positions(small) or all_tokens
        return small

    def distribute(small: PreTrainedModel) -> LayoutHooks:
        by_heads = method is ContextMethod.ulysses
        # It has fewer heads.
        own_method = choose_method(small, size, ContextMethod.auto) if by_heads else method
        context = ContextParallel(small, group, own_method, keeps_apart=keeps_apart, positions=positions)

        def reduce(loss: torch.Tensor) -> None:
            # A rank may not use parameters that others use.
            sum_gradients(small.parameters(), group)
            dist.all_reduce(loss, group=group)
            for tensor in (loss, *(p.grad for p in small.parameters())):
                if tensor is not None:
                    tensor.div_(size)

        return LayoutHooks(reduce=reduce, sharded=context.sharded)

    # A number that the ranks do not divide.
    num_tokens = 2 * size * max(1, _CHECKED_TOKENS // (2 * size)) - 1
    problem = find_problem(
        make,
        distribute,
        BatchSharding(token_ranks=size),
        device_of(group),
        num_tokens=num_tokens,
        inputs=(POSITIONS, MASK),
    )
    if problem is not None:
        raise _refused(type(model).__name__, problem)
    return keeps_apart, positions


def _refused(kind: str, found: str) -> ConfigError:
    return ConfigError(
        f"{kind} does not train alike where ranks share a sequence: not all that it needs of other tokens "
        "comes through attention, or its loss does not count targets",
        where="strategy.context",
        found=found,
        allowed="1 for this model",
        hint="strategy.context=1, with strategy=fsdp2 train.gradient_checkpointing=true to save memory",
    )
