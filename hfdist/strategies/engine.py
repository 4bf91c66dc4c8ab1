"""What the trainer may ask of a distributed model.

The class itself runs the layout in which each rank holds the whole model: one process, or data parallel with averaged
gradients. Other engines derive from it.
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
"""Tensors by name, the first dimension of which is the sequences."""
Function = Callable[[nn.Module, Batch], object]
"""(model, part of a batch) -> any value made from the model's outputs."""
Value = TypeVar("Value")
"""What such a function makes."""


class Forward(Protocol):
    """Runs forwards without gradients; see `Engine.forward`."""

    def __call__(
        self, batch: Batch, function: Callable[[nn.Module, Batch], Value], *, as_whole: bool = False
    ) -> list[Value]:
        """Give what the function gave for each part of the batch; empty on ranks without logits."""


@dataclass(frozen=True, kw_only=True)
class TrainerHooks:
    """How the Hugging Face Trainer does a step; an engine that needs nothing special only calls these."""

    model: nn.Module
    """As accelerate prepared it."""
    loss: Callable[..., torch.Tensor]
    """(model, batch, num_items) -> loss for the backward, times the number of processes; see `forward_backward`."""
    backward: Callable[[torch.Tensor], object] = torch.Tensor.backward
    """Scales what `loss` gave, and runs its backward; a pipeline does both by itself."""
    router_loss: Callable[[], torch.Tensor | None] = lambda: None
    """What routers add to the loss in the last forward; None: nothing, or `loss` has added it."""


