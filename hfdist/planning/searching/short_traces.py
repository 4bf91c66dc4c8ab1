"""Measures the constants of a model by short traces on fake tensors: a block of each kind, and what is around them.

    1  around   prologue -> A -> (A) -> (A) -> B -> (B) -> epilogue     the model's own forward, then its backward.
                The first block of a kind runs, (A) stands for another one: it gives what the first gave
    2  blocks   A forward and backward, B forward and backward          for each mode of activation checkpointing

Both run for one sequence and for two. All else follows: bytes and operations grow with the sequences along a line, as
the length of a sequence is that of the run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

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
from hfdist.pipeline.costs import Costs, costs_by_flops, kind_of_block
from hfdist.pipeline.stage_forward import BlockPlace
from hfdist.pipeline.stage_module import Block, copy_structure
from hfdist.planning.costs import OpCosts
from hfdist.planning.searching.constants import MODES, Mode, ModelConstants, PartCosts, ShareOfParts
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
from hfdist.strategies.traffic import Phase, StepSizes
from hfdist.topology import Topology

_NUMBERS = (1, 2)
"""Numbers of sequences that are traced: two points give the line."""


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
        config: the run's config; its layout does not matter, its precision and sequence length do.
        architecture: the model's config, with the vocabulary of the tokenizer.
        is_gpu: whether ranks will have GPUs.
        tensor_degrees: numbers of tensor ranks for which the shares of the parameters are needed.
        as_asked: whether the degrees of `config` are needed, too.

    Raises:
        ConfigError: as the run itself would on one process; the model has no list of blocks; or it does not divide by
            the degrees of `config`, where these are needed.
    """
    length = config.data.sequence_length
    batch = plan_batch(global_batch_size=1, micro_batch_size=1, data_size=1, sequence_length=length, lanes=1)
    strategy = Strategy(Topology(), batch, StrategyConfig())
    # One mode for all steps: fake tensors of one mode cannot meet those of another.
    fake_tensors = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.random.fork_rng(devices=[]):
        with fake_tensors:
            model = make_fake_model(config, architecture, strategy).train()
            if as_asked:
                check_degrees(model, config.strategy)
                tensor_degrees = {*tensor_degrees, config.strategy.tensor}
            # Before it is quantized: packed weights have no rows and columns.
            whole = _measure_whole(model, config, tensor_degrees, is_gpu=is_gpu)
            quantize_fake(model, config)
        # Layouts are compared with micro batches of any size.
        loss_head = find_loss_head(config, model, strategy, "cuda" if is_gpu else "cpu", by_size=False)
        shares_tokens = class_keeps_documents_apart(model) is not False
        with fake_tensors:
            task = FakeTask(config, model, loss_head, teaching_without_teacher(config))
            measurement = _Measurement(config, model, task)
            parts = measurement.measure()
    dtype = next(model.parameters()).dtype
    weight_bytes = float(dtype.itemsize)
    return ModelConstants(
        **whole._asdict(),
        kinds=parts.kinds,
        kind_of_block=tuple(measurement.block_kinds),
        prologue=parts.prologue,
        epilogue=parts.epilogue,
        tied_parameters=_num_tied(model),
        sequence_length=length,
        boundary_bytes=measurement.boundary_bytes,
        weight_bytes=weight_bytes,
        gradient_bytes=weight_bytes,
        optimizer_bytes=weight_bytes * _values_per_weight(config.optimizer),
        half_bytes=None if measurement.half is None or dtype is measurement.half else 2.0,
        has_pipelines=_has_pipelines(model, config.task.name.traits.head),
        shares_tokens=shares_tokens,
    )


def _has_pipelines(model: PreTrainedModel, head: Head) -> bool:
    """Whether stages of a pipeline can train the model: not on texts in rows of their own that become embeddings."""
    return head is not Head.none or not takes_texts_apart(model, head)


class _WholeFigures(NamedTuple):
    """The constants that need whole weights, as `ModelConstants` names them."""

    shares: Mapping[tuple[int, int], ShareOfParts]
    balance: Costs
    flops_per_sequence: float
    sizes: Mapping[int, StepSizes]
    sequence_degrees: frozenset[int]


def _measure_whole(
    model: PreTrainedModel, config: RunConfig, tensor_degrees: Iterable[int], *, is_gpu: bool
) -> _WholeFigures:
    blocks = find_block_parts(model)
    one_of_each_kind = {kind_of_block(block): block for block in blocks}
    plans = find_tensor_plans(model, tensor_degrees)
    whole, teacher = stepped_whole(config.optimizer, model), measure_teacher(config)
    sizes: dict[int, StepSizes] = {}
    for tensor in (1, *plans):
        of_model = step_sizes(
            model,
            config.train,
            tensor=tensor,
            is_gpu=is_gpu,
            plan=plans.get(tensor),
            stepped_whole=whole,
            frozen=teacher,
        )
        sizes[tensor] = of_task(of_model, config, model)
    return _WholeFigures(
        shares=find_shares(model, list(one_of_each_kind.values()), tensor_plans=plans),
        balance=costs_by_flops(model, blocks, config.data.sequence_length),
        flops_per_sequence=sequence_flops(model, config),
        sizes=sizes,
        sequence_degrees=frozenset(find_tensor_plans(model, plans, splits_tokens=True)),
    )


