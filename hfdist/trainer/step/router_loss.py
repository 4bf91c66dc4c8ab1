"""The loss over a model's routers in one step, the same in every layout, and how evenly experts are chosen.

What a token adds depends on how often each expert is chosen in the global batch. So where a rank has several micro
batches, their forwards run once more beforehand, without gradients and with the same random numbers, to count that.

    one micro batch:   forward, count -> sum over ranks -> weights of the experts -> loss -> backward
    several:           forwards, count -> sum over ranks -> weights -> (forward, loss, backward) of each micro batch
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from hfdist.models.routers import COUNTED, Routers, RoutingSums, base_of
from hfdist.pipeline.stage_module import preserve_state
from hfdist.strategies.engine import Batch, TrainerHooks
from hfdist.trainer.step.loss import WeightedLoss
from hfdist.trainer.training import Training


@dataclass(frozen=True)
class _Counts:
    """What has been counted since the last reading. A table is [rows as in `RoutingSums`, experts], float64."""

    here: torch.Tensor
    """Table of what this rank has counted and not yet added to that of the others."""
    by_all: torch.Tensor
    """Table of what all ranks have counted, in the steps whose loss needs it."""
    num_steps: int
    """Number of the steps in `by_all`."""
    loss_sum: torch.Tensor
    """Sum of the steps' losses, before they are multiplied by the coefficient."""


