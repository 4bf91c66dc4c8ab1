"""What each part of a model takes for one micro batch on the real device: seconds, and bytes until its backward.

The model's own forward runs once on the host with a stand-in for each block. The first block of each kind is copied to
the device there, with the very arguments that the model gives it, and timed; others of its kind take the same.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from statistics import fmean, median
from typing import NamedTuple, TypeVar

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedModel

from hfdist.collectives import on_all_ranks
from hfdist.config.train import Precision
from hfdist.errors import ConfigError, named_line
from hfdist.models.embeddings import input_embeddings
from hfdist.pipeline.costs import costs_by_parameters, kind_of_block, num_image_parameters
from hfdist.pipeline.split_backward import backward_inputs
from hfdist.pipeline.stage_forward import BlockPlace
from hfdist.pipeline.stage_module import Block, copy_structure, preserve_state

logger = logging.getLogger(__name__)

_REPEATS = 5
"""Times that each part is timed, after one that is not counted."""
_GRAIN = 100
"""Parts of the mean time of a block to which times are rounded: less is noise, which must not decide."""

Inputs = TypeVar("Inputs")
"""What a part is called with."""


class PartTime(NamedTuple):
    """What a part of a model takes for one micro batch."""

    forward: float = 0.0
    backward: float = 0.0
    input_half: float = 0.0
    """Seconds of the half of a backward that gives the gradients of inputs; 0 with the next where not asked for."""
    weight_half: float = 0.0
    kept_bytes: float = 0.0
    """Bytes that a forward keeps for the backward, without parameters."""

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward."""
        return self.forward + self.backward


class BlockTimes(NamedTuple):
    """What the parts of a model take."""

    blocks: tuple[PartTime, ...]
    prologue: PartTime
    """The embedding, and what reads images in a run whose rows have some."""
    epilogue: PartTime
    """The head and the loss."""

    def of_blocks(self, run: range) -> PartTime:
        """Give what a stage of these blocks takes, with what comes before the first and after the last block."""
        ends = [self.prologue] * (run.start == 0) + [self.epilogue] * (run.stop == len(self.blocks))
        return _total([*self.blocks[run.start : run.stop], *ends])