def _values_per_weight(optimizer: OptimizerConfig) -> float:
    """Give how many numbers an optimizer keeps for each element of a weight."""
    if optimizer.name is OptimizerName.adamw and optimizer.plugin is None and not optimizer.arguments:
        # Known, so that none is made: that imports the Trainer, which takes seconds.
        return 2.0
    return values_per_weight(make_small(optimizer))


def _num_tied(model: PreTrainedModel) -> float:
    """Count the elements that the head shares with the embedding."""
    embedding = getattr(input_embeddings(model), "weight", None)
    head = getattr(model.get_output_embeddings(), "weight", None)
    if head is not embedding or not isinstance(head, torch.Tensor):
        return 0.0
    return float(head.numel())


@dataclass
class _Call:
    """A module of a block, and the arguments with which the model calls it."""

    module: nn.Module
    arguments: tuple[object, ...]
    named: dict[str, object]


class _Parts(NamedTuple):
    """The costs of all parts of a model."""

    kinds: tuple[PartCosts, ...]
    """Costs of one block of each kind."""
    prologue: PartCosts
    """Costs of what runs before the blocks."""
    epilogue: PartCosts
    """Costs of what runs after the blocks, the loss included."""


class _Backward(NamedTuple):
    """What was counted in one backward."""

    costs: OpCosts
    most_bytes: float
    """The most bytes of activations that were held in it."""


