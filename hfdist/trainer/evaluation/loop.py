"""Evaluation in the layout that trains: held-out loss that neither the batch size nor the number of ranks changes."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.trainer_utils import EvalLoopOutput

from hfdist.data import HeldOutSources
from hfdist.errors import ConfigError
from hfdist.strategies.base import Batch, Forward
from hfdist.topology import Topology
from hfdist.trainer.step.micro_batch import sum_of_losses
from hfdist.trainer.step.sharded_dataloader import CountedRows, CountingCollator, ShardedBatches

# A trainer is Any here: transformers declares all its parts as optional, and they exist by the time of an evaluation.

logger = logging.getLogger(__name__)

Loaders = Mapping[str, DataLoader[Any]]
"""Of each held-out source; one alone has no name."""

_LARGEST_EXPONENT = 700.0


class Measure(Protocol):
    """What else is measured at an evaluation."""

    def __call__(self, forward: Forward, prefix: str) -> dict[str, float | None]:
        """Give figures by full names such as `eval_exact_match`; on all ranks the same. Called on all ranks."""


def sharded_batches(dataset: Any, *, topology: Topology, micro_batch_size: int, collator: CountingCollator) -> Any:
    """Give this rank's batches of a map-style dataset: equally many on each, since ZeRO-3's forwards are collectives.

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
        batches = BatchSampler(SequentialSampler(part), micro_batch_size, drop_last=False)
        # A loader draws a seed for its workers, also without any: not from the generator that training draws from.
        return DataLoader(
            CountedRows(part),
            batch_sampler=ShardedBatches(batches, topology),
            collate_fn=collator,
            generator=torch.Generator(),
        )

    if isinstance(dataset, HeldOutSources):
        return {name: load(part) for name, part in dataset.parts.items()}
    return load(dataset)


def evaluate(trainer: Any, batches: Any, prefix: str) -> EvalLoopOutput:
    """Measure the held-out loss, and whatever else `trainer.measures` names. Call on all ranks.

    Args:
        trainer: with an engine.
        batches: from `sharded_batches`.
        prefix: of the figures' names.
    """
    loaders: Loaders = batches if isinstance(batches, Mapping) else {"": batches}
    with evaluating(trainer) as forward:
        figures: dict[str, Any] = _loss_figures(trainer, loaders, forward, prefix)
        for measure in trainer.measures:
            figures |= measure(forward, prefix)
    nothing: Any = None  # no predictions are kept, as with `prediction_loss_only`
    num_samples = sum(len(cast(Sized, loader.dataset)) for loader in loaders.values())
    return EvalLoopOutput(predictions=nothing, label_ids=nothing, metrics=figures, num_samples=num_samples)


@contextmanager
def evaluating(trainer: Any) -> Iterator[Forward]:
    """Switch the model from training to evaluation, stop the clock, and give what runs forwards."""
    model = _model_for_evaluation(trainer)

    def forward(batch: Batch, function: Callable[[nn.Module, Batch], Any]) -> list[Any]:
        def call(module: nn.Module, part: Batch) -> Any:
            with _autocast(trainer):
                return function(module, trainer._prepare_inputs(part))

        values: list[Any] = trainer.engine.forward(batch, call, trainer._defaults(model))
        return values

    # As in the original it stays so until the next step: what logs the metrics may read it off the model.
    model.eval()
    with trainer.throughput.paused():
        yield forward


def _model_for_evaluation(trainer: Any) -> nn.Module:
    """The model as it is trained; before training, as it is."""
    if not _is_before_deepspeed(trainer):
        # DDP's wrapper only matters for backward, and would make ranks wait for each other.
        return cast(nn.Module, trainer.model_wrapped if trainer.is_deepspeed_enabled else trainer.model)
    if is_deepspeed_zero3_enabled():
        raise ConfigError(
            "evaluate() before train() is not possible: each process has a part of every parameter, "
            "and DeepSpeed puts them together once it has the optimizer",
            hint="TrainingArguments(eval_on_start=True), or another strategy such as zero2",
        )
    # DeepSpeed would move it.
    return cast(nn.Module, trainer.model.to(trainer.args.device))


def _is_before_deepspeed(trainer: Any) -> bool:
    return trainer.is_deepspeed_enabled and trainer.model_wrapped is trainer.model


def _autocast(trainer: Any) -> AbstractContextManager[Any]:
    """What training computes in; before DeepSpeed rounds the weights, the same as in layouts without it."""
    args = trainer.args
    if not _is_before_deepspeed(trainer):
        return cast(AbstractContextManager[Any], trainer.accelerator.autocast())
    dtype = torch.float16 if args.fp16 else torch.bfloat16
    return torch.autocast(args.device.type, dtype, enabled=args.fp16 or args.bf16)


def _loss_figures(trainer: Any, loaders: Loaders, forward: Forward, prefix: str) -> dict[str, float | int]:
    """Sum losses and targets over all batches of all ranks, each source by itself; without labels there is no loss."""
    # Of each source: the sum of the losses, and the number of targets.
    sums = torch.zeros((len(loaders), 2), dtype=torch.float64, device=trainer.args.device)
    is_labelled = True
    for own, loader in zip(sums, loaders.values(), strict=True):
        trainer.callback_handler.eval_dataloader = loader
        for batch in loader:
            is_labelled = is_labelled and _gives_loss(trainer, batch)
            if is_labelled:
                trainer.find_convention(batch, forward)
                for total, count in forward(batch, partial(sum_of_losses, trainer)):
                    own += torch.stack([total, count.double()])
            trainer.control = trainer.callback_handler.on_prediction_step(trainer.args, trainer.state, trainer.control)
    if not is_labelled:
        logger.warning("eval_dataset has no %s, so there is no %s_loss", " and ".join(trainer.label_names), prefix)
        return {}
    if dist.is_initialized():
        dist.all_reduce(sums)
    total, count = sums.sum(0).tolist()
    loss = total / count if count else math.nan
    figures: dict[str, float | int] = {f"{prefix}_loss": loss}
    said = f"loss {loss:.4f}"
    if trainer.convention is not None and trainer.convention.is_of_tokens:
        figures |= {f"{prefix}_perplexity": perplexity(loss), f"{prefix}_tokens": int(count)}
        said += f", perplexity {perplexity(loss):.1f}"
    logger.info("evaluated at step %d: %s", trainer.state.global_step, said)
    for name, (part_total, part_count) in zip(loaders, sums.tolist(), strict=True):
        if name:
            figures[f"{prefix}_{name}_loss"] = part_total / part_count if part_count else math.nan
    return figures


def _gives_loss(trainer: Any, batch: Any) -> bool:
    """Whether the model has all that its loss is computed from, as `Trainer.prediction_step` tells it."""
    names = trainer.label_names
    if not names:
        return "labels" in batch or bool(batch.get("return_loss", trainer.can_return_loss))
    return all(batch.get(name) is not None for name in names)


def perplexity(loss: float) -> float:
    """Of a mean token loss in nats."""
    return math.exp(min(loss, _LARGEST_EXPONENT))
