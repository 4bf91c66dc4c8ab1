"""`model.loss`: by what a run computes its training loss from hidden states, and whether this model lets it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from hfdist.config.model import Loss
from hfdist.config.run import RunConfig
from hfdist.config.train import Compile, Precision
from hfdist.errors import ConfigError
from hfdist.models.loss import kernels
from hfdist.models.loss.chunked import ChunkedLoss
from hfdist.models.loss.lazy_logits import Head, Rows, SumOfLosses, deferring
from hfdist.models.probing.tiny_config import shrink

logger = logging.getLogger(__name__)

_TOKENS, _LOSS_BOUND, _GRADIENT_BOUND = 16, 1e-5, 1e-4


class LossHead:
    """Defers the logits of training steps.

    Args:
        choice: what computes the loss; not `auto` or `full`.
    """

    def __init__(self, choice: Loss) -> None:
        self.choice = choice
        self._chunked: dict[torch.device, ChunkedLoss] = {}
        self._is_over = False

    def deferring(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Let the model's losses be computed without whole logits, in this context.

        Args:
            model: as the Trainer calls it, or one stage of it.
        """
        base: Any = model
        while not isinstance(base, PreTrainedModel):
            if isinstance(base, DistributedDataParallel) and base.find_unused_parameters and not base.static_graph:
                self._say_that_ddp_looks_for_tensors()
            base = base.module
        head = base.get_output_embeddings()
        if self._is_over or head is None or not model.training:
            return nullcontext()
        return self._watched(head)

    def _say_that_ddp_looks_for_tensors(self) -> None:
        """DDP tells what is unused from the tensors that a model gives; deferred logits are none."""
        if not self._is_over:
            self._is_over = True
            logger.warning("model.loss: all logits are held, since ddp_find_unused_parameters needs them")

    @contextmanager
    def _watched(self, module: nn.Module) -> Iterator[Head]:
        with deferring(module, _vocabulary(module), self._loss) as head:
            yield head
        if head.made_whole:
            # Right, but slower than to make them at once.
            self._is_over = True
            logger.warning("model.loss: all logits are held, since the loss needs them whole (%s)", head.made_whole[0])

    @property
    def _loss(self) -> SumOfLosses:
        match self.choice:
            case Loss.liger:
                return kernels.liger
            case Loss.cut_cross_entropy:
                return kernels.cut_cross_entropy
            case _:
                return self._by_chunks

    def _by_chunks(self, rows: Rows) -> torch.Tensor:
        device = rows.hidden.device
        if device not in self._chunked:
            self._chunked[device] = ChunkedLoss(device)
        return self._chunked[device](rows)


def choose_loss(config: RunConfig, model: PreTrainedModel) -> LossHead | None:
    """Find what computes the loss; None: the model by itself, from all logits.

    Args:
        config: of the run.
        model: whole or cut.

    Raises:
        ConfigError: what the config asks for cannot be had here.
    """
    asked = config.model.loss
    if asked is Loss.full:
        return None
    choice = Loss.chunked if asked is Loss.auto else asked
    try:
        reason = _refuse_package(choice) or _refuse_run(config, model) or refuse_model(model, choice)
    except UntriedError as error:
        reason = str(error)
        if asked is not Loss.auto:
            logger.warning("model.loss: %s is taken as asked for, but %s", asked.value, reason)
            reason = None
    if reason is None:
        return LossHead(choice)
    if asked is not Loss.auto:
        raise ConfigError(
            f"the loss cannot be computed so: {reason}",
            where="model.loss",
            found=asked.value,
            hint="model.loss=auto, which takes what works",
        )
    logger.info("model.loss: the model's own, from all logits, since %s", reason)
    return None


def _refuse_package(choice: Loss) -> str | None:
    if choice not in kernels.PACKAGES:
        return None
    if not torch.cuda.is_available():
        return "its kernels need a GPU"
    return None if kernels.is_installed(choice) else f"{kernels.PACKAGES[choice]} is not installed"


def _refuse_run(config: RunConfig, model: PreTrainedModel) -> str | None:
    if config.train.compile is Compile.model:
        return "train.compile=model compiles the head with the rest"
    if config.train.precision is Precision.fp16:
        return "float16 gradients of losses that are summed, and not averaged, could overflow"
    head = model.get_output_embeddings()
    if head is None or not hasattr(head, "out_features"):
        return "the model's output embedding is no linear layer"
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in head.modules()):
        return "dropout in the head would draw other masks for each chunk"
    if is_deepspeed_zero3_enabled() and type(head) is not nn.Linear:
        return "ZeRO-3 gathers the layers of an adapted head one by one"
    return None


class UntriedError(Exception):
    """A model cannot be made small, or not be run so."""


def refuse_model(model: PreTrainedModel, choice: Loss = Loss.chunked) -> str | None:
    """Ask a small model of the same class, here and alone: whatever the layout, all ranks find the same.

    Returns:
        Why the model needs all its logits; None: it does not.

    Raises:
        UntriedError: that cannot be told without the model itself.
    """
    with torch.random.fork_rng(devices=[]):
        try:
            small = small_model(model)
            head = small.get_output_embeddings()
            vocabulary = _vocabulary(head)
            before = run_small(small)
        except Exception as error:  # whatever a model raises that cannot be made small
            raise UntriedError(f"it cannot be tried on a small {type(model).__name__}: {_first_line(error)}") from error
        seen: list[Rows] = []
        chunked = ChunkedLoss(torch.device("cpu"), chunk_logits=3 * vocabulary)

        def loss(rows: Rows) -> torch.Tensor:
            seen.append(rows)
            return chunked(rows)

        try:
            with deferring(head, vocabulary, loss) as deferred:
                after = run_small(small)
            used = deferred.made_whole[0] if deferred.made_whole else None if seen else "a loss of its own"
            different = None if used is not None or choice in kernels.PACKAGES else _difference(before, after)
        except Exception as error:  # whatever a model raises that was given no tensor
            used = _first_line(error)
    if used is not None:
        return f"{type(model).__name__} needs them whole ({used})"
    if choice in kernels.PACKAGES:
        return next(filter(None, (kernels.refuse_rows(choice, rows) for rows in seen)), None)
    return different


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def small_model(model: PreTrainedModel) -> PreTrainedModel:
    """Make a small model of the same class, whole and on the CPU."""
    config = shrink(model.config)
    # Made on a CPU, where no other implementation needs to be at hand.
    config._attn_implementation = "eager"
    # By its constructor: `from_config` would let ZeRO-3 cut it.
    small = type(model)(copy.deepcopy(config))
    return small.float().eval()


def _vocabulary(head: Any) -> int:
    return int(head.out_features)


def run_small(model: PreTrainedModel) -> tuple[float, torch.Tensor]:
    """Loss and all gradients of a few tokens, of which some are no targets."""
    generator = torch.Generator().manual_seed(0)
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    tokens = torch.randint(min(vocab_size, 100), (2, _TOKENS), generator=generator)
    labels = tokens.clone()
    labels[0, 4:7] = -100
    model.zero_grad()
    loss = model(input_ids=tokens, labels=labels).loss
    loss.backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return float(loss.detach()), torch.cat(gradients)


def _difference(before: tuple[float, torch.Tensor], after: tuple[float, torch.Tensor]) -> str | None:
    loss = abs(after[0] - before[0]) / abs(before[0])
    gradient = float((after[1] - before[1]).norm() / before[1].norm())
    if loss <= _LOSS_BOUND and gradient <= _GRADIENT_BOUND:
        return None
    return f"it differs: loss by {loss:.1e}, gradients by {gradient:.1e} of their norm"
