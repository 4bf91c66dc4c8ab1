"""The handle on one Trainer, through which its parts reach what they share, each thing with its type.

A part takes this handle or less: an engine, a callable, the `transformers.Trainer` alone. No part knows the mixin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import cast

import torch
import transformers
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hfdist.data import TokenStream
from hfdist.models.loss import LossHead
from hfdist.strategies.base import Strategy
from hfdist.strategies.engine import Engine, TrainerHooks
from hfdist.watch.callback import watches_among


class Training:
    """The handle that the parts of one Trainer share. The Trainer makes it before its own constructor runs.

    transformers replaces most of what a Trainer has. A training begins with a new state, optimizer and schedule, the
    control is another one after each event, and each trial of a search has another model. So all these are properties
    that read the Trainer each time. A part does not keep what they give. The Trainer itself sets `made_engine` and
    `num_targets`. All the rest stays the same.

    Args:
        trainer: the Trainer, for its own methods: its loss, its log, how it moves a batch to the device.
        strategy: the layout; None: everything is as in the original class.
        head: computes losses without whole logits; None: the model computes them.
        hooks: gives the Trainer's methods that an engine may call, for a model as accelerate prepared it.
        paused: stops the clock that measures training, within a block.
        restart_figures: lets the figures of the next training line begin at the present step.
    """

    def __init__(
        self,
        trainer: transformers.Trainer,
        strategy: Strategy | None,
        *,
        head: LossHead | None = None,
        hooks: Callable[[nn.Module], TrainerHooks],
        paused: Callable[[], AbstractContextManager[None]],
        restart_figures: Callable[[], None],
    ) -> None:
        self.trainer, self.head = trainer, head
        self._strategy = strategy
        self.hooks, self.paused, self.restart_figures = hooks, paused, restart_figures
        self.made_engine: Engine | None = None
        """The engine of the present model; None: it is not made yet, or there is no strategy."""
        self.num_targets: torch.Tensor | int | None = None
        """Number of targets of the step that is under way, over all ranks; None: they are not counted."""

    @property
    def strategy(self) -> Strategy:
        """The layout, where there is one for certain."""
        assert self._strategy is not None
        return self._strategy

    @property
    def engine(self) -> Engine:
        """The engine of the present model, where there is one for certain."""
        assert self.made_engine is not None
        return self.made_engine

    @cached_property
    def device(self) -> torch.device:
        """The device of this process; kept, because `args.device` looks each time whether torch is installed."""
        return self.trainer.args.device

    @cached_property
    def num_gpus(self) -> int:
        """Number of GPUs of this process; kept, because `args.n_gpu` is as slow as `args.device`."""
        return self.trainer.args.n_gpu

    @property
    def image_names(self) -> tuple[str, ...]:
        """Keys of the batches from which a forward reads images; none where rows have no images."""
        images = None if self.stream is None else self.stream.images
        return () if images is None else images.forward_names

    # ---- what transformers replaces ----

    @property
    def args(self) -> TrainingArguments:
        """The arguments; a search changes them for each trial."""
        return self.trainer.args

    @property
    def model(self) -> nn.Module:
        """The model that the engine gave, or this rank's part of it."""
        return cast(nn.Module, self.trainer.model)

    @property
    def state(self) -> TrainerState:
        """The Trainer's state: how far the training is."""
        return self.trainer.state

    @property
    def control(self) -> TrainerControl:
        """The flags that say what the Trainer does next. A change of one holds until the next event."""
        return self.trainer.control

    @property
    def accelerator(self) -> Accelerator:
        """The accelerator, which prepares model, optimizer and loaders."""
        return self.trainer.accelerator

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer as accelerate prepared it; it exists once a training has begun."""
        assert self.trainer.optimizer is not None
        return self.trainer.optimizer

    @property
    def schedule(self) -> LRScheduler:
        """The schedule of the learning rate; it exists once a training has begun. DeepSpeed's has the same methods."""
        assert self.trainer.lr_scheduler is not None
        return self.trainer.lr_scheduler

    @property
    def callbacks(self) -> Sequence[TrainerCallback]:
        """The callbacks in their order."""
        return self.trainer.callback_handler.callbacks

    # ---- the data ----

    @property
    def stream(self) -> TokenStream | None:
        """The training data, if they are hfdist's own stream."""
        data: object = self.trainer.train_dataset
        return data if isinstance(data, TokenStream) else None

    def num_samples(self) -> int:
        """Give the number of sequences that the whole run has read; 0: no stream. Any one rank may call it."""
        stream = self.stream
        return 0 if stream is None else stream.num_samples

    # ---- for a while ----

    @contextmanager
    def waiting(self, doing: str) -> Iterator[None]:
        """Stop the clock within the block, and tell the watch what is done there, so that no rank passes for hung."""
        watches = watches_among(self.callbacks)
        before = [watch.progress.exempt for watch in watches]
        for watch in watches:
            watch.progress.exempt = doing
        try:
            with self.paused():
                yield
        finally:
            for watch, exempt in zip(watches, before, strict=True):
                watch.progress.exempt = exempt

    @contextmanager
    def without_epoch(self) -> Iterator[None]:
        """Let lines that are logged within the block have no epoch, if the data are a stream, which has none.

        The original takes the whole stream for one epoch, and so would log the share of the steps that are done.
        """
        epoch = self.state.epoch
        if self.stream is not None:
            self.state.epoch = cast(float, None)
        try:
            yield
        finally:
            self.state.epoch = epoch