class RouterLoss:
    """The loss over the routers of one Trainer's model. For a model without routers it does nothing.

    Args:
        training: the handle on the Trainer.
        weighted_loss: says which names labels have.
        sums_targets: whether the Trainer's loss is a sum over targets. A class with another loss adds what it likes
            for each micro batch.
    """

    def __init__(self, training: Training, weighted_loss: WeightedLoss, *, sums_targets: bool) -> None:
        self._training, self._weighted_loss, self._sums_targets = training, weighted_loss, sums_targets
        self._routers: Routers | None = None
        self._is_counting = False
        """Whether forwards run beforehand, to count choices alone."""
        self._is_agreed = False
        """Whether all ranks know how many experts there are: a stage may have no router."""
        self._batches: list[Batch] = []
        """Micro batches of the step, until they are counted."""
        self._counted: torch.Tensor | None = None
        """Which tokens of the present forward count; None: all."""
        self._weights: torch.Tensor | None = None
        """Weight of each expert in this step's loss; None: not known yet."""
        self.options: dict[str, object] = {}
        """Options with which the class calls the model; empty: none, and the model needs no labels."""

    def begin(self, model: nn.Module) -> None:
        """Watch the routers of a model that is ready for training, or this rank's part of it."""
        if self._routers is not None:
            self._routers.remove()
        routers = Routers(model)
        self._routers = routers if routers.num_layers else None
        if self._routers is None:
            return
        self._loss = routers.loss if self._sums_targets else replace(routers.loss, coefficient=0.0)
        self._is_counting = self._is_agreed = False
        self._batches, self._counted, self._weights = [], None, None
        device = self._training.args.device
        nothing = torch.zeros(routers.num_layers + 2, 0, dtype=torch.float64, device=device)
        self._counts = _Counts(nothing, nothing, 0, torch.zeros((), device=device))

    def begin_step(self, batches: list[Batch]) -> None:
        """Keep the micro batches of this rank's step, and note in each which tokens count."""
        if self._routers is None:
            return
        # Routings are added to this table in place.
        self._before = replace(self._counts, here=self._counts.here.clone())
        if not self._sums_targets:
            return
        for batch in batches:
            ids, mask = batch.get("input_ids"), batch.get("attention_mask")
            if ids is not None and COUNTED not in batch:
                all_tokens = torch.ones_like(ids, dtype=torch.bool)
                batch[COUNTED] = all_tokens if mask is None or mask.shape != ids.shape else mask.bool()
        self._batches, self._weights = list(batches), None

    def skip_step(self) -> None:
        """Leave the last step out of the figures."""
        if self._routers is not None:
            self._counts = replace(self._before, here=_widened(self._before.here, self._counts.here.shape[1]))

    def forget(self) -> None:
        """Begin the figures anew."""
        if self._routers is not None:
            counts = self._counts
            self._counts = _Counts(
                here=torch.zeros_like(counts.here),
                by_all=torch.zeros_like(counts.by_all),
                num_steps=0,
                loss_sum=torch.zeros_like(counts.loss_sum),
            )

    def training(self, hooks: TrainerHooks) -> AbstractContextManager[None]:
        """Watch the routers during forward and backward of a micro batch; the first of a step is a collective."""
        return nullcontext() if self._routers is None else self._watching(self._routers, hooks)

    @contextmanager
    def _watching(self, routers: Routers, hooks: TrainerHooks) -> Iterator[None]:
        routers.is_watching = True
        try:
            batches, self._batches = self._batches, []
            # A single forward tells all before its backward.
            if self._loss.coefficient and (len(batches) > 1 or self._training.strategy.topology.pipeline > 1):
                self._count_beforehand(batches, hooks)
            yield
        finally:
            routers.is_watching = False
            # Drop the routings of blocks that were run again in the backward.
            routers.take()

    def _count_beforehand(self, batches: list[Batch], hooks: TrainerHooks) -> None:
        """Run the forwards of a step for what routers choose, and add it up over the ranks. A collective."""
        self._is_counting = True
        if batches:
            # Before generators are preserved, which this may set.
            self._training.engine.begin(batches[0])
        with preserve_state(self._training.engine.model):
            for batch in batches:
                self._training.engine.run_forwards(batch, self._forward, hooks)
        self._is_counting = False
        if batches:
            self._sum_over_ranks()

    def _forward(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Run the model so that its routers choose; the value returned is 0 and means nothing."""
        trainer = self._training.trainer
        inputs = trainer._prepare_inputs(batch)
        counted = inputs.get(COUNTED)
        left_out = {COUNTED}
        if not self.options:
            left_out |= {*self._weighted_loss.label_names, "shift_labels"}
        inputs = {name: value for name, value in inputs.items() if name not in left_out}
        self.begin_forward(counted)
        with trainer.compute_loss_context_manager():
            model(**inputs, **self.options or self._without_logits())
        self.take()
        return torch.zeros(())

    def _without_logits(self) -> dict[str, object]:
        """Give options of a forward that computes logits of one token alone, unless the head draws random numbers."""
        base: Any = base_of(self._training.engine.model)
        head = base.get_output_embeddings()
        options = {"use_cache": False, "logits_to_keep": 1}
        if head is None or any(isinstance(module, nn.Dropout) for module in head.modules()):
            del options["logits_to_keep"]
        known = signature(base.forward).parameters
        return {name: value for name, value in options.items() if name in known}

    def begin_forward(self, counted: torch.Tensor | None) -> None:
        """Note which tokens of the next forward count; None: all. Before each forward, and `take` after it."""
        if self._routers is not None and self._routers.is_watching:
            self._routers.take()
            self._counted = counted

    def take(self) -> torch.Tensor | None:
        """Give what the last forward adds to the loss of the global batch, once; None: nothing."""
        routings = [] if self._routers is None else self._routers.take()
        if routings and self._counted is not None and not self._loss.coefficient:
            # A router of another kind may see other rows than tokens.
            routings = [routing for routing in routings if len(routing.logits) == self._counted.numel()]
        if not routings:
            return None
        if self._weights is None:
            self._widen(max(routing.logits.shape[-1] for routing in routings))
            self._loss.count(routings, self._counted, RoutingSums.of(self._counts.here))
        if self._is_counting or not self._loss.coefficient:
            return None
        if self._weights is None:
            self._sum_over_ranks()
        assert self._weights is not None
        return self._loss.share(routings, self._counted, self._weights)

    def _sum_over_ranks(self) -> None:
        """Learn from all ranks what they chose in this step."""
        whole = self._reduce()
        totals = RoutingSums.of(whole)
        self._weights = self._loss.weights(totals)
        self._counts = replace(
            self._counts,
            by_all=_widened(self._counts.by_all, whole.shape[1]) + whole,
            num_steps=self._counts.num_steps + 1,
            loss_sum=self._counts.loss_sum + self._weights @ totals.probabilities / self._loss.coefficient,
        )

    def _reduce(self) -> torch.Tensor:
        """Give the table that all ranks have counted; the ranks of a tensor group count the same. A collective."""
        if not self._is_agreed and dist.is_initialized():
            width = torch.tensor(self._counts.here.shape[1], device=self._counts.here.device)
            dist.all_reduce(width, op=dist.ReduceOp.MAX)
            self._widen(int(width))
        self._is_agreed = True
        whole = self._counts.here
        self._counts = replace(self._counts, here=torch.zeros_like(whole))
        if dist.is_initialized():
            dist.all_reduce(whole)
        return whole / self._training.trainer.get_tp_size()

    def read(self) -> dict[str, float]:
        """Give figures of the steps since the last reading, for a line of metrics. A collective."""
        if self._routers is None:
            return {}
        whole = self._counts.by_all if self._loss.coefficient else self._reduce()
        counts = RoutingSums.of(whole).choices
        counts = counts[counts.sum(1) > 0]
        if not len(counts):
            return {}
        loads = counts / counts.mean(1, keepdim=True)
        figures = {"expert_load_max": loads.amax(1).mean(), "expert_load_min": loads.amin(1).mean()}
        if self._counts.num_steps:
            figures["router_aux_loss"] = self._counts.loss_sum / self._counts.num_steps
        self.forget()
        return {name: float(value) for name, value in figures.items()}

    def _widen(self, num_experts: int) -> None:
        self._counts = replace(self._counts, here=_widened(self._counts.here, num_experts))


def _widened(totals: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Give a table with a column for each expert; new columns are 0."""
    missing = num_experts - totals.shape[1]
    return functional.pad(totals, (0, missing)) if missing > 0 else totals
