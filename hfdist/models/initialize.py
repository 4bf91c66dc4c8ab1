"""Random weights keyed by name, so that every layout of a model starts from the same ones.

Each module is initialized by its own Hugging Face model's rule, under a random state made from (seed, module name)
alone. What a process holds, and in which order it makes it, then changes nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

_HALF_PRECISION = (torch.bfloat16, torch.float16)


@torch.no_grad()
def initialize_by_name(model: PreTrainedModel, seed: int) -> None:
    """Give every parameter of `model` the random value that its name and `seed` determine, in place.

    Works on whole parameters and on ones that DeepSpeed ZeRO-3 has already cut (then all ranks must call it), and
    leaves out modules whose parameters another rank of a pipeline holds. Tied parameters must be tied.
    """
    initialized: set[int] = set()
    for name, module, owner in _children_first("", model, model):
        own = [parameter for parameter in module.parameters(recurse=False) if id(parameter) not in initialized]
        # A rule may also reach into direct children, as GPT-2's does for its residual projections.
        reachable = own + [p for child in module.children() for p in child.parameters(recurse=False)]
        # A tied head comes after its embedding and must not draw it again under another name.
        is_tied_alias = not own and next(module.parameters(recurse=False), None) is not None
        if is_tied_alias or _is_elsewhere(module):
            continue
        with _whole(reachable), _on_cpu_in_float32(reachable), torch.random.fork_rng():
            torch.manual_seed(_key(seed, name))
            owner._init_weights(module)
        initialized.update(id(parameter) for parameter in own)


def _is_elsewhere(module: nn.Module) -> bool:
    return len(module._parameters) > 0 and all(parameter is None for parameter in module._parameters.values())


def _children_first(
    name: str, module: nn.Module, owner: PreTrainedModel
) -> Iterator[tuple[str, nn.Module, PreTrainedModel]]:
    """Walk in the order in which transformers applies its rules: a nested PreTrainedModel has its own."""
    owner = module if isinstance(module, PreTrainedModel) else owner
    for child_name, child in module.named_children():
        yield from _children_first(f"{name}.{child_name}" if name else child_name, child, owner)
    yield name, module, owner


def _whole(parameters: list[nn.Parameter]) -> AbstractContextManager[object]:
    """Under ZeRO-3, put the cut parameters together for a moment; otherwise nothing."""
    if not parameters or not is_deepspeed_zero3_enabled():
        return nullcontext()
    import deepspeed

    # Every rank computes the same values; rank 0's are the ones that are cut again.
    return deepspeed.zero.GatheredParameters(parameters, modifier_rank=0)


@contextmanager
def _on_cpu_in_float32(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Draw so, and copy: ZeRO-3 makes parameters in bfloat16 and on the GPU, whose generator draws other numbers.

    So does torch 2.11 in bfloat16 on a CPU.
    """
    places = [(p, p.data) for p in parameters if p.device.type != "cpu" or p.dtype in _HALF_PRECISION]
    for parameter, data in places:
        parameter.data = data.to("cpu", torch.float32 if data.dtype in _HALF_PRECISION else data.dtype)
    yield
    for parameter, data in places:
        data.copy_(parameter.data)
        parameter.data = data


def _key(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