def time_blocks(
    model: PreTrainedModel,
    blocks: Sequence[Block],
    tokens: torch.Tensor,
    device: torch.device,
    autocast_type: torch.dtype | None,
    *,
    halves: bool = False,
) -> BlockTimes:
    """Time the parts of a model.

    Args:
        model: whole, on the host; only the shapes of its weights are used.
        blocks: its blocks.
        tokens: one micro batch of token ids, shape [sequences, tokens].
        device: where the model will train.
        autocast_type: type of autocast, if any.
        halves: whether the halves of backwards are timed, too.

    Raises:
        ConfigError: blocks that share states with others.
    """
    timer = _Timer(device, autocast_type, len(blocks), halves=halves)
    try:
        with torch.no_grad(), preserve_state(model):
            copy_structure(model, blocks, timer.call)(input_ids=tokens)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise ConfigError(
            "the model's blocks cannot be timed one by one: they need what other blocks have left",
            where="strategy.schedule" if halves else "strategy.balance",
            found=f"{'auto' if halves else 'measured'}, {named_line(error)}",
            allowed="any other" if halves else "flops, parameters",
            hint="strategy.schedule=1f1b" if halves else "strategy.balance=flops",
        ) from error
    embedding, head = input_embeddings(model), model.get_output_embeddings()
    ids, hidden = tokens.to(device), timer.hidden.to(device).requires_grad_()

    def loss(copied: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(copied(inputs).float().flatten(0, -2), ids.flatten())

    # Weights of their copies are drawn, too.
    with preserve_state(model):
        prologue = (
            PartTime() if embedding is None else timer.time(embedding, lambda: None, lambda copied, _: copied(ids))
        )
        epilogue = PartTime() if head is None else timer.time(head, lambda: hidden, loss)
    # There are no images yet: what reads them counts as blocks with as many parameters.
    share = num_image_parameters(model) / sum(costs_by_parameters(model, blocks).blocks)
    of_images = PartTime(*(share * leg for leg in _total(timer.times)))
    return BlockTimes(tuple(timer.times), _total([prologue, of_images]), epilogue)


def time_blocks_of_run(
    model: PreTrainedModel,
    blocks: Sequence[Block],
    shape: tuple[int, int],
    precision: Precision,
    *,
    halves: bool = False,
) -> BlockTimes:
    """Give the means over all ranks of `time_blocks`, so that all ranks decide alike. A collective.

    `shape`: sequences and tokens of a micro batch.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    autocast_type = {Precision.bf16: torch.bfloat16, Precision.fp16: torch.float16}.get(precision)

    def measure() -> list[PartTime]:
        tokens = torch.zeros(shape, dtype=torch.int64)
        own = time_blocks(model, blocks, tokens, device, autocast_type, halves=halves)
        logger.info(
            "measured: blocks %s s, embedding %.3g s, head and loss %.3g s",
            tuple(part.seconds for part in own.blocks),
            own.prologue.seconds,
            own.epilogue.seconds,
        )
        return [*own.blocks, own.prologue, own.epilogue]

    # One rank alone may be out of memory.
    every = on_all_ranks(measure)
    means = [PartTime(*map(fmean, zip(*of_part, strict=True))) for of_part in zip(*every, strict=True)]
    grain = fmean(part.seconds for part in means[: len(blocks)]) / _GRAIN
    means = [PartTime(*[*(round(leg / grain) * grain for leg in part[:-1]), part.kept_bytes]) for part in means]
    *of_blocks, prologue, epilogue = means
    return BlockTimes(tuple(of_blocks), prologue, epilogue)


class _Timer:
    """Times modules of a model by copies of them on the device."""

    def __init__(
        self, device: torch.device, autocast_type: torch.dtype | None, num_blocks: int, *, halves: bool
    ) -> None:
        self.times = [PartTime()] * num_blocks
        self.hidden = torch.empty(0)
        """Output of the last block, shape [sequences, tokens, hidden]."""
        self._device = device
        self._autocast_type = autocast_type
        self._halves = halves
        self._known: dict[str, tuple[PartTime, object]] = {}

    def call(self, place: BlockPlace, block: nn.Module, *args: object, **kwargs: object) -> object:
        """Stand in for a block: time it, or take the time and the output of another one of its kind."""
        kind = kind_of_block((block,))
        if kind not in self._known:
            self._known[kind] = self._measure(block, args, kwargs)
        of_part, output = self._known[kind]
        self.times[place.block] = _total([self.times[place.block], of_part])
        self.hidden = next(leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))
        return output

    def time(
        self, module: nn.Module, prepare: Callable[[], Inputs], call: Callable[[nn.Module, Inputs], object]
    ) -> PartTime:
        """Give the medians of a copy of `module` on the device.

        Args:
            module: on the host.
            prepare: gives the inputs on the device, anew each time; not timed.
            call: calls the copy with them.
        """
        # Small random weights: those of a model that is not loaded yet may be anything.
        memo: dict[int, object] = {id(p): nn.Parameter(self._random_like(p)) for p in module.parameters()}
        copied = copy.deepcopy(module, memo).to(self._device)
        of_copy, kept = partial(call, copied), _KeptBytes(copied)
        # The first passes are not timed. Bytes are those of one pass: memory of one that is over is given out again.
        with kept if self._halves else nullcontext():
            self._time_whole(of_copy, prepare())
        if self._halves:
            self._time_halves(of_copy, prepare())
        whole, halves = [], []
        for _ in range(_REPEATS):
            whole.append(self._time_whole(of_copy, prepare()))
            if self._halves:
                halves.append(self._time_halves(of_copy, prepare()))
        forward, backward = map(median, zip(*whole, strict=True))
        input_half, weight_half = map(median, zip(*halves, strict=True)) if halves else (0.0, 0.0)
        return PartTime(forward, backward, input_half, weight_half, kept.num_bytes)

    def _time_whole(self, call: Callable[[Inputs], object], inputs: Inputs) -> tuple[float, float]:
        """Give the seconds of a forward and of its backward."""
        start = self._now()
        outputs, gradients = self._run_forward(call, inputs)
        middle = self._now()
        torch.autograd.backward(outputs, gradients)
        return middle - start, self._now() - middle

    def _time_halves(self, call: Callable[[Inputs], object], inputs: Inputs) -> tuple[float, float]:
        """Give the seconds of the two halves of a backward: gradients of inputs, then those of weights."""
        outputs, gradients = self._run_forward(call, inputs)
        leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        start = self._now()
        backward_weights = backward_inputs(outputs, gradients, leaves)
        middle = self._now()
        backward_weights()
        return middle - start, self._now() - middle

    def _run_forward(
        self, call: Callable[[Inputs], object], inputs: Inputs
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Give the outputs that have a gradient, and a gradient of ones for each."""
        with (
            torch.enable_grad(),
            torch.autocast(self._device.type, self._autocast_type, enabled=self._autocast_type is not None),
        ):
            values = tree_leaves(call(inputs))
        outputs = [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]
        return outputs, [torch.ones_like(output) for output in outputs]

    def _measure(
        self, block: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> tuple[PartTime, object]:
        """Give the time of a module of a block, and its output on the host."""
        output: object = None

        def prepare() -> tuple[tuple[object, ...], Mapping[str, object]]:
            # Blocks may write into what they are given, such as a cache.
            moved: tuple[tuple[object, ...], Mapping[str, object]] = tree_map_only(
                torch.Tensor, self._move, copy.deepcopy((args, kwargs))
            )
            return moved

        def call(copied: nn.Module, inputs: tuple[tuple[object, ...], Mapping[str, object]]) -> object:
            nonlocal output
            output = copied(*inputs[0], **inputs[1])
            return output

        seconds = self.time(block, prepare, call)
        return seconds, tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), output)

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(self._device).requires_grad_(tensor.is_floating_point())

    def _random_like(self, parameter: torch.Tensor) -> torch.Tensor:
        return torch.randn(parameter.shape, dtype=parameter.dtype, device=self._device) * 0.02

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


class _KeptBytes(saved_tensors_hooks):
    """Counts what forwards keep for their backwards, in memory that is not a parameter's."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(self._count, lambda kept: kept)
        self.num_bytes = 0
        self._counted = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}

    def _count(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._counted:
            self._counted.add(storage.data_ptr())
            self.num_bytes += storage.nbytes()
        return tensor.detach()


def _total(parts: Sequence[PartTime]) -> PartTime:
    return PartTime(*map(sum, zip(*parts, strict=True)))
