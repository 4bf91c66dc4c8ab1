"""Stands for logits that are not computed yet: a model that only takes their cross entropy never needs them whole.

    model's code                       what happens while `deferring` is on
    logits = head(hidden)              hidden states are kept, in an object that stands for the logits
    logits = logits[:, :-1] / 2.0      the hidden states are sliced, and the division is noted
    loss = cross_entropy(logits, y)    the head and the noted operations run on some rows at a time
    logits.argmax(-1)                  anything else: all logits are computed first, as the model would have

So no model needs code of its own, and none can come out differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from hfdist.models.loss.deferred_rows import DeferredRows, DeferringHead, LogitsOperation, Reduce, SumOfLosses, cast
from hfdist.models.loss.teacher_rows import TeacherRows, WholeRows, divergences


class _Demand(NamedTuple):
    """An argument of a head's call that asks it to compute now, and not to defer.

    The call goes through the module, so that its hooks run: ZeRO-3's gather the head's weight.
    """

    compute: Callable[[torch.Tensor], torch.Tensor]
    """Takes hidden states, and gives the result of the call: logits, or a loss."""


@contextmanager
def deferring(
    module: nn.Module,
    vocabulary: int,
    loss: SumOfLosses,
    *,
    gathering: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Iterator[DeferringHead]:
    """Let a head defer its logits, in this context only.

    Args:
        module: the model's output embedding.
        vocabulary: number of logits that it gives for a row.
        loss: computes the loss of deferred rows.
        gathering: makes the parameters of `module` whole for a call.

    Yields:
        The head, which notes what needed whole logits in its `made_whole`.
    """
    head = DeferringHead(module, module.forward, vocabulary, loss, gathering)

    def forward(hidden: torch.Tensor, *args: object, **kwargs: object) -> Logits:
        if len(args) == 1 and isinstance(args[0], _Demand):
            return args[0].compute(hidden)
        if args or kwargs or not isinstance(hidden, torch.Tensor) or hidden.ndim < 2:
            return head.forward(hidden, *args, **kwargs)
        return _DeferredLogits(head, hidden, (), _Autocast.present(hidden.device))

    was_set = "forward" in vars(module)
    # An attribute of the module hides the method of its class, which stays as it is.
    module.forward = forward
    try:
        yield head
    finally:
        head.is_deferring = False
        if was_set:
            module.forward = head.forward
        else:
            del module.forward


class _Autocast(NamedTuple):
    """The state of autocast where the model called its head; the loss may be computed outside of that context."""

    device_type: str
    dtype: torch.dtype
    is_enabled: bool

    @classmethod
    def present(cls, device: torch.device) -> _Autocast:
        """Read the state that holds now."""
        kind = device.type
        return cls(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))

    def again(self) -> AbstractContextManager[object]:
        """Give a context in which this state holds."""
        if self == _Autocast.present(torch.device(self.device_type)):
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.is_enabled)


class _DeferredLogits:
    """Stands for logits, a tensor of shape [..., vocabulary]. It is no tensor, but torch's functions take it."""

    def __init__(
        self, head: DeferringHead, hidden: torch.Tensor, per_row: tuple[LogitsOperation, ...], autocast: _Autocast
    ) -> None:
        self._head = head
        self._hidden = hidden
        self._per_row = per_row
        self._autocast = autocast
        self._whole: torch.Tensor | None = None

    def whole(self, why: str) -> torch.Tensor:
        """Give the logits, computed in the first call; `why` names the operation that needs them."""
        if self._whole is None:
            self._head.made_whole.append(why)
            # They get a graph even where the model only looks at them: a loss of them may follow.
            with torch.inference_mode(False), torch.enable_grad():
                self._whole = self._make(self._hidden)
        return self._whole

    def _make(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the logits of hidden states [..., width], with the noted operations."""
        with self._autocast.again(), self._head.gathering():
            demand = (_Demand(self._head.forward),) if self._head.is_deferring else ()
            # A head made of several modules may have one that defers inside.
            value: torch.Tensor = _with_whole(self._head.module(hidden, *demand), "a head of several")
            for step in self._per_row:
                value = step(value)
        return value

    def _then(self, step: LogitsOperation) -> _DeferredLogits:
        """Note one more operation."""
        return _DeferredLogits(self._head, self._hidden, (*self._per_row, step), self._autocast)

    def _with_rows(self, hidden: torch.Tensor) -> _DeferredLogits:
        """Give the logits of other hidden states, with the same operations."""
        return _DeferredLogits(self._head, hidden, self._per_row, self._autocast)

    @property
    def _is_deferred(self) -> bool:
        return self._whole is None and self._head.is_deferring

    # ---- what needs no logits ----

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self._hidden.shape[:-1], self._head.vocabulary))

    @property
    def dtype(self) -> torch.dtype:
        # The noted operations are tried on a tensor of no rows.
        value = self._hidden.new_empty((0,), dtype=self._autocast.dtype if self._autocast.is_enabled else None)
        for step in self._per_row:
            value = step(value.new_empty((0, self._head.vocabulary)))
        return value.dtype

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        return self.shape[0]

    # ---- what is noted ----

    def float(self) -> Logits:
        return self.to(torch.float32)

    def contiguous(self) -> Logits:
        # Whole logits are contiguous as they are made.
        return self if self._is_deferred else self.whole("contiguous").contiguous()

    def to(self, *args: Any, **kwargs: Any) -> Logits:
        if self._is_deferred and not kwargs and len(args) == 1:
            if isinstance(args[0], torch.dtype):
                return self._then(cast(args[0]))
            if isinstance(args[0], torch.device) and args[0] == self.device:
                return self
        return self.whole("to").to(*args, **kwargs)

    def view(self, *shape: Any) -> Logits:
        sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list, torch.Size)) else shape
        is_by_row = len(sizes) > 1 and all(isinstance(size, int) for size in sizes)
        if self._is_deferred and is_by_row and sizes[-1] == self._head.vocabulary:
            return self._with_rows(self._hidden.reshape(*sizes[:-1], self._hidden.shape[-1]))
        return self.whole("view").view(*shape)

    reshape = view

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Logits:
        if self._is_deferred and end_dim % self.ndim < self.ndim - 1:
            return self._with_rows(self._hidden.flatten(start_dim, end_dim))
        return self.whole("flatten").flatten(start_dim, end_dim)

    def __getitem__(self, index: Any) -> Logits:
        if self._is_deferred and _leaves_rows_whole(index, self.ndim):
            return self._with_rows(self._hidden[index])
        return self.whole("indexing")[index]

    def __truediv__(self, other: object) -> Logits:
        return _by_row(torch.div, self, other)

    def __mul__(self, other: object) -> Logits:
        return _by_row(torch.mul, self, other)

    def __add__(self, other: object) -> Logits:
        return _by_row(torch.add, self, other)

    __rmul__, __radd__ = __mul__, __add__

    def tanh(self) -> Logits:
        return self._then(LogitsOperation(torch.tanh)) if self._is_deferred else self.whole("tanh").tanh()

    # ---- all else ----

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # Logits have as many dimensions as hidden states, and are on the same device.
        source = self._hidden if name in ("ndim", "dim", "device") else self.whole(name)
        return getattr(source, name)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.whole("writing")[index] = value

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., torch.Tensor],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Logits:
        """Called by torch's functions for an argument that is no tensor, but has this method."""
        kwargs = kwargs or {}
        first = args[0] if args else kwargs.get("input")
        if isinstance(first, _DeferredLogits) and first._is_deferred:
            if function is nn.functional.cross_entropy:
                loss = _cross_entropy(*args, **kwargs)
                if loss is not None:
                    return loss
            elif function is torch.tanh and len(args) == 1:
                return first.tanh()
            elif function in (torch.div, torch.mul, torch.add) and len(args) == 2 and not kwargs:
                return _by_row(function, first, args[1])
        why = getattr(function, "__name__", str(function))
        whole_args = [_with_whole(arg, why) for arg in args]
        whole_kwargs = {name: _with_whole(arg, why) for name, arg in kwargs.items()}
        return function(*whole_args, **whole_kwargs)


Logits = torch.Tensor | _DeferredLogits

_BY_WHOLE = (
    *("neg", "pos", "abs", "invert", "bool", "int", "float", "complex", "index", "iter", "reversed", "contains"),
    *("eq", "ne", "lt", "le", "gt", "ge", "sub", "pow", "floordiv", "mod", "matmul", "and", "or", "xor", "array"),
    *("rsub", "rpow", "rtruediv", "rfloordiv", "rmod", "rmatmul", "rand", "ror", "rxor", "deepcopy"),
)
"""Operators that need whole logits, by name without underscores: Python looks them up in a class, not `__getattr__`."""


def _by_whole(name: str) -> Callable[..., object]:
    """Make an operator that works on whole logits."""
    return lambda logits, *others: getattr(logits.whole(name), name)(*_with_whole(others, name))


for _name in _BY_WHOLE:
    setattr(_DeferredLogits, f"__{_name}__", _by_whole(f"__{_name}__"))


def _with_whole(value: object, why: str) -> Any:
    """Give a value, or the items of a tuple or list, with whole logits in the place of deferred ones."""
    if isinstance(value, (tuple, list)):
        return type(value)(_with_whole(item, why) for item in value)
    return value.whole(why) if isinstance(value, _DeferredLogits) else value


def _by_row(function: Callable[..., torch.Tensor], logits: _DeferredLogits, other: object) -> Logits:
    """Apply a function to logits and another value; it is noted if the value is the same for all rows."""
    is_constant = isinstance(other, (int, float))
    # A trained tensor must get its gradient, which a loss of rows would not give it.
    if isinstance(other, torch.Tensor) and not other.requires_grad and other.ndim <= logits.ndim:
        is_constant = all(size == 1 for size in other.shape[:-1])
        other = other.flatten() if other.ndim > 1 else other
    if logits._is_deferred and is_constant:
        return logits._then(LogitsOperation(function, (other,)))
    return function(logits.whole(function.__name__), other)


def _leaves_rows_whole(index: object, ndim: int) -> bool:
    """Whether an index takes rows only, by slices: `[:, :-1]`, `[..., :-1, :]`."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(part is Ellipsis or isinstance(part, slice) for part in parts) or len(parts) > ndim:
        return False
    reaches_last = Ellipsis in parts or len(parts) == ndim
    return not reaches_last or parts[-1] is Ellipsis or parts[-1] == slice(None)


def _cross_entropy(
    logits: _DeferredLogits,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: object = None,
    ignore_index: int = -100,
    reduce: object = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor | None:
    """Compute torch's cross entropy of deferred logits; None: what is asked needs them whole."""
    is_simple = weight is None and size_average is None and reduce is None and reduction in ("sum", "mean")
    if not is_simple or logits.ndim != 2 or target.ndim != 1 or target.is_floating_point():
        return None
    rows = DeferredRows(logits._head, logits._hidden, target, logits._per_row, ignore_index, label_smoothing)
    total = _compute(rows, logits._autocast)
    return total if reduction == "sum" else total / (target != ignore_index).sum()


def _compute(rows: DeferredRows, autocast: _Autocast) -> torch.Tensor:
    """Let the head compute the loss of its rows, within a call of its module."""
    head = rows.head
    with autocast.again(), head.gathering():
        total: torch.Tensor = head.module(rows.hidden, _Demand(lambda hidden: head.loss(rows._replace(hidden=hidden))))
    return total


def reduce_token_losses(logits: Logits, targets: torch.Tensor, reduce: Reduce, *, ignore_index: int) -> torch.Tensor:
    """Give the loss that `reduce` makes of the cross entropy of each row, without whole logits if they are deferred.

    Args:
        logits: logits of a model, of shape [..., vocabulary].
        targets: class indices, of shape [...].
        reduce: makes one loss of the losses of all rows, float32 of shape [rows]; it is called once.
        ignore_index: the class index of rows without a target.
    """
    flat, targets = logits.reshape(-1, logits.shape[-1]), targets.flatten()
    if isinstance(flat, _DeferredLogits) and flat._is_deferred:
        rows = DeferredRows(flat._head, flat._hidden, targets, flat._per_row, ignore_index, 0.0, reduce)
        return _compute(rows, flat._autocast)
    whole = _with_whole(flat, "reduce_token_losses").float()
    return reduce(nn.functional.cross_entropy(whole, targets, ignore_index=ignore_index, reduction="none"))


def sum_divergences(student: Logits, teacher: TeacherRows, targets: torch.Tensor, *, ignore_index: int) -> torch.Tensor:
    """Sum the divergences of a student from a teacher at the rows with a target, in nats; deferred logits stay so.

    Args:
        student: logits of the model that is trained, of shape [..., vocabulary].
        teacher: the teacher's distributions at the same rows, which are one dimension here.
        targets: class indices, of shape [...].
        ignore_index: the class index of rows without a target.
    """
    flat, targets = student.reshape(-1, student.shape[-1]), targets.flatten()
    if isinstance(flat, _DeferredLogits) and flat._is_deferred:
        rows = DeferredRows(flat._head, flat._hidden, targets, flat._per_row, ignore_index, 0.0, teacher=teacher)
        return _compute(rows, flat._autocast)
    whole = _with_whole(flat, "sum_divergences").float()
    return divergences(whole, teacher, targets != ignore_index).sum()


def teacher_rows(logits: Logits, *, beta: float) -> WholeRows:
    """Give a teacher's distributions by its logits; deferred logits stay so until they are compared.

    Args:
        logits: the teacher's logits without a graph, of shape [..., vocabulary]; the vocabulary has at least as many
            tokens as the student's.
        beta: which divergence, from 0 to 1: see `divergences_and_gradient`.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    if isinstance(flat, _DeferredLogits) and flat._is_deferred:
        return WholeRows(flat._hidden, flat._make, beta)
    return WholeRows(_with_whole(flat, "sum_divergences"), lambda rows: rows, beta)
