"""Evaluation in the layout that trains: held-out loss that neither the batch size nor the number of ranks changes."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers.trainer_utils import EvalLoopOutput

from hfdist.data import HeldOutSources
from hfdist.errors import ConfigError
from hfdist.strategies.base import Batch
from hfdist.topology import Topology
from hfdist.trainer.dealing import CountingCollator
from hfdist.trainer.greedy import Forward
from hfdist.trainer.micro_batch import sum_of_losses

# A trainer is Any here: transformers declares all its parts as optional, and they exist by the time of an evaluation.

logger = logging.getLogger(__name__)

Loaders = Mapping[str, DataLoader[Any]]
"""Of each held-out source; one alone has no name."""

_LARGEST_EXPONENT = 700.0


class Measure(Protocol):
    """What else is measured at an evaluation."""

    def __call__(self, forward: Forward, prefix: str) -> dict[str, float | None]:
        """Give figures by full names such as `eval_exact_match`; on all ranks the same. Called on all ranks."""


class DealtItems(Dataset[tuple[Any, bool]]):
    """Every data_size-th item of a dataset, filled up to the same number on each rank.

    Under ZeRO-3 every forward is a collective, so all ranks must run equally many. Items come with whether they count.
    """

    def __init__(self, dataset: Any, topology: Topology, micro_batch_size: int) -> None:
        self._dataset = dataset
        self._rank, self._size = topology.data_rank, topology.data_size
        self.num_items = len(dataset)
        """Of all ranks together."""
        largest_share = -(-self.num_items // self._size)
        self._length = -(-largest_share // micro_batch_size) * micro_batch_size

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Any, bool]:
        place = index * self._size + self._rank
        counts = place < self.num_items
        return self._dataset[place if counts else 0], counts


def dealt_batches(
    dataset: Any, *, topology: Topology, micro_batch_size: int, collate: Callable[[list[Any]], Any]
) -> Any:
    """Give this rank's batches of a map-style dataset; labels of items that only fill up are ignored.

    Returns:
        A DataLoader; of several held-out sources one of each, by name.
    """

    def load(part: Any) -> DataLoader[Any]:
        if not hasattr(part, "__len__"):
            raise ConfigError(
                "held-out data need a length: all ranks must run equally many batches",
                where="eval_dataset",
                found=type(part).__name__,
                hint="a map-style dataset, such as list(dataset)",
            )
        items = DealtItems(part, topology, micro_batch_size)
        # A loader draws a seed for its workers, also without any: not from the generator that training draws from.
        generator = torch.Generator()
        return DataLoader(items, batch_size=micro_batch_size, collate_fn=CountingCollator(collate), generator=generator)

    if isinstance(dataset, HeldOutSources):
        return {name: load(part) for name, part in dataset.parts.items()}
    return load(dataset)


def evaluate(trainer: Any, batches: Any, prefix: str) -> EvalLoopOutput:
    """Measure the held-out loss, and whatever else `trainer.measures` names. Call on all ranks.

    Args:
        trainer: with an engine.
        batches: from `dealt_batches`.
        prefix: of the figures' names.
    """
    loaders: Loaders = batches if isinstance(batches, Mapping) else {"": batches}
    with evaluating(trainer) as forward:
        figures: dict[str, Any] = _loss_figures(trainer, loaders, forward, prefix)
        for measure in trainer.measures:
            figures |= measure(forward, prefix)
    nothing: Any = None  # no predictions are kept, as with `prediction_loss_only`
    num_samples = sum(_num_items(loader.dataset) for loader in loaders.values())
    return EvalLoopOutput(predictions=nothing, label_ids=nothing, metrics=figures, num_samples=num_samples)


def _num_items(dataset: Any) -> int:
    """Of all ranks together; a class may bring a loader of its own."""
    return dataset.num_items if isinstance(dataset, DealtItems) else len(dataset)


@contextmanager
def evaluating(trainer: Any) -> Iterator[Forward]:
    """Switch the model from training to evaluation, stop the clock, and give what runs forwards."""
    model = _model_for_evaluation(trainer)

    def forward(batch: Batch, function: Callable[[nn.Module, Batch], Any]) -> list[Any]:
        def call(module: nn.Module, part: Batch) -> Any:
            with trainer.accelerator.autocast():
                return function(module, trainer._prepare_inputs(part))

        values: list[Any] = trainer.engine.forward(batch, call, trainer._defaults(model))
        return values

    # As in the original it stays so until the next step: what logs the metrics may read it off the model.
    model.eval()
    with trainer.throughput.paused():
        yield forward


def _model_for_evaluation(trainer: Any) -> nn.Module:
    """The model as it is trained; before training, wrapped as training would."""
    if trainer.model_wrapped is trainer.model and trainer.is_deepspeed_enabled:
        raise ConfigError(
            "evaluate() before train() is not possible: DeepSpeed makes its engine with the optimizer",
            hint="call train() first, or evaluate with strategy=single or strategy=ddp",
        )
    # DDP's wrapper only matters for backward, and would make ranks wait for each other.
    return cast(nn.Module, trainer.model_wrapped if trainer.is_deepspeed_enabled else trainer.model)


def _loss_figures(trainer: Any, loaders: Loaders, forward: Forward, prefix: str) -> dict[str, float | int]:
    """Sum losses and targets over all batches of all ranks, each source by itself."""
    losses = partial(sum_of_losses, trainer)
    # Of each source: the sum of the token losses, and their number.
    sums = torch.zeros((len(loaders), 2), dtype=torch.float64, device=trainer.args.device)
    for own, batches in zip(sums, loaders.values(), strict=True):
        for batch in batches:
            for total, count in forward(batch, losses):
                own += torch.stack([total, count.double()])
    if dist.is_initialized():
        dist.all_reduce(sums)
    total, count = sums.sum(0).tolist()
    loss = total / count if count else math.nan
    logger.info("evaluated at step %d: loss %.4f, perplexity %.1f", trainer.state.global_step, loss, perplexity(loss))
    figures = {f"{prefix}_loss": loss, f"{prefix}_perplexity": perplexity(loss), f"{prefix}_tokens": int(count)}
    for name, (part_total, part_count) in zip(loaders, sums.tolist(), strict=True):
        if name:
            figures[f"{prefix}_{name}_loss"] = part_total / part_count if part_count else math.nan
    return figures


def perplexity(loss: float) -> float:
    """Of a mean token loss in nats."""
    return math.exp(min(loss, _LARGEST_EXPONENT))
