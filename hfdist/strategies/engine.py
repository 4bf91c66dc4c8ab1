"""The engine: all that the trainer may ask of a distributed model.

The class `Engine` itself runs the layout in which each rank holds the whole model: one process, or data parallel with
averaged gradients. The engines of other layouts derive from it.

    trainer                          engine
    setup                     ->     takes the model and the optimizer as accelerate prepared them
    forward_backward          ->     begin; then loss and backward of the trainer, on this rank's part of a batch
    clip_grad_norm            ->     gradients summed over ranks where the engine does it; their norm; clipping
    pieces, after_load        ->     what a checkpoint reads and writes
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from hfdist.checkpoint.piece import WEIGHT, Piece
from hfdist.models.flops import ModelSize, measure_size
from hfdist.models.packed_weights import packed_shapes
from hfdist.optim.joined import Group
from hfdist.optim.probe import Reach, groups_of_wholes
from hfdist.pipeline.timeline import Recorder
from hfdist.strategies.gradients.reduction import total_norm
from hfdist.strategies.held import state_tensors, storage_bytes
from hfdist.strategies.optimizer_state import StateReader
from hfdist.strategies.parameter_shards import EXPERT, TENSOR
from hfdist.strategies.parts import ModelParts
from hfdist.strategies.pieces import list_pieces
from hfdist.strategies.whole import ShardedParameter, WholeSteps, gather_regions

if TYPE_CHECKING:
    from accelerate.optimizer import AcceleratedOptimizer

    from hfdist.strategies.context import ContextParallel
    from hfdist.strategies.gradients.compression import GradientCompressor

_is_training = attrgetter("training")
Batch = dict[str, torch.Tensor]
"""Tensors by name; the first dimension of each is the sequences."""
Function = Callable[[nn.Module, Batch], object]
"""(model, part of a batch) -> any value that is made from the model's outputs."""
Value = TypeVar("Value")
"""The type of a value that a `Function` makes."""


class Forward(Protocol):
    """A function that runs forwards without gradients, as `Engine.forward` does with the trainer's hooks."""

    def __call__(
        self, batch: Batch, function: Callable[[nn.Module, Batch], Value], *, as_whole: bool = False
    ) -> list[Value]:
        """Give the function's value for each part of the batch; an empty list on ranks without logits."""


@dataclass(frozen=True, kw_only=True)
class TrainerHooks:
    """The parts of a step that the Hugging Face Trainer does itself, which an engine calls."""

    model: nn.Module
    """The model as accelerate prepared it."""
    loss: Callable[..., torch.Tensor]
    """(model, batch, num_items) -> the micro batch's share of the step's loss, times the number of processes: the
    backward's gradients are averaged over them."""
    backward: Callable[[torch.Tensor], object] = torch.Tensor.backward
    """Scales a loss that `loss` gave, and runs its backward; a pipeline does both by itself."""
    router_loss: Callable[[], torch.Tensor | None] = lambda: None
    """Gives what routers add to the loss of the last forward; None: nothing, or `loss` has added it already."""


