"""`model.loss`: what computes the training loss from hidden states, and whether this model allows it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from hfdist.config.model import Loss
from hfdist.config.run import RunConfig
from hfdist.config.train import Compile, Precision
from hfdist.errors import ConfigError, first_line
from hfdist.models.loss.chunked import ChunkedLoss, compute_dtype
from hfdist.models.loss.lazy_logits import Head, LogitsOperation, Rows, deferring
from hfdist.models.loss.shared_vocabulary import vocabulary_shard_of
from hfdist.models.partitioning import Partitioning
from hfdist.models.probing import run_small, small_model

logger = logging.getLogger(__name__)

_LOSS_BOUND, _GRADIENT_BOUND = 1e-5, 1e-4


class LossHead:
    """Defers the logits of training steps.

    Args:
        choice: what computes the loss; not `auto` or `full`.
        chunk_logits: logits that may exist at a time, in chunks; None: by the kind of device.
    """

    def __init__(self, choice: Loss, chunk_logits: int | None = None) -> None:
        self.choice = choice
        self._chunk_logits = chunk_logits
        self._chunked: dict[torch.device, ChunkedLoss] = {}
        self._is_over = False

    def deferring(self, model: nn.Module, *, evaluates: bool = False) -> AbstractContextManager[Any]:
        """Compute losses without whole logits in this context: of a model as the Trainer calls it, or of one stage.

        `evaluates`: also in evaluation mode and without gradients, where whoever calls the model wants no logits.
        """
        base: Any = model
        while not isinstance(base, PreTrainedModel):
            # DDP finds unused parameters from the tensors that a model returns; deferred logits are none.
            if isinstance(base, DistributedDataParallel) and base.find_unused_parameters and not base.static_graph:
                self._stop("ddp_find_unused_parameters needs them")
            base = base.module
        head = base.get_output_embeddings()
        if self._is_over or head is None or not (model.training or evaluates):
            return nullcontext()
        if not torch.is_grad_enabled() and any(isinstance(weight, DTensor) for weight in head.parameters()):
            # FSDP2 frees the head after a forward without gradients.
            return nullcontext()
        return self._watched(head, evaluates=evaluates)

    def _stop(self, why: str) -> None:
        if not self._is_over:
            self._is_over = True
            logger.warning("model.loss: all logits are held, since %s", why)

    @contextmanager
    def _watched(self, module: nn.Module, *, evaluates: bool) -> Iterator[Head]:
        # Other packages' kernels need all rows of the head, and only give sums.
        fused = None if vocabulary_shard_of(module) is not None else _FUSED.get(self.choice)

        def loss(rows: Rows) -> torch.Tensor:
            return self._by_chunks(rows) if fused is None or rows.reduce is not None else fused(rows)

        with deferring(module, _vocabulary(module), loss, evaluates=evaluates) as head:
            yield head
        if head.made_whole:
            # Right, but slower than to make them in the first place.
            self._stop(f"the loss needs them whole ({head.made_whole[0]})")

    def _by_chunks(self, rows: Rows) -> torch.Tensor:
        device = rows.hidden.device
        if device not in self._chunked:
            self._chunked[device] = ChunkedLoss(device, chunk_logits=self._chunk_logits)
        return self._chunked[device](rows)


def choose_loss(config: RunConfig, model: PreTrainedModel, layout: Partitioning, device_type: str) -> LossHead | None:
    """Find what computes the loss; None: the model by itself, from all logits.

    Args:
        config: of the run.
        model: whole or partitioned.
        layout: that of the run.
        device_type: `cpu` or `cuda`: where the run is to be.

    Raises:
        ConfigError: what the config asks for does not work here.
    """
    asked = config.model.loss
    if asked is Loss.full:
        return None
    choice = Loss.chunked if asked is Loss.auto else asked
    try:
        reason = _refuse_package(choice, device_type) or _refuse_run(config, model, layout)
        reason = reason or refuse_model(model, choice)
    except UntriedError as error:
        reason = str(error)
        if asked is not Loss.auto:
            logger.warning("model.loss: %s is taken as asked for, but %s", asked.value, reason)
            reason = None
    if reason is None:
        return LossHead(choice)
    if asked is not Loss.auto:
        what, hint = f"the loss cannot be computed so: {reason}", "model.loss=auto, which takes what works"
        raise ConfigError(what, where="model.loss", found=asked.value, hint=hint)
    logger.info("model.loss: the model's own, from all logits, since %s", reason)
    return None


def _refuse_package(choice: Loss, device_type: str) -> str | None:
    if choice not in _PACKAGES:
        return None
    if device_type != "cuda":
        return "its kernels need a GPU"
    # Only found, not imported: that takes seconds.
    return None if find_spec(_PACKAGES[choice]) is not None else f"{_PACKAGES[choice]} is not installed"


def _refuse_run(config: RunConfig, model: PreTrainedModel, layout: Partitioning) -> str | None:
    if config.train.compile is Compile.model:
        return "train.compile=model compiles the head with the rest"
    if config.train.precision is Precision.fp16:
        return "float16 gradients of losses that are summed, and not averaged, could overflow"
    head = model.get_output_embeddings()
    if head is None or not hasattr(head, "out_features"):
        return "the model's output embedding is no linear layer"
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in head.modules()):
        return "dropout in the head would draw other masks for each chunk"
    if layout.partitions_in_constructor and type(head) is not nn.Linear:
        return "ZeRO-3 gathers the layers of an adapted head one by one"
    return None


class UntriedError(Exception):
    """A small model of this class cannot be made or run."""


@unset_fake_temporarily()
def refuse_model(model: PreTrainedModel, choice: Loss = Loss.chunked) -> str | None:
    """Try a small model of the same class. Every rank does so by itself, and all ranks find the same.

    Returns:
        Why the model needs all its logits; None: it does not.

    Raises:
        UntriedError: the small model cannot be made or run.
    """
    seen: list[Rows] = []
    with torch.random.fork_rng(devices=[]):
        try:
            small = small_model(model)
            head = small.get_output_embeddings()
            vocabulary = _vocabulary(head)
            before = run_small(small)
        except Exception as error:  # whatever a model raises that cannot be made small
            raise UntriedError(f"it cannot be tried on a small {type(model).__name__}: {first_line(error)}") from error
        chunked = ChunkedLoss(torch.device("cpu"), chunk_logits=3 * vocabulary)

        def loss(rows: Rows) -> torch.Tensor:
            seen.append(rows)
            return chunked(rows)

        try:
            with deferring(head, vocabulary, loss) as deferred:
                after = run_small(small)
            used = deferred.made_whole[0] if deferred.made_whole else None if seen else "a loss of its own"
            if used is None and choice not in _PACKAGES:
                loss_difference = abs(after[0] - before[0]) / abs(before[0])
                gradient_difference = float((after[1] - before[1]).norm() / before[1].norm())
        except Exception as error:  # whatever a model raises that was given no tensor
            used = first_line(error)
    if used is not None:
        return f"{type(model).__name__} needs them whole ({used})"
    if choice in _PACKAGES:
        return next(filter(None, (_refuse_rows(choice, rows) for rows in seen)), None)
    if loss_difference <= _LOSS_BOUND and gradient_difference <= _GRADIENT_BOUND:
        return None
    return f"it differs: loss by {loss_difference:.1e}, gradients by {gradient_difference:.1e} of their norm"


def _vocabulary(head: Any) -> int:
    return int(head.out_features)


# ---- other packages' kernels for GPUs ----


def liger(rows: Rows) -> torch.Tensor:
    """Sum the losses by liger-kernel's own chunks; gradients of the weight are summed in float32."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    hidden, weight, bias = _operands(rows)
    # Positional, as autograd's functions have it: ... label_smoothing, reduction, softcap, return_z_loss, accum_dtype.
    smoothing = rows.label_smoothing
    given = (hidden, weight, rows.targets, bias, None, rows.ignore_index, 0.0, smoothing, "sum", _softcap(rows) or None)
    total: Any = LigerFusedLinearCrossEntropyFunction.apply(*given, False, torch.float32)
    return total[0] if isinstance(total, tuple) else total


