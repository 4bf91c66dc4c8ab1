"""Draws random weights that depend only on a seed and the names of modules, and so are the same in any layout."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from hfdist.models.partitioning import WHOLE, Partitioning, is_on_other_stage

_HALF_PRECISION = (torch.bfloat16, torch.float16)
"""Types in which numbers are drawn as float32."""


@torch.no_grad()
def initialize_by_name(
    model: PreTrainedModel, seed: int, layout: Partitioning = WHOLE, *, only: Collection[str] | None = None
) -> None:
    """Give every parameter of a model the random value that the name of its module and a seed determine, in place.

    Modules whose parameters another rank of a pipeline holds are left out. Where the layout partitions parameters in
    the constructor, it is a collective.

    Args:
        model: the model; its tied parameters are tied already.
        seed: the seed of all values.
        layout: how the model is partitioned.
        only: names of the parameters that are drawn, while the others keep their values; None: all.
    """
    chosen = None if only is None else {id(model.get_parameter(name)) for name in only}
    visited: set[int] = set()
    for name, module, owner in _children_first("", model, model):
        parameters = list(module.parameters(recurse=False))
        # A tied head comes after its embedding and must not draw it again under another name: ZeRO-3 would not.
        tied = [parameter for parameter in parameters if id(parameter) in visited]
        new = [parameter for parameter in parameters if id(parameter) not in visited]
        visited.update(map(id, parameters))
        # A rule may also reach into direct children, as GPT-2's does for its residual projections.
        reached = new + [p for child in module.children() for p in child.parameters(recurse=False)]
        kept = [] if chosen is None else [parameter for parameter in reached if id(parameter) not in chosen]
        draws_nothing = (tied and not new) or (chosen is not None and len(kept) == len(reached))
        if draws_nothing or _is_elsewhere(module):
            continue
        with (
            layout.gathered(reached, writes=True),
            _drawing_anew([] if chosen is None else reached, [*kept, *tied]),
            _on_cpu_in_float32(reached),
            torch.random.fork_rng(devices=[]),
        ):
            # Values are drawn on the CPU. torch.manual_seed would also seed GPUs, and note the stack of this call for
            # each kind of GPU that is not in use yet.
            torch.default_generator.manual_seed(_key(seed, name))
            owner._init_weights(module)


def _is_elsewhere(module: nn.Module) -> bool:
    """Whether another rank of a pipeline holds all that a module's rule draws, if only in its children."""
    holders = [module] if module._parameters else [child for child in module.children() if child._parameters]
    return bool(holders) and all(map(is_on_other_stage, holders))


def _children_first(
    name: str, module: nn.Module, owner: PreTrainedModel
) -> Iterator[tuple[str, nn.Module, PreTrainedModel]]:
    """Give each module with its name and the model whose rule draws it, children before their parents.

    A rule is transformers' `_init_weights`: a PreTrainedModel inside of another has one of its own.
    """
    owner = module if isinstance(module, PreTrainedModel) else owner
    for child_name, child in module.named_children():
        yield from _children_first(f"{name}.{child_name}" if name else child_name, child, owner)
    yield name, module, owner


@contextmanager
def _drawing_anew(read: list[nn.Parameter], kept: list[nn.Parameter]) -> Iterator[None]:
    """Let a rule draw all parameters that it would draw for a new model, and give those in `kept` their values back.

    So each parameter gets the numbers that it would get in a new model.
    """
    values = [parameter.detach().clone() for parameter in kept]
    for parameter in read:
        # A private mark of parameters that were read from a file: transformers' rules leave these out.
        parameter._is_hf_initialized = False  # type: ignore[attr-defined]
    yield
    for parameter, value in zip(kept, values, strict=True):
        parameter.data.copy_(value)


@contextmanager
def _on_cpu_in_float32(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Hold parameters in float32 on the CPU while they are drawn, and copy them back.

    A GPU's generator draws other numbers, and so does torch 2.11 in bfloat16 on a CPU.
    """
    places = [(p, p.data) for p in parameters if p.device.type != "cpu" or p.dtype in _HALF_PRECISION]
    for parameter, data in places:
        parameter.data = data.to("cpu", torch.float32 if data.dtype in _HALF_PRECISION else data.dtype)
    yield
    for parameter, data in places:
        data.copy_(parameter.data)
        parameter.data = data


def _key(seed: int, name: str) -> int:
    """Give the seed of one module, from 0 to 2**63 - 1."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
