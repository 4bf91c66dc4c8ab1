"""Counts the memory and the costs of a step, operation by operation, on fake tensors and on real ones alike.

A storage counts from the operation that makes it to the moment when nothing refers to it any more, whoever lets it go:
Python, autograd, or FSDP2, which resizes storages by itself. The garbage collector does not run meanwhile: its moments
depend on what else the process has made, and two traces of a step must be equal. The peak is the most of all moments,
never an estimate from a few.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode

from hfdist.garbage_collector import collector_paused
from hfdist.planning.costs import OpCosts
from hfdist.planning.tracing.fake_operations import Arguments, Named, Operation, run_operation, tensors_of
from hfdist.planning.tracing.flop_formulas import find_formula
from hfdist.strategies.step_memory import MemoryUse
from hfdist.strategies.traffic import Phase

WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, BUFFERS = "weights", "gradients", "optimizer", "activations", "buffers"
KINDS = (WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, BUFFERS)
"""Fields of MemoryUse that a trace tells apart."""

_TRAVELLING = ("fsdp", "c10d")
"""Namespaces of the operations that gather parameters and reduce gradients."""
_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
"""The operation that asks for the device of a fake tensor: half of all operations."""
_GATHER = torch.ops.c10d._allgather_base_.default
_MOVING_NOTHING = {
    _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided, _aten._unsafe_view,
}  # fmt: skip
_FILLING = {
    _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.new_zeros, _aten.new_ones, _aten.new_full,
}  # fmt: skip
"""Operations that take a tensor for its shape and type alone."""
_PICKING = {_aten.gather, _aten.index, _aten.index_select, _aten.embedding}
"""Operations that read from their first tensor only as much as they give."""
_PLACING = {_aten.scatter_, _aten.scatter_add_, _aten.index_add_, _aten.index_put_}
"""Operations that change some elements of their first tensor in place."""


class _Block:
    """The bytes of a storage, and their kind."""

    __slots__ = ("kind", "reference", "size")

    def __init__(self, size: int, kind: str) -> None:
        self.size, self.kind = size, kind
        self.reference: _StorageReference | None = None


class _StorageReference(weakref.ref[torch.UntypedStorage]):
    """A reference that keeps the key of its storage, to find the block once the storage is gone."""

    __slots__ = ("key",)
    key: int


@dataclass(frozen=True)
class Moment:
    """The moment of a peak: its phase, and the memory by kind."""

    phase: Phase
    use: MemoryUse


@dataclass
class _Counter:
    flops: float = 0.0
    moved_bytes: float = 0.0
    kernels: int = 0


class Trace(TorchDispatchMode):
    """A mode that counts the storages and the operations of all that runs within it, by the phase of the step.

    Enter it around the steps that are to be seen, inside of a FakeTensorMode if the tensors are fake. Set `phase`
    before each part of a step, and name the tensors that exist already with `hold`.

    Args:
        copies_gathered: whether an all-gather holds what comes once more for a moment, as gloo's does. A fake process
            group has no such memory.
    """

    supports_higher_order_operators = True

    def __init__(self, *, copies_gathered: bool = False) -> None:
        super().__init__()
        self.phase = Phase.forward
        self._copies_gathered = copies_gathered
        self._blocks: dict[int, _Block] = {}
        self._held = dict.fromkeys(KINDS, 0)
        self._total = 0
        self._peaks: dict[Phase, MemoryUse] = {}
        self._counters = {phase: _Counter() for phase in Phase}
        self._patches = ExitStack()
        self._is_shape_only = False
        """Whether the operations now are on shapes alone, and not on tensors of the step."""

    # ---- for callers ----

    def hold(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Count tensors as `kind` from now on, whether they were seen before or not."""
        for tensor in tensors:
            local = getattr(tensor, "_local_tensor", tensor)
            block = self._see(local)
            if block is not None and block.kind != kind:
                self._held[block.kind] -= block.size
                self._held[kind] += block.size
                block.kind = kind
        self._note_peak()

    @property
    def held(self) -> MemoryUse:
        """Memory by kind now."""
        return MemoryUse(**self._held)

    @property
    def peak(self) -> Moment:
        """The highest peak of all phases."""
        phase = max(self._peaks, key=lambda phase: self._peaks[phase].total)
        return Moment(phase, self.peak_of(phase))

    def peak_of(self, phase: Phase) -> MemoryUse:
        """Give the peak of a phase; zeros if the phase has not come."""
        return self._peaks.get(phase, MemoryUse())

    def costs(self, phase: Phase) -> OpCosts:
        """Give the costs of the operations of a phase."""
        counter = self._counters[phase]
        return OpCosts(flops=counter.flops, moved_bytes=counter.moved_bytes, kernels=counter.kernels)

    def hold_rest(self, kind: str) -> None:
        """Count all memory without a kind as `kind` from now on."""
        for block in self._blocks.values():
            if block.kind == ACTIVATIONS:
                self._held[ACTIVATIONS] -= block.size
                self._held[kind] += block.size
                block.kind = kind

    def forget_peak(self) -> None:
        """Forget peaks and costs: the memory now is the first peak."""
        self._peaks.clear()
        self.forget_costs()
        self._note_peak()

    def forget_costs(self) -> None:
        """Count the costs of operations anew."""
        self._counters = {phase: _Counter() for phase in Phase}

    # ---- storages ----

    def _see(self, tensor: torch.Tensor, *, notes_peak: bool = True) -> _Block | None:
        """Count the storage of a tensor; None: it has none."""
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # sparse tensors
            return None
        key, size = storage._cdata, storage.nbytes()
        block = self._blocks.get(key)
        if block is None and tensor.device.type == "meta":
            # A shape without memory.
            return None
        if block is None:
            block = self._blocks[key] = _Block(0, ACTIVATIONS)
            block.reference = reference = _StorageReference(storage, self._freed)
            reference.key = key
        if size != block.size:
            self._grow(block, size - block.size, notes_peak=notes_peak)
        return block

    def _grow(self, block: _Block, added: int, *, notes_peak: bool = True) -> None:
        block.size += added
        self._held[block.kind] += added
        self._total += added
        if added > 0 and notes_peak:
            self._note_peak()

    def _note_peak(self) -> None:
        most = self._peaks.get(self.phase)
        # The last of equally high moments: by then `hold` has given new tensors their kind.
        if most is None or self._total >= most.total:
            self._peaks[self.phase] = self.held

    def _freed(self, reference: _StorageReference) -> None:
        block = self._blocks.get(reference.key)
        # Another storage may be at its address by now.
        if block is not None and block.reference is reference:
            del self._blocks[reference.key]
            self._held[block.kind] -= block.size
            self._total -= block.size

    def __enter__(self) -> Trace:
        resize, propagate = torch.UntypedStorage.resize_, ShardingPropagator._propagate_tensor_meta_non_cached
        trace = self

        def resize_(storage: torch.UntypedStorage, size: int) -> object:
            given = resize(storage, size)
            block = trace._blocks.get(storage._cdata)
            if block is not None and block.size != size:
                if block.kind == ACTIVATIONS:
                    trace._held[ACTIVATIONS] -= block.size
                    trace._held[BUFFERS] += block.size
                    block.kind = BUFFERS
                trace._grow(block, size - block.size)
            return given

        def propagate_shapes(*arguments: Any) -> object:
            before, trace._is_shape_only = trace._is_shape_only, True
            try:
                return propagate(*arguments)
            finally:
                trace._is_shape_only = before

        self._patches.enter_context(collector_paused())
        # FSDP2 frees gathered weights by resizing their storage, which is no operation. The method is public.
        self._patches.enter_context(patch.object(torch.UntypedStorage, "resize_", resize_))
        # A private method: it finds the shapes of a DTensor operation's outputs, by running it on whole tensors without
        # memory. Here these look like tensors of the step.
        whole = patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate_shapes)
        self._patches.enter_context(whole)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._patches.close()

    # ---- operations ----

    def __torch_dispatch__(
        self, operation: Operation, types: tuple[type, ...], args: Arguments = (), kwargs: Named | None = None
    ) -> object:
        if any(kind not in _SEEN for kind in types):
            # A DTensor's own operations come by themselves.
            return NotImplemented
        if operation is _DEVICE and type(args[0]) is FakeTensor:
            # The tensor itself would give the same. Inside of kernels, where it gives `meta`, this mode is off.
            return args[0].fake_device
        kwargs = kwargs or {}
        if self._is_shape_only:
            return operation(*args, **kwargs)
        output = run_operation(operation, types, args, kwargs)
        outputs = list(tensors_of(output))
        namespace = getattr(operation, "namespace", "")
        if namespace in _TRAVELLING:
            given = (*tensors_of(args), *tensors_of(tuple(kwargs.values())), *outputs)
            self.hold((tensor for tensor in given if self._is_activation(tensor)), BUFFERS)
            if self._copies_gathered and operation is _GATHER:
                copy = _Block(0, BUFFERS)
                self._grow(copy, args[0].nbytes)
                self._grow(copy, -copy.size)
            return output
        sums_gradients = _sums_gradients(operation)
        for tensor in outputs:
            self._see(tensor, notes_peak=not sums_gradients)
        self._count(operation, args, kwargs, output, outputs)
        return output

    def _is_activation(self, tensor: torch.Tensor) -> bool:
        block = self._see(tensor)
        return block is not None and block.kind == ACTIVATIONS

    def _count(
        self, operation: Any, args: Arguments, kwargs: Named, output: object, outputs: list[torch.Tensor]
    ) -> None:
        packet = getattr(operation, "_overloadpacket", None)
        if packet is None or operation.is_view or packet in _MOVING_NOTHING:
            return
        if not outputs and not packet.__name__.endswith("_"):
            return
        counter = self._counters[self.phase]
        counter.kernels += 1
        formula = find_formula(packet)
        if formula is not None:
            counter.flops += formula(*args, **kwargs, out_val=output)
            return
        counter.moved_bytes += _moved_bytes(packet, args, outputs)