def cut_cross_entropy(rows: Rows) -> torch.Tensor:
    """Sum the losses without any logits in memory. Keeps the small gradients that the package drops by default."""
    from cut_cross_entropy import linear_cross_entropy

    hidden, weight, _ = _operands(rows)
    settings: dict[str, Any] = {"ignore_index": rows.ignore_index, "softcap": _softcap(rows) or None}
    total: torch.Tensor = linear_cross_entropy(
        hidden, weight, rows.targets, reduction="sum", filter_eps=None, **settings
    )
    return total


_PACKAGES = {Loss.liger: "liger_kernel", Loss.cut_cross_entropy: "cut_cross_entropy"}
_FUSED = {Loss.liger: liger, Loss.cut_cross_entropy: cut_cross_entropy}


def _refuse_rows(choice: Loss, rows: Rows) -> str | None:
    """Say what of this loss the package does not compute; None: it computes all."""
    module: Any = rows.head.module
    if type(module) is not nn.Linear:
        return f"the head is a {type(module).__name__}"
    if _softcap(rows) is None:
        return "the model does more to its logits than to cap them"
    if choice is not Loss.cut_cross_entropy:
        return None
    if module.bias is not None:
        return "the head has a bias"
    return "labels are smoothed" if rows.label_smoothing != 0.0 else None


def _operands(rows: Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """In the type of the arithmetic; their gradients go back to the parameters' own."""
    module: Any = rows.head.module
    dtype = compute_dtype(rows.hidden)
    bias = None if module.bias is None else module.bias.to(dtype)
    return rows.hidden.to(dtype), module.weight.to(dtype), bias


def _softcap(rows: Rows) -> float | None:
    """The cap of the logits, 0 where there is none; None: something else is done to them."""
    match [step for step in rows.per_row if step.function is not torch.Tensor.to]:
        case []:
            return 0.0
        case [LogitsOperation(torch.div, (cap,)), LogitsOperation(torch.tanh, ()), LogitsOperation(torch.mul, (same,))]:
            return float(cap) if isinstance(cap, (int, float)) and cap == same else None
    return None
