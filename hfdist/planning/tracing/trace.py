"""Counts what a step holds and costs, operation by operation, on fake tensors and on real ones alike.

A storage counts from the operation that makes it to the moment when nothing refers to it any more, whoever lets it go:
Python, autograd, or FSDP2, which resizes storages by itself. The garbage collector does not run meanwhile: its moments
depend on what else the process has made, and two traces of a step must be equal. The peak is the most of all moments,
never an estimate from a few. On fake tensors, what comes from whole numbers alone (masks, positions, targets) is
computed for real, so that a model that asks how many there are gets its answer.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from hfdist.planning.costs import OpCosts
from hfdist.strategies.step_memory import MemoryUse
from hfdist.strategies.traffic import Phase

Operation = Callable[..., Any]
"""One of torch's: its class is private."""
Arguments = tuple[Any, ...]
"""Of an operation: tensors, lists of them, numbers, types."""
Named = dict[str, Any]
"""Those that are given by name."""

WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, BUFFERS = "weights", "gradients", "optimizer", "activations", "buffers"
KINDS = (WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, BUFFERS)
"""Fields of MemoryUse that a trace tells apart."""

_MOST_REAL = 2**20
"""Elements of a tensor of whole numbers that is computed for real."""
_TRAVELLING = ("fsdp", "c10d")
"""Namespaces of the operations that gather parameters and reduce gradients."""
_aten = torch.ops.aten
_GATHER = torch.ops.c10d._allgather_base_.default
_EXCHANGE = torch.ops.c10d.alltoall_base_.default
_TOP = _aten.topk.default
_GROUPED = _aten._grouped_mm.default
_FILLED = {_aten.zeros.default, _aten.ones.default, _aten.full.default, _aten.empty.memory_format}
_WHOLE = {torch.int64, torch.int32, torch.bool}
_RANGES = {_aten.arange.default, _aten.arange.start, _aten.arange.start_step}
_ALLOCATING = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}


class _Block:
    """Memory that a storage holds."""

    __slots__ = ("kind", "reference", "size")

    def __init__(self, size: int, kind: str) -> None:
        self.size, self.kind = size, kind
        self.reference: _StorageReference | None = None


class _StorageReference(weakref.ref[torch.UntypedStorage]):
    """Knows by which key its storage is found once that is gone."""

    __slots__ = ("key",)
    key: int


@dataclass(frozen=True)
class Moment:
    """When most was held, and what."""

    phase: Phase
    use: MemoryUse


@dataclass
class _Counter:
    flops: float = 0.0
    moved_bytes: float = 0.0
    kernels: int = 0


class Trace(TorchDispatchMode):
    """Enter it around the steps that are to be seen, inside of a FakeTensorMode if the tensors are fake.

    Set `phase` before each part of a step; `hold` tells what exists already.

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
        self._peaks: dict[Phase, tuple[int, tuple[int, ...]]] = {}
        self._counters = {phase: _Counter() for phase in Phase}
        self._patches = ExitStack()
        self._is_shape_only = False
        """Whether what runs now is on no tensors of the step."""

    # ---- what a caller asks ----

    def hold(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Count tensors from now on as what they are, whether they were seen before or not."""
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
        """What is held now."""
        return MemoryUse(**self._held)

    @property
    def peak(self) -> Moment:
        """When most was held, of all phases."""
        phase = max(self._peaks, key=lambda phase: self._peaks[phase][0])
        return Moment(phase, self.peak_of(phase))

    def peak_of(self, phase: Phase) -> MemoryUse:
        """The most that was held in a phase; nothing if it has not come."""
        return MemoryUse(**dict(zip(KINDS, self._peaks.get(phase, (0, (0,) * len(KINDS)))[1], strict=True)))

    def costs(self, phase: Phase) -> OpCosts:
        """What the operations of a phase cost."""
        counter = self._counters[phase]
        return OpCosts(flops=counter.flops, moved_bytes=counter.moved_bytes, kernels=counter.kernels)

    def hold_rest(self, kind: str) -> None:
        """Count as `kind` from now on all that nobody has named."""
        for block in self._blocks.values():
            if block.kind == ACTIVATIONS:
                self._held[ACTIVATIONS] -= block.size
                self._held[kind] += block.size
                block.kind = kind

    def forget_peak(self) -> None:
        """Begin anew with what is held now."""
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
        # Of equal moments the last: by then new tensors have been named.
        if most is None or self._total >= most[0]:
            self._peaks[self.phase] = (self._total, tuple(self._held.values()))

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

        if gc.isenabled():
            gc.disable()
            self._patches.callback(gc.enable)
        # FSDP2 frees what it has gathered so, and no operation tells it. Private to nobody: the method is public.
        self._patches.enter_context(patch.object(torch.UntypedStorage, "resize_", resize_))
        # Private: DTensors find the shapes of what they give on whole tensors without memory, which look like the
        # step's own here. In a run nobody holds them.
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
        kwargs = kwargs or {}
        if self._is_shape_only:
            return operation(*args, **kwargs)
        output = _run(operation, types, args, kwargs)
        outputs = list(_tensors(output))
        namespace = getattr(operation, "namespace", "")
        if namespace in _TRAVELLING:
            given = (*_tensors(args), *_tensors(tuple(kwargs.values())), *outputs)
            self.hold((tensor for tensor in given if self._is_activation(tensor)), BUFFERS)
            if self._copies_gathered and operation is _GATHER:
                copy = _Block(0, BUFFERS)
                self._grow(copy, _nbytes(args[0]))
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
        if packet is None or operation.is_view or packet in _ALLOCATING:
            return
        if not outputs and not packet.__name__.endswith("_"):
            return
        counter = self._counters[self.phase]
        counter.kernels += 1
        formula = _FORMULAS.get(packet) or flop_registry.get(packet) or _FORMULAS_BY_NAME.get(str(packet))
        if formula is not None:
            counter.flops += formula(*args, **kwargs, out_val=output)
            return
        read = sum(map(_nbytes, _tensors(args)))
        # What is written in place is among the outputs, too, but for optimizers, which give nothing back.
        counter.moved_bytes += read + sum(map(_nbytes, outputs or _tensors(args)))


