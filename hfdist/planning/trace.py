"""Counts what a step holds and costs, operation by operation, on fake tensors and on real ones alike.

A storage counts from the operation that makes it to the moment when nothing refers to it any more, whoever lets it go:
Python, autograd, or FSDP2, which resizes storages by itself. The peak is the most of all moments, never an estimate
from a few. On fake tensors, what comes from whole numbers alone (masks, positions, targets) is computed for real, so
that a model that asks how many there are gets its answer.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from hfdist.planning.costs import MemoryUse, OpCosts, Phase

WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, BUFFERS = "weights", "gradients", "optimizer", "activations", "buffers"
KINDS = (WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, BUFFERS)
"""Fields of MemoryUse that a trace tells apart."""

_MOST_REAL = 2**20
"""Elements of a tensor of whole numbers that is computed for real."""
_TRAVELLING = ("fsdp", "c10d")
"""Namespaces of the operations that gather parameters and reduce gradients."""
_aten = torch.ops.aten
_RANGES = {_aten.arange.default, _aten.arange.start, _aten.arange.start_step}
_ALLOCATING = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}


class _Block:
    """Memory that a storage holds."""

    __slots__ = ("kind", "reference", "size")

    def __init__(self, size: int, kind: str) -> None:
        self.size, self.kind = size, kind
        self.reference: Any = None


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
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.phase = Phase.forward
        self._blocks: dict[int, _Block] = {}
        self._held = dict.fromkeys(KINDS, 0)
        self._total = 0
        self._peaks: dict[Phase, tuple[int, tuple[int, ...]]] = {}
        self._counters = {phase: _Counter() for phase in Phase}
        self._resize: Any = None

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

    def forget_peak(self) -> None:
        """Begin anew with what is held now."""
        self._peaks.clear()
        self._counters = {phase: _Counter() for phase in Phase}
        self._note_peak()

    # ---- storages ----

    def _see(self, tensor: torch.Tensor) -> _Block | None:
        """Count the storage of a tensor; None: it has none."""
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # sparse tensors
            return None
        key, size = storage._cdata, storage.nbytes()
        block = self._blocks.get(key)
        if block is None:
            block = self._blocks[key] = _Block(0, ACTIVATIONS)
            block.reference = _StorageReference(storage, self._freed)
            block.reference.key = key
        if size != block.size:
            self._grow(block, size - block.size)
        return block

    def _grow(self, block: _Block, added: int) -> None:
        block.size += added
        self._held[block.kind] += added
        self._total += added
        if added > 0:
            self._note_peak()

    def _note_peak(self) -> None:
        most = self._peaks.get(self.phase)
        if most is None or self._total > most[0]:
            self._peaks[self.phase] = (self._total, tuple(self._held.values()))

    def _freed(self, reference: Any) -> None:
        block = self._blocks.get(reference.key)
        # Another storage may be at its address by now.
        if block is not None and block.reference is reference:
            del self._blocks[reference.key]
            self._held[block.kind] -= block.size
            self._total -= block.size

    def __enter__(self) -> Trace:
        # FSDP2 frees what it has gathered so, and no operation tells it. Private to nobody: the method is public.
        self._resize = resize = torch.UntypedStorage.resize_
        trace = self

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            given = resize(storage, size)
            block = trace._blocks.get(storage._cdata)
            if block is not None and block.size != size:
                if block.kind == ACTIVATIONS:
                    trace._held[ACTIVATIONS] -= block.size
                    trace._held[BUFFERS] += block.size
                    block.kind = BUFFERS
                trace._grow(block, size - block.size)
            return given

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    # ---- operations ----

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in _SEEN for kind in types):
            # A DTensor's own operations come by themselves.
            return NotImplemented
        kwargs = kwargs or {}
        if FakeTensor in types:
            args = _without_masks(operation, args)
            output = _grouped_product(operation, args, kwargs)
        elif _is_known(operation, args):
            with unset_fake_temporarily():
                output = operation(*args, **kwargs)
        else:
            output = operation(*args, **kwargs)
        outputs = list(_tensors(output))
        namespace = getattr(operation, "namespace", "")
        if namespace in _TRAVELLING:
            given = (*_tensors(args), *_tensors(tuple(kwargs.values())), *outputs)
            self.hold((tensor for tensor in given if self._is_activation(tensor)), BUFFERS)
            return output
        for tensor in outputs:
            self._see(tensor)
        self._count(operation, args, kwargs, output, outputs)
        return output

    def _is_activation(self, tensor: torch.Tensor) -> bool:
        block = self._see(tensor)
        return block is not None and block.kind == ACTIVATIONS

    def _count(self, operation: Any, args: Any, kwargs: Any, output: Any, outputs: list[torch.Tensor]) -> None:
        packet = getattr(operation, "_overloadpacket", None)
        if packet is None or operation.is_view or packet in _ALLOCATING or not outputs:
            return
        counter = self._counters[self.phase]
        counter.kernels += 1
        formula = _FORMULAS.get(packet) or flop_registry.get(packet)
        if formula is not None:
            counter.flops += formula(*args, **kwargs, out_val=output)
            return
        read = sum(map(_nbytes, _tensors(args)))
        # What is written in place is among the outputs, too.
        counter.moved_bytes += read + sum(map(_nbytes, outputs or _tensors(args)))


_SEEN = {torch.Tensor, torch.nn.Parameter, FakeTensor}


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """List tensors of arguments or outputs of an operation."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors(value)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _is_known(operation: Any, args: Any) -> bool:
    """Whether an operation without fake tensors gives a small one of whole numbers, which is computed for real."""
    tensors = list(_tensors(args))
    if not tensors:
        return operation in _RANGES and all(abs(number) <= _MOST_REAL for number in args)
    try:
        size = math.prod(torch.broadcast_shapes(*(tensor.shape for tensor in tensors)))
    except RuntimeError:
        size = sum(tensor.numel() for tensor in tensors)
    return size <= _MOST_REAL


def _without_masks(operation: Any, args: Any) -> Any:
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


def _grouped_product(operation: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on fake tensors; the products of experts in float32 as in bfloat16, which alone torch knows."""
    if operation is not _aten._grouped_mm.default or args[0].dtype is not torch.float32:
        return operation(*args, **kwargs)
    left, right, *others = args
    return operation(left.bfloat16(), right.bfloat16(), *others, **kwargs).float()


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_backward_flops(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape))


def _grouped_product_flops(left: Any, right: Any, *_: Any, **__: Any) -> int:
    """Rows of the left one are shared out over groups of the right one, or the columns over which both are summed."""
    if right.ndim == 3:
        return int(2 * math.prod(left.shape) * right.shape[-1])
    return int(2 * math.prod(left.shape) * right.shape[-1])


_FORMULAS: dict[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    _aten._grouped_mm: _grouped_product_flops,
}
"""Of operations that torch's own table lacks."""