class Engine:
    """A distributed model, as the trainer uses it. An engine never sees the trainer.

    Args:
        model: the whole model, or this rank's part of it.
        context: which part of each sequence this rank computes; None: all of it.
        parts: which part of each parameter this rank holds, before FSDP2 shards it; None: all of it.
        make_compressor: makes, for a model, what compresses DDP's gradients; None: gradients travel as they are.
    """

    model: nn.Module
    """The module that the Trainer gets: the whole model, or this rank's part of it, with the model's own names."""

    reduces_gradients = False
    """Whether the engine itself adds up gradients over ranks, so that accelerate must not wrap the model in DDP."""

    runs_whole_model = True
    """Whether calling `model` gives the logits of whole sequences on this rank (perhaps with the other ranks)."""

    loss_group: dist.ProcessGroup | None = None
    """The ranks that compute losses at the same time as this one, if this one computes losses; None: all ranks."""

    optimizer_sees: Reach = Reach.model
    """What the optimizer of this rank sees as a whole: the model, or each parameter alone."""

    steps_other_tensors = False
    """Whether the optimizer steps other tensors than the parameters that the user's model had."""

    clips_stepped = False
    """Whether the norm that gradients are clipped by counts only what the optimizer steps, and not all parameters."""

    axes_of_parts: tuple[str, ...] = (EXPERT, TENSOR)
    """Axes of the mesh over which ranks hold different parts of a parameter, or each the whole of it."""

    schedule_trace: Recorder | None = None
    """The measured times of a step, in layouts with a pipeline schedule, where `setup` makes it; None elsewhere."""

    def __init__(
        self,
        model: nn.Module,
        context: ContextParallel | None = None,
        parts: ModelParts | None = None,
        make_compressor: Callable[[nn.Module], GradientCompressor] | None = None,
    ) -> None:
        self.model = model
        self._optimizer: AcceleratedOptimizer | None = None
        """The optimizer as accelerate wrapped it; None before `setup`, and where DeepSpeed has it."""
        self._scaler: torch.amp.GradScaler | None = None
        """The loss scaler; None: losses are not scaled."""
        self._prepared: nn.Module | None = None
        """The model as accelerate wrapped it; None before `setup`."""
        self._modules: list[nn.Module] = []
        """Modules of the prepared model, from `setup` on: walking through it takes a fiftieth of a small step."""
        self._parameters: list[nn.Parameter] = []
        """Parameters of the prepared model, from `setup` on."""
        self._trained: list[torch.Tensor] = []
        """Parameters that the optimizer stepped when `_parameters` was made."""
        self._make_compressor = make_compressor
        self.compressor: GradientCompressor | None = None
        """What compresses DDP's gradients; None before `setup`, and where they travel as they are."""
        self._compressed: nn.Module | None = None
        """The model whose gradients `compressor` compresses, as accelerate wrapped it."""
        self._whole_steps: WholeSteps | None = None
        """The steps of parameters that the optimizer must see whole; None: it steps what this rank holds."""
        self.context = context
        self.runs_whole_model = self.runs_whole_model and context is None
        self._parts = parts
        if parts is not None:
            self.reduces_gradients, self.steps_other_tensors = True, True
            self.optimizer_sees = min(self.optimizer_sees, Reach.parameter)
            if parts.groups.tensor is not None:
                self.loss_group = parts.groups.tokens

    @property
    def description(self) -> str:
        """One line for people: what computes attention, and how ranks share parameters."""
        attention = getattr(getattr(self.model, "config", None), "_attn_implementation", None)
        if self.context is not None:
            attention = self.context.description
        described = f"attention {attention}"
        if self._parts is not None:
            described += f"; {self._parts.description}"
        return described

    @property
    def size(self) -> ModelSize:
        """Size of the whole model, counted anew: adapters may have been added."""
        packed = packed_shapes(self.model)

        def whole_numel(parameter: torch.Tensor) -> int:
            return math.prod(packed.get(parameter) or self.whole_shape(parameter))

        return measure_size(cast(PreTrainedModel, self.model), whole_numel)

    def setup(
        self, prepared: nn.Module, optimizer: AcceleratedOptimizer, scaler: torch.amp.GradScaler | None
    ) -> AcceleratedOptimizer:
        """Take the model (DDP, a DeepSpeed engine), the optimizer and the loss scaler as accelerate prepared them.

        Returns:
            The optimizer that the Trainer steps.
        """
        self._keep_optimizer(optimizer, scaler)
        self._prepared = prepared
        self._list_parameters()
        self._compress(prepared, scaler)
        return optimizer

    def _compress(self, prepared: nn.Module, scaler: torch.amp.GradScaler | None) -> None:
        """Have the gradients of the prepared model compressed, in layouts that do so."""
        # Hooks are registered once, also where several trainings share the model.
        if self._make_compressor is not None and prepared is not self._compressed:
            self._compressed, self.compressor = prepared, self._make_compressor(self.model)
            # In a plan there is no DDP.
            if isinstance(prepared, DistributedDataParallel):
                self.compressor.register(prepared)
        if self.compressor is not None:
            self.compressor.scaler = scaler

    def _list_parameters(self) -> None:
        """Set the lists of modules, of parameters, and of what the optimizer steps; after `setup` has begun."""
        assert self._prepared is not None
        self._modules, self._parameters = list(self._prepared.modules()), list(self._prepared.parameters())
        self._trained = self._list_trained()

    def _list_trained(self) -> list[torch.Tensor]:
        """List the parameters that the optimizer steps."""
        groups = [] if self._optimizer is None else self._optimizer.optimizer.param_groups
        return [parameter for group in groups for parameter in group["params"]]

    def _keep_optimizer(self, optimizer: AcceleratedOptimizer, scaler: torch.amp.GradScaler | None) -> None:
        """Keep the optimizer and the loss scaler, and let it step whole parameters where it must see them whole."""
        before = self._optimizer
        self._optimizer, self._scaler = optimizer, scaler
        if before is not None and before.optimizer is optimizer.optimizer:
            # An earlier training of this model has registered the hooks of `WholeSteps`.
            return
        shared = list(self._shared(optimizer.optimizer))
        self._whole_steps = WholeSteps(optimizer.optimizer, gather_regions(shared)) if shared else None

    def _groups_of_wholes(self, optimizer: torch.optim.Optimizer) -> list[Group]:
        """Give the optimizer's groups with the parameters alone that it must see whole."""
        return groups_of_wholes(optimizer, (group for group in optimizer.param_groups if group["params"]))

    def _shared(self, optimizer: torch.optim.Optimizer) -> Iterator[ShardedParameter]:
        """List the parameters of which ranks have parts, and which the optimizer must see whole."""
        holders = {name: self._holders(name) for name, _ in self.model.named_parameters()}
        if not any(holders.values()):
            # Asking an optimizer takes time.
            return
        options = {id(held): group for group in self._groups_of_wholes(optimizer) for held in group["params"]}
        for name, parameter in self.model.named_parameters():
            ranks = holders[name]
            if ranks is not None and id(parameter) in options:
                yield ShardedParameter(
                    name=name,
                    held=parameter,
                    options=options[id(parameter)],
                    shape=self.whole_shape(parameter),
                    group=ranks,
                    own_pieces=partial(self._weight_pieces, name),
                )

    def _holders(self, name: str) -> dist.ProcessGroup | None:
        """Give the ranks that together have a parameter, each element once; None: this rank has it whole."""
        return None if self._parts is None else self._parts.groups.of(self._parts.axis(name))

    def _weight_pieces(self, name: str, tensor: torch.Tensor) -> list[Piece]:
        """Give the pieces of a whole parameter that this rank has, as views of `tensor`, which is like its part."""
        piece = Piece(name=name, key=WEIGHT, shape=tuple(tensor.shape), start=0, view=tensor.detach())
        return [own for own in self._own_pieces(piece) if own.view.numel() > 0]

    def forward_backward(self, batch: Batch, num_items: torch.Tensor | None, hooks: TrainerHooks) -> torch.Tensor:
        """Run forward and backward on one micro batch (a pipeline: on all of a step) and return its detached loss.

        The returned losses, averaged over all processes, give the loss of the global batch.

        Args:
            batch: tensors of shape [sequences, tokens].
            num_items: the number of target tokens in the whole global batch; None: the loss counts its own.
            hooks: the Trainer's model, loss and backward.

        Raises:
            DataError: ranks that compute one loss together were given different batches.
        """
        self.begin(batch)
        # A callback may have put a part of the model into evaluation mode.
        if not (self._modules and all(map(_is_training, self._modules))):
            hooks.model.train()
        with self._sharded(batch) as own:
            loss = hooks.loss(hooks.model, own, num_items)
            hooks.backward(loss)
            return loss.detach()

    def begin(self, batch: Batch) -> None:
        """Let ranks that compute one loss together draw the same random numbers. A collective.

        DataError: these ranks have different batches.
        """
        if self._parts is not None:
            self._parts.begin(batch)

    def run_forwards(
        self, batch: Batch, function: Callable[[nn.Module, Batch], torch.Tensor], hooks: TrainerHooks
    ) -> None:
        """Run the forwards of `forward_backward` alone, in the same order, without gradients. `begin` comes before.

        Args:
            batch: tensors of shape [sequences, tokens], one micro batch or, in a pipeline, all of a step.
            function: (model, part of the batch) -> any value; a pipeline ends it early on all stages but the last.
            hooks: the Trainer's model.
        """
        hooks.model.train()
        with torch.no_grad(), self._sharded(batch) as own:
            function(hooks.model, own)

    def _sharded(self, batch: Batch) -> AbstractContextManager[Batch]:
        """Give a context with this rank's part of the sequences that its model replica reads."""
        return nullcontext(batch) if self.context is None else self.context.sharded(batch)

    def accumulating(self) -> AbstractContextManager[object]:
        """Give a context for each micro batch of a step but the last, where the engine itself reduces gradients."""
        return nullcontext()

    def forward(
        self,
        batch: Batch,
        function: Callable[[nn.Module, Batch], Value],
        hooks: TrainerHooks,
        *,
        as_whole: bool = False,
    ) -> list[Value]:
        """Run forwards without gradients. Call it on all ranks of a model replica, under ZeRO-3 on all ranks.

        Args:
            batch: tensors of shape [sequences, ...].
            function: makes a value of the model's outputs for a part of the batch.
            hooks: the Trainer's model.
            as_whole: whether the function is called once on each rank, with a model that has all blocks, so that it may
                keep a cache. Where a pipeline has no such model, no rank calls the function.

        Returns:
            On the one rank of each model replica that has logits, the values of `function` for each part, in order; on
            the other ranks an empty list. A part may end with copies of the batch's first row, without targets. Where
            ranks share sequences, each one gives the value of its part if the batch has labels, and of the whole batch
            if it has none.
        """
        with torch.no_grad(), self._sharded(batch) as own:
            values = [function(hooks.model, own)]
        return values if self._has_values else []

    def gathered(self) -> AbstractContextManager[object]:
        """Give a context in which sharded weights are whole, for many forwards without gradients. A collective.

        This takes memory for all weights on each rank; in a pipeline, for the weights of its stages. Where a GPU has
        less than twice as much free, weights stay sharded on all ranks, and each forward gathers them.
        """
        return nullcontext()

    @property
    def _has_values(self) -> bool:
        """Whether this rank gives the values that several ranks have computed alike; one of them does."""
        return self._parts is None or self._parts.is_first

    def clip_grad_norm(self, max_norm: float) -> object:
        """Clip gradients by their norm over all parameters of the whole model, and return the norm before.

        Where ranks have parts of parameters, gradients are summed over ranks before. With `max_norm` 0 nothing is
        clipped.
        """
        if self._parts is not None:
            self._average_gradients(self._parts)
            self._parts.reduce_gradients(self.model)
        return self._clip(max_norm)

    def _average_gradients(self, parts: ModelParts) -> None:
        """Average gradients over the ranks that hold the same parts."""
        parts.average_gradients(self.model)

    def _norm_groups(self) -> list[dist.ProcessGroup]:
        """Give the groups whose ranks hold different parts of the model, over which the norm is summed."""
        if self._parts is None:
            return []
        groups = [self._parts.groups.of(axis) for axis in self.axes_of_parts]
        return [group for group in groups if group is not None]

    def _counts(self, name: str) -> bool:
        """Whether this rank counts a parameter in the norm; of the ranks with the same part, one does."""
        return self._parts is None or self._parts.counts(name, self.axes_of_parts)

    def _clip(self, max_norm: float) -> torch.Tensor:
        """Undo the loss scale, clip gradients that are summed over ranks already, and return the norm before."""
        if self._scaler is not None and self._optimizer is not None:
            self._scaler.unscale_(self._optimizer.optimizer)
        groups = self._norm_groups()
        if groups:
            return self._clip_parts(groups, max_norm)
        if list(map(id, self._list_trained())) != list(map(id, self._trained)):
            # A callback has given the optimizer other parameters.
            self._list_parameters()
        return torch.nn.utils.clip_grad_norm_(self._parameters, max_norm or math.inf)

    def _clip_parts(self, groups: list[dist.ProcessGroup], max_norm: float) -> torch.Tensor:
        """Clip the gradients of this rank's parts by the norm over the ranks of all groups. A collective."""
        parameters = dict(self.model.named_parameters())
        counted = (parameter for name, parameter in parameters.items() if self._counts(name))
        device = next(iter(parameters.values())).device
        norm = total_norm(counted, groups, device)
        if max_norm > 0:
            by_mesh: dict[DeviceMesh | None, list[nn.Parameter]] = defaultdict(list)
            for parameter in parameters.values():
                # torch scales no gradients of several meshes together.
                by_mesh[getattr(parameter, "device_mesh", None)].append(parameter)
            for of_mesh in by_mesh.values():
                torch.nn.utils.clip_grads_with_norm_(of_mesh, max_norm, norm)
        return norm

    def whole_shape(self, parameter: torch.Tensor) -> tuple[int, ...]:
        """Give the shape that a parameter of `model` has in the whole model."""
        shape = tuple(parameter.shape)
        return shape if self._parts is None else self._parts.whole_shape(self.model, parameter, shape)

    @contextmanager
    def showing_whole_shapes(self) -> Iterator[None]:
        """Give a context in which parameters have their shape in the whole model, and no memory for values."""
        hidden: list[tuple[nn.Parameter, torch.Tensor]] = []
        try:
            for parameter in self.model.parameters():
                shape = self.whole_shape(parameter)
                if shape != tuple(parameter.shape):
                    hidden.append((parameter, parameter.data))
                    parameter.data = parameter.new_empty(1).expand(shape)
            yield
        finally:
            for parameter, data in hidden:
                parameter.data = data

    def whole_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """List the parameters that this rank holds whole between steps, by name; other ranks may hold them too.

        A part of a divided parameter counts as whole. Its name tells the part, so that ranks with the same part have
        the same name for it.
        """
        held = self._held_parameters()
        return held if self._parts is None else [(self._parts.name_part(name), tensor) for name, tensor in held]

    def _held_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """List the parameters of this rank's model that FSDP2 or ZeRO has not sharded."""
        return self.model.named_parameters()

    def pieces(self) -> Iterable[Piece]:
        """List the pieces of named tensors that this rank saves and loads: weights and optimizer state."""
        wholes, reader = self._whole_steps, None
        if wholes is not None and self._optimizer is not None:
            # Made first: it asks whether the optimizer has state, and `_held_pieces` may make some.
            reader = StateReader(self._optimizer.optimizer)
        for piece in self._held_pieces():
            yield from self._own_pieces(piece)
        if wholes is not None and reader is not None:
            for name, group, whole in wholes.named():
                yield from reader.pieces_of(name, group, whole)
        if self.compressor is not None:
            yield from self.compressor.pieces()

    def weights(self) -> Iterable[Piece]:
        """List the pieces of weights alone, without pieces of an optimizer's state."""
        for piece in list_pieces(self.model, None):
            yield from self._own_pieces(piece)

    def _own_pieces(self, piece: Piece) -> Iterable[Piece]:
        """Give the pieces of the whole model's tensor that a piece of this rank's model is."""
        return [piece] if self._parts is None else self._parts.own_pieces(piece)

    def _held_pieces(self) -> Iterable[Piece]:
        """List the pieces that this rank would have if its model were the whole one."""
        optimizer = None if self._optimizer is None else self._optimizer.optimizer
        return list_pieces(self.model, optimizer, skips_state=self._is_stepped_whole)

    def _is_stepped_whole(self, parameter: torch.Tensor) -> bool:
        """Whether a whole parameter is stepped in place of this rank's part, which then has no state."""
        return self._whole_steps is not None and self._whole_steps.replaces(parameter)

    def held_bytes(self, device: torch.device) -> dict[str, int]:
        """Give the bytes that this rank holds now on a device, as far as it can tell them apart.

        Returns:
            The bytes of `weights`, `gradients` and `optimizer`; what lies in buffers of the layout's own is left out.
        """
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        optimizer = [] if self._optimizer is None else state_tensors(self._optimizer.optimizer)
        return {
            "weights": storage_bytes([*self.model.parameters(), *self.model.buffers()], device),
            "gradients": storage_bytes(gradients, device),
            "optimizer": storage_bytes(optimizer, device),
        }

    def extra_state(self) -> dict[str, dict[str, float]]:
        """Give the numbers that a resume needs besides the pieces, for JSON: DeepSpeed's loss scale and counters."""
        return {}

    def load_extra_state(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Take back the numbers of `extra_state`, which another layout may have saved."""

    def after_load(self) -> None:
        """Update all that is derived from the pieces, after a checkpoint was read into them."""
        if self._parts is not None:
            self._parts.after_load()