def _moved_bytes(packet: object, args: Arguments, outputs: list[torch.Tensor]) -> int:
    """Give the bytes that an operation reads and writes."""
    read = [] if packet in _FILLING else [_distinct_bytes(tensor) for tensor in tensors_of(args)]
    # What is written in place is among the outputs, too, but for optimizers, which give nothing back.
    written = [_distinct_bytes(tensor) for tensor in outputs or tensors_of(args)]
    if packet in _PICKING:
        read[0] = min(read[0], written[0])
    elif packet in _PLACING:
        # The values come last, and each of them changes one element.
        read[0] = written[0] = min(read[0], read[-1])
    return sum(read) + sum(written)


def _distinct_bytes(tensor: torch.Tensor) -> int:
    """Count the bytes of a tensor; an element that was expanded is one."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in sizes if stride or not size) * tensor.element_size()


def _sums_gradients(operation: object) -> bool:
    """Whether an operation adds up the gradients of a tensor that was used twice.

    It adds in place to one that nobody else refers to, but not to a subclass such as a fake tensor: there it makes a
    sum, and lets that one go at once. Private: nothing public tells that a backward runs.
    """
    is_backward = torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()
    return is_backward and operation is _aten.add.Tensor


_SEEN = {torch.Tensor, torch.nn.Parameter, FakeTensor}
