"""The constants of a model, from short traces: a block of each kind, and what is around the blocks, on fake tensors.

The model's own forward runs once for one sequence and once for two, with a stand-in for each block: the first block of
each kind runs, the others give what it gave. Then each kind is traced by itself, forward and backward, with all that
activation checkpointing may compute again. All else follows: bytes and operations of a block grow with the sequences
along a line, as the length of a sequence is that of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

# Not public; with both, torch's own tests run models without memory.
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedConfig, PreTrainedModel

from hfdist.config.batch import plan_batch
from hfdist.config.optimizer import OptimizerConfig, OptimizerName
from hfdist.config.run import RunConfig
from hfdist.config.strategy import StrategyConfig
from hfdist.config.task import Head
from hfdist.config.train import Precision
from hfdist.models.blocks import find_block_parts
from hfdist.models.embeddings import input_embeddings
from hfdist.models.encoders import takes_texts_apart
from hfdist.models.probing import class_keeps_documents_apart
from hfdist.models.recompute import checkpoint_blocks
from hfdist.optim.registry import make_small, stepped_whole, values_per_weight
from hfdist.pipeline.costs import costs_by_flops, kind_of_block
from hfdist.pipeline.stage_forward import BlockPlace
from hfdist.pipeline.stage_module import Block, copy_structure
from hfdist.planning.costs import OpCosts
from hfdist.planning.searching.constants import MODES, Mode, ModelConstants, PartCosts
from hfdist.planning.searching.fit_parts import PartTrace, fit_part, with_chunks
from hfdist.planning.searching.shares import find_shares, find_tensor_plans
from hfdist.planning.timing.traffic import of_task, sequence_flops, step_sizes
from hfdist.planning.tracing.as_trainer import find_loss_head
from hfdist.planning.tracing.fake_model import make_fake_model, quantize_fake
from hfdist.planning.tracing.fake_task import FakeTask
from hfdist.planning.tracing.fake_teacher import measure_teacher, teaching_without_teacher
from hfdist.planning.tracing.trace import WEIGHTS, Trace
from hfdist.strategies.base import Strategy
from hfdist.strategies.engine import Batch
from hfdist.strategies.model_fit import check_degrees
from hfdist.strategies.traffic import Phase
from hfdist.topology import Topology

_NUMBERS = (1, 2)
"""Sequences that are traced."""


def measure_constants(
    config: RunConfig,
    architecture: PreTrainedConfig,
    *,
    is_gpu: bool = True,
    tensor_degrees: Iterable[int] = (),
    as_asked: bool = False,
) -> ModelConstants:
    """Trace what a model costs, part by part.

    Args:
        config: of the run; its layout does not matter, its precision and sequence length do.
        architecture: from `find_architecture`, with the vocabulary of the tokenizer.
        is_gpu: whether ranks will have GPUs.
        tensor_degrees: whose shares of the parameters are asked for.
        as_asked: the degrees of `config` are asked for, too.

    Raises:
        ConfigError: as the run itself would on one process, or a model without a list of blocks; or one that does not
            divide by the degrees of `config`, where these are asked for.
    """
    length = config.data.sequence_length
    batch = plan_batch(global_batch_size=1, micro_batch_size=1, data_size=1, sequence_length=length, lanes=1)
    strategy = Strategy(Topology(), batch, StrategyConfig())
    # One for all: tensors of one are strangers to another.
    fake_tensors = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.random.fork_rng(devices=[]):
        with fake_tensors:
            model = make_fake_model(config, architecture, strategy).train()
            if as_asked:
                check_degrees(model, config.strategy)
                tensor_degrees = {*tensor_degrees, config.strategy.tensor}
            with_whole = _of_whole(model, config, tensor_degrees, is_gpu=is_gpu)
            quantize_fake(model, config)
        # Layouts are compared with micro batches of any size.
        loss_head = find_loss_head(config, model, strategy, "cuda" if is_gpu else "cpu", by_size=False)
        shares_tokens = class_keeps_documents_apart(model) is not False
        head = config.task.name.traits.head
        with fake_tensors:
            task = FakeTask(config, model, loss_head, teaching_without_teacher(config))
            measurement = _Measurement(config, model, task)
            kinds, prologue, epilogue = measurement.measure()
    dtype = next(model.parameters()).dtype
    weight_bytes = float(dtype.itemsize)
    return with_whole(
        kinds=kinds,
        kind_of_block=tuple(measurement.kind_of_block),
        prologue=prologue,
        epilogue=epilogue,
        tied_parameters=_num_tied(model),
        sequence_length=length,
        boundary_bytes=measurement.boundary_bytes,
        weight_bytes=weight_bytes,
        gradient_bytes=weight_bytes,
        optimizer_bytes=weight_bytes * _values_per_weight(config.optimizer),
        half_bytes=None if measurement.half is None or dtype is measurement.half else 2.0,
        has_pipelines=not (head is Head.none and takes_texts_apart(model, head)),
        shares_tokens=shares_tokens,
    )


def _of_whole(
    model: PreTrainedModel, config: RunConfig, tensor_degrees: Iterable[int], *, is_gpu: bool
) -> Callable[..., ModelConstants]:
    """Find what needs whole weights: packed ones have no rows and columns. Gives what takes all else."""
    blocks, length = find_block_parts(model), config.data.sequence_length
    plans, whole = find_tensor_plans(model, tensor_degrees), stepped_whole(config.optimizer, model)
    size = partial(step_sizes, model, config.train, is_gpu=is_gpu, stepped_whole=whole, frozen=measure_teacher(config))
    of_degree = {tensor: size(tensor=tensor, plan=plans.get(tensor)) for tensor in (1, *plans)}
    return partial(
        ModelConstants,
        shares=find_shares(model, list({kind_of_block(block): block for block in blocks}.values()), tensor_plans=plans),
        balance=costs_by_flops(model, blocks, length),
        flops_per_sequence=sequence_flops(model, config),
        sizes={tensor: of_task(sizes, config, model) for tensor, sizes in of_degree.items()},
        sequence_degrees=frozenset(find_tensor_plans(model, plans, splits_tokens=True)),
    )


def _values_per_weight(optimizer: OptimizerConfig) -> float:
    """How many numbers it keeps for each element. To make it means to import the Trainer, which takes seconds."""
    is_plain = optimizer.name is OptimizerName.adamw and optimizer.plugin is None and not optimizer.arguments
    return 2.0 if is_plain else values_per_weight(make_small(optimizer))


def _num_tied(model: PreTrainedModel) -> float:
    """Count the elements that the head shares with the embedding."""
    embedding = getattr(input_embeddings(model), "weight", None)
    head = getattr(model.get_output_embeddings(), "weight", None)
    if head is not embedding or not isinstance(head, torch.Tensor):
        return 0.0
    return float(head.numel())


@dataclass
class _Call:
    """How the model calls a module of a block."""

    module: nn.Module
    inputs: tuple[tuple[object, ...], dict[str, object]]


class _Measurement:
    """The short traces of one model, in a FakeTensorMode."""

    def __init__(self, config: RunConfig, model: PreTrainedModel, task: FakeTask) -> None:
        self.config, self._model, self.task = config, model, task
        self.blocks: list[Block] = find_block_parts(model)
        kinds: dict[str, int] = {}
        self.kind_of_block = [kinds.setdefault(kind_of_block(block), len(kinds)) for block in self.blocks]
        precision = config.train.precision
        self.half = torch.float16 if precision is Precision.fp16 else torch.bfloat16 if precision.is_bf16 else None
        self.boundary_bytes = 0.0
        self._width, self._item_bytes = 0, next(model.parameters()).itemsize
        self._trace = Trace()
        self._trace.hold((*model.parameters(), *model.buffers()), WEIGHTS)

    # ---- the blocks ----

    def measure(self) -> tuple[tuple[PartCosts, ...], PartCosts, PartCosts]:
        """Measure each kind of block, and what is before and after the blocks."""
        around = {number: _Around(self, number) for number in _NUMBERS}
        traces: dict[Mode, list[dict[int, PartTrace]]] = {}
        for mode in MODES:
            if mode is not None:
                checkpoint_blocks(self._model, mode)
            kinds = range(1 + max(self.kind_of_block))
            traces[mode] = [
                {number: self._run(ends.calls[kind], number) for number, ends in around.items()} for kind in kinds
            ]
        parts = []
        for kind, plain in enumerate(traces[None]):
            block = self.blocks[self.kind_of_block.index(kind)]
            named = {name: p for part in block for name, p in part.named_parameters()}
            parts.append(fit_part(self._item_bytes, named, plain, {mode: traces[mode][kind] for mode in MODES}))
        embedding, head = input_embeddings(self._model), self._model.get_output_embeddings()
        of_embedding = {} if embedding is None else dict(embedding.named_parameters())
        of_head = {} if head is None or _num_tied(self._model) else dict(head.named_parameters())
        prologue = {number: ends.prologue for number, ends in around.items()}
        epilogue = {number: ends.epilogue for number, ends in around.items()}
        return (
            tuple(parts),
            fit_part(self._item_bytes, of_embedding, prologue, dict.fromkeys(MODES, prologue)),
            with_chunks(fit_part(self._item_bytes, of_head, epilogue, dict.fromkeys(MODES, epilogue)), head),
        )

    def _run(self, calls: list[_Call], number: int) -> PartTrace:
        seen = PartTrace()
        for call in calls:
            with self._trace:
                seen += self._run_one(call, number)
        return seen

    def _run_one(self, call: _Call, number: int) -> PartTrace:
        trace, inputs = self._trace, call.inputs
        hidden = next(_floats(inputs))
        wide = _WideTensors(hidden.shape)
        # Gradients go to what comes from the block before, and from an encoder, and to nothing else.
        for tensor in _floats(inputs):
            if tensor.shape[-1] == self._width and tensor.dim() == hidden.dim():
                tensor.requires_grad_()
        base = self.begin()
        with self.autocast(), wide.hooks():
            output = next(_floats(call.module(*inputs[0], **inputs[1])))
        kept = trace.held.activations - base
        seen = PartTrace(forward=trace.costs(Phase.forward), kept=kept, whole=wide.total + output.nbytes)
        seen.backward, peak = self.backward(output)
        seen.working = peak - base - kept
        for parameter in call.module.parameters():
            parameter.grad = None
        return seen

    # ---- what all runs share ----

    def begin(self) -> float:
        """Forget what was counted, and give the bytes of activations that are held."""
        self._trace.phase = Phase.forward
        self._trace.forget_peak()
        return self._trace.held.activations

    def backward(self, output: torch.Tensor) -> tuple[OpCosts, float]:
        """Run a backward; gives its costs, and the most bytes of activations in it."""
        trace = self._trace
        trace.phase = Phase.backward
        if output.requires_grad:
            output.backward(torch.ones_like(output))
        return trace.costs(Phase.backward), trace.peak_of(Phase.backward).activations

    def autocast(self) -> AbstractContextManager[object]:
        """Compute as the run does."""
        return nullcontext() if self.half is None else torch.autocast("cpu", self.half)

    @property
    def trace(self) -> Trace:
        """What counts all operations."""
        return self._trace

    def stand_ins(self, call: Callable[..., object]) -> PreTrainedModel:
        """Give the model with stand-ins for its blocks."""
        return copy_structure(self._model, self.blocks, call)

    def loss(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        """Compute the loss as it is configured."""
        return self.task.loss(model, batch, None)

    def set_width(self, hidden: torch.Tensor, number: int) -> None:
        """Note what one of `number` sequences has between two blocks."""
        self._width, self.boundary_bytes = hidden.shape[-1], float(hidden.nbytes / number)


class _Around:
    """One forward and backward of what is around the blocks, and the calls of blocks that it has seen."""

    def __init__(self, measurement: _Measurement, number: int) -> None:
        self.calls: dict[int, list[_Call]] = {}
        """How the model calls the modules of a block, by the block's kind."""
        self.prologue, self.epilogue = PartTrace(), PartTrace()
        self._measurement, self._number = measurement, number
        self._last = BlockPlace(len(measurement.blocks) - 1, len(measurement.blocks[0]) - 1)
        self._outputs: dict[tuple[int, int], object] = {}
        """What blocks gave, by kind and part."""
        self._first: torch.Tensor | None = None
        """What the first block takes."""
        self._base = 0.0
        """Bytes of activations that are held where the part begins that runs."""
        copied = measurement.stand_ins(self._call)
        with measurement.trace:
            self._run(copied, measurement.task.batch(number, is_alone=True))
        for parameter in copied.parameters():
            parameter.grad = None

    def _run(self, copied: PreTrainedModel, batch: Batch) -> None:
        measurement, trace = self._measurement, self._measurement.trace
        self._base = measurement.begin()
        with measurement.autocast():
            loss = measurement.loss(copied, batch)
        kept = trace.held.activations - self._base
        self.epilogue = PartTrace(forward=trace.costs(Phase.forward), kept=kept)
        highest = trace.peak_of(Phase.forward).activations
        self.epilogue.backward, peak = measurement.backward(loss)
        self.epilogue.working = max(peak, highest) - self._base - kept
        del loss
        before = measurement.begin()
        assert self._first is not None
        self.prologue.backward, peak = measurement.backward(self._first)
        self.prologue.working = max(0.0, peak - before)
        self._first = None

    def _call(self, place: BlockPlace, module: nn.Module, *args: object, **kwargs: object) -> object:
        measurement, kind = self._measurement, self._measurement.kind_of_block[place.block]
        if place == BlockPlace(0, 0):
            self._first = next(_floats((args, kwargs)))
            measurement.set_width(self._first, self._number)
            trace = measurement.trace
            self.prologue = PartTrace(forward=trace.costs(Phase.forward), kept=trace.held.activations - self._base)
        if (kind, place.part) not in self._outputs:
            inputs = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
            self.calls.setdefault(kind, []).append(_Call(module, inputs))
            with torch.no_grad():
                self._outputs[kind, place.part] = module(*args, **kwargs)
        output = self._outputs[kind, place.part]
        if place == self._last:
            output = tree_map_only(torch.Tensor, _leaf, output)
            self._base = measurement.begin()
        return output


class _WideTensors:
    """Saved tensors that are as wide as the hidden states, which tensor ranks have whole."""

    def __init__(self, hidden: torch.Size) -> None:
        self._rows, self._width = (hidden[0], hidden[:-1].numel()), hidden[-1]
        self._storages: dict[int, int] = {}

    def hooks(self) -> AbstractContextManager[object]:
        """Look at what a forward saves."""
        return saved_tensors_hooks(self._see, lambda tensor: tensor)

    @property
    def total(self) -> float:
        """Give the bytes of all."""
        return float(sum(self._storages.values()))

    def _see(self, tensor: torch.Tensor) -> torch.Tensor:
        is_wide = tensor.dim() in (2, 3) and tensor.shape[0] in self._rows and tensor.shape[-1] == self._width
        if is_wide and not isinstance(tensor, nn.Parameter):
            storage = tensor.untyped_storage()
            self._storages[storage._cdata] = storage.nbytes()
        return tensor


def _floats(values: object) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point())


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    detached = tensor.detach()
    return detached.requires_grad_() if tensor.is_floating_point() else detached
