"""`model.loss`: what computes the training loss from hidden states, and whether this model allows it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from hfdist.config.model import Loss
from hfdist.config.run import RunConfig
from hfdist.config.train import Compile, Precision
from hfdist.errors import ConfigError, first_line
from hfdist.models.loss.chunked import ChunkedLoss
from hfdist.models.loss.deferred_rows import DeferredRows, DeferringHead
from hfdist.models.loss.lazy_logits import deferring
from hfdist.models.partitioning import Partitioning
from hfdist.models.probing import SmallRun, run_small, small_model

logger = logging.getLogger(__name__)

_LOSS_BOUND = 1e-5
"""Largest relative difference of a small model's loss: the sums are rounded in another order."""
_GRADIENT_BOUND = 1e-4
"""Largest norm of the difference of all gradients of a small model, as a share of their norm."""

FEW_LOGITS = 2**19
"""Up to so many logits of a micro batch, torch's own loss of whole logits is faster: by a third at half of them. All
that it holds then is less than one chunk of a CPU."""


class LossHead:
    """Defers the logits of training steps and evaluations, and computes the loss from some rows at a time.

    Args:
        chunk_logits: logits that may exist at a time; None: by the kind of device.
    """

    description = "chunked"

    def __init__(self, chunk_logits: int | None = None) -> None:
        self._chunk_logits = chunk_logits
        self._chunked: dict[torch.device, ChunkedLoss] = {}
        self._is_over = False

    def deferring(self, model: nn.Module) -> AbstractContextManager[object]:
        """Let the model compute its loss without whole logits, in this context.

        Whoever calls the model in the context wants the loss and not the logits, with gradients or without.

        Args:
            model: the model as the Trainer calls it, in its wrappers, or one stage of a pipeline.
        """
        base: Any = model
        while not isinstance(base, PreTrainedModel):
            # DDP finds unused parameters from the tensors that a model returns; deferred logits are none.
            if isinstance(base, DistributedDataParallel) and base.find_unused_parameters and not base.static_graph:
                self._stop("ddp_find_unused_parameters needs them")
            base = base.module
        head = base.get_output_embeddings()
        if self._is_over or head is None:
            return nullcontext()
        return self._watched(head, partial(_gathered, base, head))

    def _stop(self, why: str) -> None:
        if not self._is_over:
            self._is_over = True
            logger.warning("model.loss: all logits are held, since %s", why)

    @contextmanager
    def _watched(
        self, module: nn.Module, gathering: Callable[[], AbstractContextManager[object]]
    ) -> Iterator[DeferringHead]:
        with deferring(module, _vocabulary(module), self._by_chunks, gathering=gathering) as head:
            yield head
        if head.made_whole:
            # Right, but slower than to make them in the first place.
            self._stop(f"the loss needs them whole ({head.made_whole[0]})")

    def _by_chunks(self, rows: DeferredRows) -> torch.Tensor:
        device = rows.hidden.device
        if device not in self._chunked:
            self._chunked[device] = ChunkedLoss(device, chunk_logits=self._chunk_logits)
        return self._chunked[device](rows)


@contextmanager
def _gathered(model: nn.Module, head: nn.Module) -> Iterator[None]:
    """Gather the head with what FSDP2 shards beside it, in the model's own unit, if a forward has freed it.

    A collective: it is freed after forwards without gradients, which every rank runs.
    """
    if isinstance(model, FSDPModule) and any(isinstance(weight, DTensor) for weight in head.parameters()):
        model.unshard()
        try:
            yield
        finally:
            model.reshard()
    else:
        yield


