"""Time a model's parts on the real device, for cutting it into stages of equal time.

The model's own forward runs once on the host with a stand-in for each block. The first block of each kind is copied
to the device there, with the very arguments that the model gives it, and timed; the others of its kind cost the same.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedModel

from hfdist.errors import ConfigError
from hfdist.pipeline.partitioning.partition import Costs
from hfdist.pipeline.preserve_state import preserve_state
from hfdist.pipeline.stage_forward import Place
from hfdist.pipeline.stage_module import Block, copy_structure

_REPEATS = 5


def costs_by_time(
    model: PreTrainedModel,
    blocks: Sequence[Block],
    tokens: torch.Tensor,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> Costs:
    """Seconds of forward and backward of one micro batch.

    Args:
        model: whole, on the host; its weights are not used, only their shapes.
        blocks: its blocks.
        tokens: one micro batch of token ids, shape [sequences, tokens].
        device: where the model will train.
        autocast: the arithmetic that it will train with.

    Raises:
        ConfigError: blocks that share states with others.
    """
    clock = _Clock(device, autocast)
    timer = _BlockTimer(clock, len(blocks))
    try:
        with torch.no_grad(), preserve_state(model):
            hidden = timer.run(copy_structure(model, blocks, timer.call), tokens)
    except Exception as error:
        raise ConfigError(
            "the model's blocks cannot be timed one by one: they need what other blocks have left",
            where="strategy.balance",
            found=f"measured, {type(error).__name__}: {error}",
            allowed="flops, parameters",
            hint="strategy.balance=flops",
        ) from error
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    ids = tokens.to(device)
    return Costs(
        blocks=tuple(timer.seconds),
        prologue=0.0 if embedding is None else clock.time(embedding, lambda: (ids,), _call),
        epilogue=0.0 if head is None else clock.time(head, lambda: (hidden.to(device), ids), _loss),
    )


class _Clock:
    def __init__(self, device: torch.device, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
        self.device = device
        self._autocast = autocast

    def time(self, module: nn.Module, prepare: Callable[[], Any], call: Callable[[nn.Module, Any], Any]) -> float:
        """Median seconds of forward and backward of a copy of `module` on the device, with weights of its shapes.

        Args:
            module: on the host.
            prepare: gives the inputs on the device, anew each time; not timed.
            call: calls the copy with them.
        """
        there = _on_device(module, self.device)
        seconds = []
        for _ in range(1 + _REPEATS):
            inputs = prepare()
            self._synchronize()
            start = time.perf_counter()
            with torch.enable_grad(), self._autocast():
                values = tree_leaves(call(there, inputs))
            outputs = [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]
            torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
            self._synchronize()
            seconds.append(time.perf_counter() - start)
        return median(seconds[1:])

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class _BlockTimer:
    def __init__(self, clock: _Clock, num_blocks: int) -> None:
        self.seconds = [0.0] * num_blocks
        self._clock = clock
        self._known: dict[str, tuple[float, Any]] = {}
        self._hidden = torch.empty(0)

    def run(self, model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
        """Give what the last block returned: hidden states of shape [sequences, tokens, hidden]."""
        model(input_ids=tokens)
        return self._hidden

    def call(self, place: Place, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        kind = _kind(block)
        if kind not in self._known:
            self._known[kind] = self._measure(block, args, kwargs)
        seconds, output = self._known[kind]
        self.seconds[place.block] += seconds
        self._hidden = next(leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))
        return output

    def _measure(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[float, Any]:
        output: Any = None

        def prepare() -> Any:
            # Blocks may write into what they are given, such as a cache.
            return tree_map_only(torch.Tensor, self._move, copy.deepcopy((args, kwargs)))

        def call(there: nn.Module, inputs: Any) -> Any:
            nonlocal output
            output = there(*inputs[0], **inputs[1])
            return output

        seconds = self._clock.time(block, prepare, call)
        return seconds, tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), output)

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(self._clock.device).requires_grad_(tensor.is_floating_point())


def _on_device(module: nn.Module, device: torch.device) -> nn.Module:
    """A copy with small random weights: those of a model that is not loaded yet may be anything."""
    memo: dict[int, Any] = {id(p): nn.Parameter(_random_like(p, device)) for p in module.parameters()}
    return copy.deepcopy(module, memo).to(device)


def _random_like(parameter: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.randn(parameter.shape, dtype=parameter.dtype, device=device) * 0.02


def _kind(block: nn.Module) -> str:
    """Equal for blocks that cost the same: same modules, same shapes, same plain settings."""
    settings = {name: value for name, value in vars(block).items() if isinstance(value, (str, bool))}
    shapes = [(name, tuple(parameter.shape)) for name, parameter in block.named_parameters()]
    return repr((type(block), sorted(settings.items()), shapes))


def _call(module: nn.Module, inputs: tuple[torch.Tensor]) -> Any:
    return module(*inputs)


def _loss(head: nn.Module, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    hidden, targets = inputs
    return nn.functional.cross_entropy(head(hidden).float().flatten(0, -2), targets.flatten())
