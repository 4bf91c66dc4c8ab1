"""Evaluation in the layout that trains: held-out loss that neither the batch size nor the number of ranks changes."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from accelerate.utils import find_batch_size
from transformers.trainer_utils import EvalLoopOutput

from hfdist.collectives import gather_json
from hfdist.models.routers import COUNTED
from hfdist.strategies.engine import Batch, Forward
from hfdist.trainer.step.convention import Convention
from hfdist.trainer.step.forwards import evaluating
from hfdist.trainer.step.loss import WeightedLoss
from hfdist.trainer.step.objective import Objective
from hfdist.trainer.training import Training

logger = logging.getLogger(__name__)

_LARGEST_EXPONENT = 700.0
"""The largest exponent of a perplexity: a float can hold e^700, and not e^710."""


class _Told(NamedTuple):
    """A figure that the log tells of an evaluation."""

    name: str
    """Name of the figure without its prefix, as in `eval_`."""
    label: str
    form: str
    """Format of the value."""


_TOLD = (
    _Told("loss", "loss", "{:.4f}"),
    _Told("perplexity", "perplexity", "{:.1f}"),
    _Told("reward", "reward", "{:.4f}"),
    _Told("completion_tokens", "tokens of an answer", "{:.1f}"),
    _Told("rewards/accuracies", "accuracy", "{:.1%}"),
    _Told("accuracies", "accuracy", "{:.1%}"),
    _Told("rewards/margins", "margin", "{:.4f}"),
    _Told("margins", "margin", "{:.4f}"),
    _Told("recall_at_1", "recall@1", "{:.1%}"),
    _Told("mrr", "MRR", "{:.4f}"),
    _Told("spearman", "rank correlation", "{:.4f}"),
    _Told("accuracy", "accuracy", "{:.1%}"),
    _Told("f1", "F1", "{:.4f}"),
)
"""Figures that are told in this order, those that an evaluation has."""


class Measure(Protocol):
    """A function that measures something besides the loss at an evaluation."""

    def __call__(self, forward: Forward, prefix: str) -> dict[str, float | None]:
        """Give figures by full names such as `eval_exact_match`, the same on all ranks. All ranks call it."""


class Evaluator:
    """Evaluates the model of a Trainer that has an engine.

    Args:
        training: the handle on the Trainer.
        weighted_loss: computes the losses of batches, and the number of their targets.
        find_convention: finds out, once, what the loss of batches like this one counts.
        objective: the loss that is trained in place of the model's own; None: the model's own is trained.
        measures: functions that measure something besides the loss.
    """

    def __init__(
        self,
        training: Training,
        weighted_loss: WeightedLoss,
        find_convention: Callable[[Batch, Forward], Convention],
        *,
        objective: Objective | None,
        measures: Sequence[Measure],
    ) -> None:
        self._training, self._weighted_loss, self._find_convention = training, weighted_loss, find_convention
        self._objective, self._measures = objective, measures
        self._num_rows = 0
        """Number of rows that the data ranks have evaluated."""

    def __call__(self, batches: Iterable[Batch] | Mapping[str, Iterable[Batch]], prefix: str) -> EvalLoopOutput:
        """Measure the held-out loss, and whatever else is to be measured. All ranks call it.

        Args:
            batches: a loader, or anything that gives batches; for several held-out sources one each, by name. All ranks
                have equally many batches, since ZeRO-3's forwards are collectives.
            prefix: first part of the figures' names, such as "eval".
        """
        loaders = batches if isinstance(batches, Mapping) else {"": batches}
        with evaluating(self._training) as forward:
            figures: dict[str, Any] = self._loss_figures(loaders, forward, prefix)
            if self._measures:
                with self._training.engine.gathered():
                    for measure in self._measures:
                        figures |= measure(forward, prefix)
        nothing: Any = None  # no predictions are kept, as with `prediction_loss_only`
        return EvalLoopOutput(predictions=nothing, label_ids=nothing, metrics=figures, num_samples=self._num_rows)

    def _loss_figures(
        self, loaders: Mapping[str, Iterable[Batch]], forward: Forward, prefix: str
    ) -> dict[str, float | int]:
        """Give the mean loss of all sources together and of each named one, and the objective's figures.

        Where batches have no labels, there are no figures.
        """
        objective = self._objective
        if objective is not None:
            objective.begin_evaluation(chain.from_iterable(loaders.values()), forward)
            if objective.evaluates_itself:
                return self._evaluate_examples(objective, forward, prefix)
        sums = self._sum_losses(loaders, forward)
        if sums is None:
            names = " and ".join(self._training.trainer.label_names)
            logger.warning("eval_dataset has no %s, so there is no %s_loss", names, prefix)
            return {}
        total, count = sums.sum(0).tolist()
        loss = total / count if count else math.nan
        figures: dict[str, float | int] = {f"{prefix}_loss": loss}
        convention = self._weighted_loss.convention
        if convention is not None and convention.is_of_tokens:
            figures |= {f"{prefix}_perplexity": perplexity(loss), f"{prefix}_tokens": int(count)}
        if objective is not None:
            figures |= objective.measure(prefix)
        self._tell(describe_figures(figures, prefix))
        for name, (part_total, part_count) in zip(loaders, sums.tolist(), strict=True):
            if name:
                figures[f"{prefix}_{name}_loss"] = part_total / part_count if part_count else math.nan
        return figures

    def _evaluate_examples(self, objective: Objective, forward: Forward, prefix: str) -> dict[str, float | int]:
        """Give the figures of an objective that evaluates examples in place of batches."""
        losses = objective.evaluate(forward)
        self._num_rows = len(losses)
        figures = {f"{prefix}_loss": sum(losses) / max(len(losses), 1)} | objective.measure(prefix)
        self._tell(describe_figures(figures, prefix))
        return {**figures}

    def _sum_losses(self, loaders: Mapping[str, Iterable[Batch]], forward: Forward) -> torch.Tensor | None:
        """Sum losses and count targets over all batches of all ranks; None: some batches have no labels.

        Gives float64 of shape [sources, 2].
        """
        training, trainer, objective = self._training, self._training.trainer, self._objective
        sums = torch.zeros((len(loaders), 2), dtype=torch.float64, device=training.args.device)
        is_labelled, num_rows = True, 0
        for source_sums, loader in zip(sums, loaders.values(), strict=True):
            trainer.callback_handler.eval_dataloader = loader
            for batch in loader:
                num_rows += num_counted_rows(batch)
                if objective is not None:
                    batch = objective.prepare(batch)
                is_labelled = is_labelled and self._gives_loss(batch)
                if is_labelled:
                    self._find_convention(batch, forward)
                    for total, count in forward(batch, self._weighted_loss.summed):
                        # A row of `sums`, changed in place.
                        source_sums += torch.stack([total, count.double()])
                control = trainer.callback_handler.on_prediction_step(trainer.args, trainer.state, trainer.control)
                trainer.control = control
        num_alike = trainer.args.world_size // training.strategy.topology.data
        self._num_rows = sum(gather_json(num_rows)) // num_alike
        if is_labelled and dist.is_initialized():
            dist.all_reduce(sums)
        return sums if is_labelled else None

    def _tell(self, description: str) -> None:
        logger.info("evaluated at step %d: %s", self._training.state.global_step, description)

    def _gives_loss(self, batch: Batch) -> bool:
        """Whether the model has all that its loss is computed from, as `Trainer.prediction_step` tells it."""
        names = self._training.trainer.label_names
        if not names:
            return "labels" in batch or bool(batch.get("return_loss", self._training.trainer.can_return_loss))
        return all(batch.get(name) is not None for name in names)


def num_counted_rows(batch: object) -> int:
    """Count the rows of a batch, without those that only fill it up; 0: it holds no tensor."""
    counted = batch.get(COUNTED) if isinstance(batch, Mapping) else None
    if counted is not None:
        return int(counted.any(-1).sum())
    return find_batch_size(batch) or 0


def describe_figures(figures: Mapping[str, float], prefix: str) -> str:
    """Give the figures of an evaluation that tell how good the model is, as one line of text."""
    shown = []
    for told in _TOLD:
        value = figures.get(f"{prefix}_{told.name}")
        # The loss of rewarded answers is the reward itself, negated.
        is_repeated = told.name == "loss" and f"{prefix}_reward" in figures
        if value is not None and not is_repeated:
            shown.append(f"{told.label} {told.form.format(value)}")
    return ", ".join(shown)


def perplexity(loss: float) -> float:
    """Give the perplexity of a mean token loss in nats."""
    return math.exp(min(loss, _LARGEST_EXPONENT))