def choose_loss(
    config: RunConfig, model: PreTrainedModel, layout: Partitioning, *, by_size: bool = True
) -> LossHead | None:
    """Choose what computes the training loss, as `model.loss` asks.

    Args:
        config: config of the run.
        model: the run's model, whole or partitioned.
        layout: how the run partitions the model.
        by_size: whether `model.loss=auto` takes whole logits where a micro batch has few of them.

    Returns:
        What computes the loss from some rows at a time; None: the model computes it by itself, from all logits.

    Raises:
        ConfigError: `model.loss=chunked` does not work with this run or this model.
    """
    asked = config.model.loss
    if asked is Loss.full:
        return None
    looks_at_size = asked is Loss.auto and by_size
    try:
        reason = _why_run_needs_logits(config, model, layout)
        if reason is None and looks_at_size and _has_few_logits(config, model, layout):
            reason = "a micro batch has few"
        if reason is None:
            reason = why_model_needs_logits(model)
    except UntriedError as error:
        reason = str(error)
        if asked is not Loss.auto:
            logger.warning("model.loss: %s is taken as asked for, but %s", asked.value, reason)
            reason = None
    if reason is None:
        return LossHead()
    if asked is not Loss.auto:
        what, hint = f"the loss cannot be computed so: {reason}", "model.loss=auto, which takes what works"
        raise ConfigError(what, where="model.loss", found=asked.value, hint=hint)
    logger.info("model.loss: the model's own, from all logits, since %s", reason)
    return None


def _why_run_needs_logits(config: RunConfig, model: PreTrainedModel, layout: Partitioning) -> str | None:
    """Say why this run must hold all logits; None: its config, its layout and the model's head allow deferred ones."""
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


def _has_few_logits(config: RunConfig, model: PreTrainedModel, layout: Partitioning) -> bool:
    """Whether a micro batch has so few logits that whole ones cost less: by the config, so alike on all ranks."""
    if layout.sharing_keys:
        # Plans count the gathers of a sharded head as deferred logits need them.
        return False
    if config.train.precision is not Precision.fp32:
        # In few bits, the gradient of whole logits is rounded more often.
        return False
    if config.task.name.traits.is_reinforcement:
        # The several answers to a prompt are rows of their own, so `micro_batch_size` does not count the rows.
        return False
    train = config.train
    rows = max(train.micro_batch_size, train.eval_micro_batch_size or 0) * config.data.sequence_length
    return rows * _vocabulary(model.get_output_embeddings()) <= FEW_LOGITS


class UntriedError(Exception):
    """A small model of this class cannot be made or run."""


@unset_fake_temporarily()
def why_model_needs_logits(model: PreTrainedModel) -> str | None:
    """Try a small model of the same class. Every rank does so by itself, and all ranks find the same.

    Args:
        model: the run's model, of which the class and the config are read.

    Returns:
        Why the model needs all its logits; None: it does not.

    Raises:
        UntriedError: the small model cannot be made or run.
    """
    with torch.random.fork_rng(devices=[]):
        try:
            small = small_model(model)
            head = small.get_output_embeddings()
            vocabulary = _vocabulary(head)
            expected = run_small(small)
        except Exception as error:  # whatever a model raises that cannot be made small
            raise UntriedError(f"it cannot be tried on a small {type(model).__name__}: {first_line(error)}") from error
        return _why_not_deferred(small, head, vocabulary, expected)


def _why_not_deferred(small: PreTrainedModel, head: nn.Module, vocabulary: int, expected: SmallRun) -> str | None:
    """Run a small model with deferred logits, and say why the run is not `expected`; None: it is."""
    name = type(small).__name__
    # Several chunks of three rows each.
    chunked = ChunkedLoss(torch.device("cpu"), chunk_logits=3 * vocabulary)
    computed: list[DeferredRows] = []

    def loss(rows: DeferredRows) -> torch.Tensor:
        computed.append(rows)
        return chunked(rows)

    try:
        with deferring(head, vocabulary, loss) as deferred:
            found = run_small(small)
        if deferred.made_whole:
            return f"{name} needs them whole ({deferred.made_whole[0]})"
        if not computed:
            return f"{name} needs them whole (a loss of its own)"
        loss_difference = abs(found.loss - expected.loss) / abs(expected.loss)
        gradient_difference = float((found.gradients - expected.gradients).norm() / expected.gradients.norm())
    except Exception as error:  # whatever a model raises that was given no tensor
        return f"{name} needs them whole ({first_line(error)})"
    if loss_difference <= _LOSS_BOUND and gradient_difference <= _GRADIENT_BOUND:
        return None
    return f"it differs: loss by {loss_difference:.1e}, gradients by {gradient_difference:.1e} of their norm"


def _vocabulary(head: Any) -> int:
    return int(head.out_features)