class Engine:
    """What the trainer may ask of a distributed model. An engine never sees the trainer."""

    model: nn.Module
    """The module that the Trainer gets: the whole model, or this rank's part of it, with the model's own names."""

    reduces_gradients = False
    """Whether the engine itself adds up gradients over ranks, so that accelerate must not wrap the model in DDP."""

    runs_whole_model = True
    """Whether calling `model` gives the logits of whole sequences on this rank (perhaps with the other ranks)."""

    loss_group: dist.ProcessGroup | None = None
    """If this rank computes losses: the ranks that compute them at the same time; None: all ranks."""

    optimizer_sees: Reach = Reach.model
    """What the optimizer of this rank sees whole: the model, or each parameter."""

    steps_other_tensors = False
    """Whether the optimizer steps other tensors than the parameters that the user's model had."""

    clips_stepped = False
    """Whether gradients are clipped by the norm of what the optimizer steps, and not of all trained parameters."""

    axes_of_parts: tuple[str, ...] = (EXPERT, TENSOR)
    """Axes of the mesh over which ranks hold parts of parameters, or the same ones whole."""

    schedule_trace: Recorder | None = None
    """The measured times of a step, in layouts with a schedule. `setup` makes it."""

    def __init__(
        self,
        model: nn.Module,
        context: ContextParallel | None = None,
        parts: ModelParts | None = None,
        make_compressor: Callable[[nn.Module], GradientCompressor] | None = None,
    ) -> None:
        self.model = model
        self._optimizer: AcceleratedOptimizer | None = None
        """As accelerate wrapped it; None before `setup`, and where DeepSpeed has it."""
        self._scaler: torch.amp.GradScaler | None = None
        self._modules: list[nn.Module] = []
        """Modules of the prepared model, from `setup` on: walking through it takes a fiftieth of a small step."""
        self._parameters: list[nn.Parameter] = []
        self._trained: list[torch.Tensor] = []
        """Parameters that the optimizer stepped when the two lists above were made."""
        self._prepared: nn.Module | None = None
        """As accelerate wrapped it; None before `setup`."""
        self._make_compressor = make_compressor
        """Gives for a model what compresses DDP's gradients; None: they travel as they are."""
        self.compressor: GradientCompressor | None = None
        self._compressed: nn.Module | None = None
        """The model whose gradients `compressor` compresses, as accelerate wrapped it."""
        self._whole_steps: WholeSteps | None = None
        """Steps the parameters that the optimizer must see whole; None: all are stepped as this rank holds them."""
        self.context = context
        """Which part of each sequence this rank computes; None: all of it."""
        self.runs_whole_model = self.runs_whole_model and context is None
        self._parts = parts
        """Which part of each parameter this rank holds, before FSDP2 shards it; None: all of it."""
        if parts is not None:
            self.reduces_gradients, self.steps_other_tensors = True, True
            self.optimizer_sees = min(self.optimizer_sees, Reach.parameter)
            if parts.groups.tensor is not None:
                self.loss_group = parts.groups.tokens

    @property
    def description(self) -> str:
        """What computes attention, and how ranks share parameters: one line for people."""
        config = getattr(self.model, "config", None)
        attention = getattr(config, "_attn_implementation", None) if self.context is None else self.context.description
        return f"attention {attention}" + (f"; {self._parts.description}" if self._parts is not None else "")

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
        # Hooks are registered once, also where several trainings share the model.
        if self._make_compressor is not None and prepared is not self._compressed:
            self._compressed, self.compressor = prepared, self._make_compressor(self.model)
            # In a plan there is no DDP.
            if isinstance(prepared, DistributedDataParallel):
                self.compressor.register(prepared)
        if self.compressor is not None:
            self.compressor.scaler = scaler
        return optimizer

    def _list_parameters(self) -> None:
        """Set the lists of modules, of parameters, and of what the optimizer steps."""
        assert self._prepared is not None
        self._modules, self._parameters = list(self._prepared.modules()), list(self._prepared.parameters())
        self._trained = self._list_trained()

    def _list_trained(self) -> list[torch.Tensor]:
        groups = [] if self._optimizer is None else self._optimizer.optimizer.param_groups
        return [parameter for group in groups for parameter in group["params"]]

    def _keep_optimizer(self, optimizer: AcceleratedOptimizer, scaler: torch.amp.GradScaler | None) -> None:
        """Keep the optimizer and the loss scale.

        Parameters of which ranks have parts, and which the optimizer must see whole, are whole in its steps.
        """
        inner, before = optimizer.optimizer, self._optimizer
        self._optimizer, self._scaler = optimizer, scaler
        if before is not None and before.optimizer is inner:
            # An earlier training has done the rest.
            return
        shared = list(self._shared(inner))
        self._whole_steps = WholeSteps(inner, gather_regions(shared)) if shared else None

    def _groups_of_wholes(self, optimizer: torch.optim.Optimizer) -> list[Group]:
        return groups_of_wholes(optimizer, (group for group in optimizer.param_groups if group["params"]))

    def _shared(self, optimizer: torch.optim.Optimizer) -> Iterator[ShardedParameter]:
        """List the parameters of which ranks have parts, and which the optimizer must see whole."""
        holders = {name: self._holders(name) for name, _ in self.model.named_parameters()}
        if not any(holders.values()):
            # Asking an optimizer takes time.
            return
        options = {id(p): group for group in self._groups_of_wholes(optimizer) for p in group["params"]}
        for name, parameter in self.model.named_parameters():
            group = holders[name]
            if group is not None and id(parameter) in options:
                yield ShardedParameter(
                    name=name,
                    held=parameter,
                    options=options[id(parameter)],
                    shape=self.whole_shape(parameter),
                    group=group,
                    own_pieces=partial(self._weight_pieces, name),
                )

    def _holders(self, name: str) -> dist.ProcessGroup | None:
        """Give the ranks that together have a parameter, each element once; None: this rank has it whole."""
        return None if self._parts is None else self._parts.groups.of(self._parts.axis(name))

    def _weight_pieces(self, name: str, tensor: torch.Tensor) -> list[Piece]:
        piece = Piece(name=name, key=WEIGHT, shape=tuple(tensor.shape), start=0, view=tensor.detach())
        return [own for own in self._own_pieces(piece) if own.view.numel() > 0]

    def forward_backward(self, batch: Batch, num_items: torch.Tensor | None, hooks: TrainerHooks) -> torch.Tensor:
        """Run forward and backward on one micro batch (a pipeline: on all of a step) and return its detached loss.

        The returned losses, averaged over all processes, give the loss of the global batch.

        Args:
            batch: tensors of shape [sequences, tokens].
            num_items: number of target tokens in the whole global batch.
            hooks: how the Trainer does it.

        Raises:
            DataError: ranks that compute one loss together were given different batches.
        """
        self.begin(batch)
        # A callback may have put a part of the model into evaluation.
        if not (self._modules and all(map(_is_training, self._modules))):
            hooks.model.train()
        with self._sharded(batch) as own:
            loss = hooks.loss(hooks.model, own, num_items)
            hooks.backward(loss)
            return loss.detach()

    def begin(self, batch: Batch) -> None:
        """Let ranks that compute one loss together draw alike. A collective; DataError: they have different batches."""
        if self._parts is not None:
            self._parts.begin(batch)

    def run_forwards(
        self, batch: Batch, function: Callable[[nn.Module, Batch], torch.Tensor], hooks: TrainerHooks
    ) -> None:
        """Run the forwards of `forward_backward` alone, in the same order, without gradients. `begin` comes before.

        Args:
            batch: as of `forward_backward`.
            function: (model, part of the batch) -> anything; a pipeline ends it early on all stages but the last.
            hooks: how the Trainer does it.
        """
        hooks.model.train()
        with torch.no_grad(), self._sharded(batch) as own:
            function(hooks.model, own)

    def _sharded(self, batch: Batch) -> AbstractContextManager[Batch]:
        """Give this rank's part of the sequences that its model replica reads."""
        return nullcontext(batch) if self.context is None else self.context.sharded(batch)

    def accumulating(self) -> AbstractContextManager[object]:
        """Hold for each micro batch of a step but the last, where the engine itself reduces gradients."""
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
            function: what is made of the model's outputs.
            hooks: how the Trainer does it.
            as_whole: whether the function is called once on each rank, with a model that has all blocks, so that it may
                keep a cache. Where a pipeline has no such model, no rank calls the function.

        Returns:
            On the one rank of each model replica that has logits: what `function` gave for each part, in order. A part
            may end with copies of the batch's first row, without targets. On the other ranks: an empty list. Ranks that
            share sequences: of each its part of a batch with labels, and of the whole batch without.
        """
        with torch.no_grad(), self._sharded(batch) as own:
            values = [function(hooks.model, own)]
        return values if self._has_values else []

    def gathered(self) -> AbstractContextManager[object]:
        """Hold sharded weights whole while only forwards without gradients run, as of a generation. A collective.

        This takes memory for all weights on each rank (a pipeline: for those of its stages). Where a GPU has not twice
        as much free, weights stay sharded on all ranks, and each forward gathers them.
        """
        return nullcontext()

    @property
    def _has_values(self) -> bool:
        """Whether this is the one rank that gives what several have computed alike."""
        return self._parts is None or self._parts.is_first

    def clip_grad_norm(self, max_norm: float) -> object:
        """Clip by the norm over all parameters of the whole model (0: not), and return the norm before clipping."""
        if self._parts is not None:
            self._average_gradients(self._parts)
            self._parts.reduce_gradients(self.model)
        return self._clip(max_norm)

    def _average_gradients(self, parts: ModelParts) -> None:
        parts.average_gradients(self.model)

    def _norm_groups(self) -> list[dist.ProcessGroup]:
        """The groups whose ranks hold different parts of the model."""
        groups = [] if self._parts is None else [self._parts.groups.of(axis) for axis in self.axes_of_parts]
        return [group for group in groups if group is not None]

    def _counts(self, name: str) -> bool:
        """Whether this rank counts a parameter in the norm, so that over all these groups each counts once."""
        return self._parts is None or self._parts.counts(name, self.axes_of_parts)

    def _clip(self, max_norm: float) -> torch.Tensor:
        if self._scaler is not None and self._optimizer is not None:
            self._scaler.unscale_(self._optimizer.optimizer)
        groups = self._norm_groups()
        if not groups:
            trained = self._list_trained()
            if list(map(id, trained)) != list(map(id, self._trained)):
                # A callback has given the optimizer other parameters.
                self._list_parameters()
            return torch.nn.utils.clip_grad_norm_(self._parameters, max_norm or math.inf)
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
        """Meanwhile, parameters of which this rank has a part have the shape of the whole, and no memory for values."""
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

        What is a rank's part has a name of its own, which the ranks with the same part share.
        """
        held = self._held_parameters()
        return held if self._parts is None else [(self._parts.name_part(name), tensor) for name, tensor in held]

    def _held_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self.model.named_parameters()

    def pieces(self) -> Iterable[Piece]:
        """List the pieces of named tensors that this rank saves and loads: weights and optimizer state."""
        wholes = self._whole_steps
        # Made first: it asks whether the optimizer has state, and `_held_pieces` may make some.
        reader = None if wholes is None or self._optimizer is None else StateReader(self._optimizer.optimizer)
        for piece in self._held_pieces():
            yield from self._own_pieces(piece)
        if wholes is not None and reader is not None:
            for named in wholes.named():
                yield from reader.pieces_of(*named)
        if self.compressor is not None:
            yield from self.compressor.pieces()

    def weights(self) -> Iterable[Piece]:
        """List the pieces of weights alone, without what `pieces` makes of an optimizer's state."""
        return (own for piece in list_pieces(self.model, None) for own in self._own_pieces(piece))

    def _own_pieces(self, piece: Piece) -> Iterable[Piece]:
        """Give pieces of the whole model, from one of this rank's model."""
        return [piece] if self._parts is None else self._parts.own_pieces(piece)

    def _held_pieces(self) -> Iterable[Piece]:
        """List the pieces that this rank would have if its model were the whole one."""
        optimizer = None if self._optimizer is None else self._optimizer.optimizer
        return list_pieces(self.model, optimizer, skips_state=self._is_stepped_whole)

    def _is_stepped_whole(self, parameter: torch.Tensor) -> bool:
        return self._whole_steps is not None and self._whole_steps.replaces(parameter)

    def held_bytes(self, device: torch.device) -> dict[str, int]:
        """Give the bytes that this rank holds now on a device, as far as it can tell them apart.

        Returns:
            By `weights`, `gradients` and `optimizer`; a part that lies in buffers of the layout's own is left out.
        """
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        optimizer = [] if self._optimizer is None else state_tensors(self._optimizer.optimizer)
        return {
            "weights": storage_bytes([*self.model.parameters(), *self.model.buffers()], device),
            "gradients": storage_bytes(gradients, device),
            "optimizer": storage_bytes(optimizer, device),
        }

    def extra_state(self) -> dict[str, dict[str, float]]:
        """Give what a resume needs besides the pieces, as JSON: DeepSpeed's loss scale and counters."""
        return {}

    def load_extra_state(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Take back what `extra_state` gave, in this layout or in another one."""

    def after_load(self) -> None:
        """Update everything that is derived from the pieces, after a checkpoint was read into them."""
        if self._parts is not None:
            self._parts.after_load()