def _sums_gradients(operation: object) -> bool:
    """Whether autograd adds up gradients of a tensor that was used twice.

    It adds in place to one that nobody else refers to, but not to a subclass such as a fake tensor: there it makes a
    sum, and lets that one go at once. Private: nothing public tells that a backward runs.
    """
    is_backward = torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()
    return is_backward and operation is _aten.add.Tensor


_SEEN = {torch.Tensor, torch.nn.Parameter, FakeTensor}


def _tensors(values: object) -> Iterator[torch.Tensor]:
    """List tensors of arguments or outputs of an operation."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors(value)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _run(operation: Operation, types: tuple[type, ...], args: Arguments, kwargs: Named) -> object:
    """Run an operation: for real, where its tensors are real and small."""
    if FakeTensor in types:
        if operation is _GROUPED:
            return _grouped_product(*args, **kwargs)
        output = operation(*_without_masks(operation, args), **kwargs)
        return _even_choices(output, args[0].shape[-1]) if operation is _TOP else output
    if not _is_known(operation, args, kwargs):
        return operation(*args, **kwargs)
    with unset_fake_temporarily():
        output = operation(*args, **kwargs)
        if operation is _EXCHANGE and args[0].shape == args[1].shape:
            # A fake process group brings nothing; all ranks send alike.
            args[0].copy_(args[1])
    return output


def _is_known(operation: Operation, args: Arguments, kwargs: Named) -> bool:
    """Whether an operation without fake tensors makes a small one, so that it can be computed for real."""
    tensors = list(_tensors(args))
    if not tensors:
        if operation in _RANGES:
            return all(abs(number) <= _MOST_REAL for number in args)
        return operation in _FILLED and kwargs.get("dtype") in _WHOLE and math.prod(args[0]) <= _MOST_REAL
    try:
        size = math.prod(torch.broadcast_shapes(*(tensor.shape for tensor in tensors)))
    except RuntimeError:
        size = sum(tensor.numel() for tensor in tensors)
    return size <= _MOST_REAL


def _grouped_product(
    left: torch.Tensor, right: torch.Tensor, offs: Any = None, *_: object, **__: object
) -> torch.Tensor:
    """Do what torch's own does for fake tensors, which knows bfloat16 only, as a GPU; a CPU takes each type."""
    groups = [offs.shape[0]] if left.ndim == right.ndim == 2 else [left.shape[0]] if left.ndim == right.ndim else []
    return left.new_empty(*groups, left.shape[-2], right.shape[-1])


def _even_choices(output: tuple[torch.Tensor, torch.Tensor], num_choices: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Let a router choose all of its experts equally often: how many tokens each gets is the size of what follows."""
    values, indices = output
    with unset_fake_temporarily():
        chosen = torch.arange(indices.numel()).remainder(num_choices).view(indices.shape)
    return values, chosen


def _without_masks(operation: Operation, args: Arguments) -> Arguments:
    """Name the chosen rows by their numbers, where a mask is known: how many there are follows from its values."""
    if operation is not _aten.index.Tensor:
        return args
    values, indices = args
    named: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype is torch.bool and type(index) is torch.Tensor:
            with unset_fake_temporarily():
                named += index.nonzero().unbind(1)
        else:
            named.append(index)
    return values, named


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_backward_flops(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object
) -> int:
    return int(sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape))


def _grouped_product_flops(left: torch.Tensor, right: torch.Tensor, *_: object, **__: object) -> int:
    """Rows of the left one are shared out over groups of the right one, or the columns over which both are summed."""
    return int(2 * math.prod(left.shape) * right.shape[-1])


def _grouped_product_backward_flops(
    _gradient: object, left: torch.Tensor, right: torch.Tensor, *_: object, **__: object
) -> int:
    return 2 * _grouped_product_flops(left, right)


def _packed_layer_flops(inputs: torch.Tensor, _: object, shape: Sequence[int], *__: object, **___: object) -> int:
    return 2 * inputs.numel() * shape[0]


_FORMULAS: dict[object, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    _aten._grouped_mm: _grouped_product_flops,
}
"""FLOP formulas of operations that torch's own table lacks."""

_FORMULAS_BY_NAME: dict[str, Callable[..., int]] = {
    "transformers.grouped_mm_fallback": _grouped_product_flops,
    "transformers.grouped_mm_fallback_backward": _grouped_product_backward_flops,
    "bitsandbytes.gemm_4bit": _packed_layer_flops,
}
"""FLOP formulas of operations that exist only once a model has been imported, by name."""