class _Measurement:
    """The short traces of one model, in a FakeTensorMode."""

    def __init__(self, config: RunConfig, model: PreTrainedModel, task: FakeTask) -> None:
        self.config, self._model, self.task = config, model, task
        self.blocks: list[Block] = find_block_parts(model)
        kinds = [kind_of_block(block) for block in self.blocks]
        distinct = list(dict.fromkeys(kinds))
        self.block_kinds = [distinct.index(kind) for kind in kinds]
        """Number of the kind of each block."""
        precision = config.train.precision
        self.half: torch.dtype | None = None
        """Half precision in which the run computes; None: it computes as its weights are."""
        if precision is Precision.fp16:
            self.half = torch.float16
        elif precision.is_bf16:
            self.half = torch.bfloat16
        self.boundary_bytes = 0.0
        """Bytes that one sequence hands from a block to the next."""
        self._width, self._item_bytes = 0, next(model.parameters()).itemsize
        self._trace = Trace()
        self._trace.hold((*model.parameters(), *model.buffers()), WEIGHTS)

    # ---- the blocks ----

    def measure(self) -> _Parts:
        """Measure each kind of block, and what is before and after the blocks."""
        around = {number: _AroundBlocks(self, number) for number in _NUMBERS}
        traces = {mode: self._trace_kinds(mode, around) for mode in MODES}
        kinds = []
        for kind, plain in enumerate(traces[None]):
            block = self.blocks[self.block_kinds.index(kind)]
            named = {name: p for part in block for name, p in part.named_parameters()}
            kinds.append(fit_part(self._item_bytes, named, plain, {mode: traces[mode][kind] for mode in MODES}))
        embedding, head = input_embeddings(self._model), self._model.get_output_embeddings()
        of_embedding = {} if embedding is None else dict(embedding.named_parameters())
        # The parameters of a tied head are those of the embedding.
        of_head = {} if head is None or _num_tied(self._model) else dict(head.named_parameters())
        prologue = {number: ends.prologue for number, ends in around.items()}
        epilogue = {number: ends.epilogue for number, ends in around.items()}
        # What is around the blocks is never computed again: it costs the same in each mode.
        after_blocks = fit_part(self._item_bytes, of_head, epilogue, dict.fromkeys(MODES, epilogue))
        return _Parts(
            kinds=tuple(kinds),
            prologue=fit_part(self._item_bytes, of_embedding, prologue, dict.fromkeys(MODES, prologue)),
            epilogue=with_chunks(after_blocks, head),
        )

    def _trace_kinds(self, mode: Mode, around: Mapping[int, _AroundBlocks]) -> list[dict[int, PartTrace]]:
        """Trace a block of each kind, in one mode of activation checkpointing; traces by the number of sequences."""
        if mode is not None:
            checkpoint_blocks(self._model, mode)
        return [
            {number: self._run(ends.calls[kind]) for number, ends in around.items()}
            for kind in range(1 + max(self.block_kinds))
        ]

    def _run(self, calls: list[_Call]) -> PartTrace:
        seen = PartTrace()
        for call in calls:
            with self._trace:
                seen += self._run_one(call)
        return seen

    def _run_one(self, call: _Call) -> PartTrace:
        trace, inputs = self._trace, (call.arguments, call.named)
        hidden = next(_floats(inputs))
        wide = _WideTensors(hidden.shape)
        # Gradients go to what comes from the block before, and from an encoder, and to nothing else.
        for tensor in _floats(inputs):
            if tensor.shape[-1] == self._width and tensor.dim() == hidden.dim():
                tensor.requires_grad_()
        base = self.begin()
        with self.autocast(), wide.hooks():
            output = next(_floats(call.module(*call.arguments, **call.named)))
        kept = trace.held.activations - base
        seen = PartTrace(forward=trace.costs(Phase.forward), kept=kept, whole=wide.total + output.nbytes)
        backward = self.backward(output)
        seen.backward = backward.costs
        seen.working = backward.most_bytes - base - kept
        for parameter in call.module.parameters():
            parameter.grad = None
        return seen

    # ---- what all runs share ----

    def begin(self) -> float:
        """Forget what was counted, and give the bytes of activations that are held."""
        self._trace.phase = Phase.forward
        self._trace.forget_peak()
        return self._trace.held.activations

    def backward(self, output: torch.Tensor) -> _Backward:
        """Run a backward from an output, of which each element has the gradient 1."""
        trace = self._trace
        trace.phase = Phase.backward
        if output.requires_grad:
            output.backward(torch.ones_like(output))
        return _Backward(trace.costs(Phase.backward), trace.peak_of(Phase.backward).activations)

    def autocast(self) -> AbstractContextManager[object]:
        """Give the context in which the run computes: autocast to half precision, or none."""
        return nullcontext() if self.half is None else torch.autocast("cpu", self.half)

    @property
    def trace(self) -> Trace:
        """The trace that counts all operations."""
        return self._trace

    def stand_ins(self, call: Callable[..., object]) -> PreTrainedModel:
        """Give the model with stand-ins for its blocks."""
        return copy_structure(self._model, self.blocks, call)

    def loss(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        """Compute the loss as it is configured."""
        return self.task.loss(model, batch, None)

    def set_width(self, hidden: torch.Tensor, number: int) -> None:
        """Note the width of hidden states of `number` sequences between two blocks, and the bytes of each sequence."""
        self._width, self.boundary_bytes = hidden.shape[-1], float(hidden.nbytes / number)


class _AroundBlocks:
    """One forward and backward of what is around the blocks, and the calls of the first block of each kind."""

    def __init__(self, measurement: _Measurement, number: int) -> None:
        self.calls: dict[int, list[_Call]] = defaultdict(list)
        """How the model calls the modules of a block, by the block's kind."""
        self.prologue, self.epilogue = PartTrace(), PartTrace()
        self._measurement, self._number = measurement, number
        self._last = BlockPlace(len(measurement.blocks) - 1, len(measurement.blocks[0]) - 1)
        self._outputs: dict[tuple[int, int], object] = {}
        """Outputs of the first block of each kind, by the kind and by the part of the block."""
        self._first: torch.Tensor | None = None
        """The hidden states that the first block takes."""
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
        backward = measurement.backward(loss)
        self.epilogue.backward = backward.costs
        self.epilogue.working = max(backward.most_bytes, highest) - self._base - kept
        del loss
        before = measurement.begin()
        assert self._first is not None
        backward = measurement.backward(self._first)
        self.prologue.backward = backward.costs
        self.prologue.working = max(0.0, backward.most_bytes - before)
        self._first = None

    def _call(self, place: BlockPlace, module: nn.Module, *args: object, **kwargs: object) -> object:
        measurement, kind = self._measurement, self._measurement.block_kinds[place.block]
        if place == BlockPlace(0, 0):
            self._first = next(_floats((args, kwargs)))
            measurement.set_width(self._first, self._number)
            trace = measurement.trace
            self.prologue = PartTrace(forward=trace.costs(Phase.forward), kept=trace.held.activations - self._base)
        if (kind, place.part) not in self._outputs:
            arguments, named = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
            self.calls[kind].append(_Call(module, arguments, named))
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
        # Hidden states are [sequences, tokens, width], or [sequences x tokens, width] within some modules.
        self._rows, self._width = (hidden[0], hidden[:-1].numel()), hidden[-1]
        self._storages: dict[int, int] = {}
        """Bytes of each storage, by its address."""

    def hooks(self) -> AbstractContextManager[object]:
        """Give the context in which the tensors that a forward saves are looked at."""
        return saved_tensors_hooks(self._see, lambda tensor: tensor)

    @property
    def total(self) -> float:
        """The bytes of all wide tensors; those that share memory count once."""
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
