"""Split a tiny model at its blocks, run the stages under a schedule, and compare one step with the whole model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from hfdist.config.strategy import Schedule
from hfdist.errors import PartitionError
from hfdist.models.blocks import find_block_parts
from hfdist.pipeline.channel import P2PChannel
from hfdist.pipeline.pipeline import Pipeline
from hfdist.pipeline.probe import probe
from hfdist.pipeline.split import SplitModel, split_at_blocks
from hfdist.pipeline.stage_io import CARRIES, Carry
from hfdist.pipeline.timeline import Recorder
from tests.zoo.models import tiny_batch, tiny_model

Batch = dict[str, torch.Tensor]
Loss = Callable[[PreTrainedModel, Batch], torch.Tensor]
Gradients = dict[str, torch.Tensor | None]

TOLERANCE = 1e-5
"""Largest relative difference that is called exact."""

REFUSED = {
    "hrm_text": "carry no autograd graph",
    "reformer": "carry no autograd graph",
}
"""The only types that may be refused, and with what reason."""

NEEDS_MORE_THAN_TEXT = ("git", "musicgen", "musicgen_melody")
"""Types that train on text with images, or on codebooks, which the batches of `tiny_batch` have."""

RECOMPUTES = ("gemma3n_text", "gemma4", "gemma4_text", "hrm_text")
"""Types that write whole with a cache, and in stages without: blocks read others' keys, or run several times."""

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Run:
    """What one step gave: the loss of each micro batch, and the gradients under all names of each parameter."""

    losses: tuple[float, ...]
    gradients: Gradients


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of splitting one model."""

    model_type: str
    stages: tuple[range, ...]
    travels: str = ""
    """What goes from stage to stage, in words; empty: refused."""
    reason: str = ""
    """Why the model was refused."""
    loss_difference: float = 0.0
    """The largest over micro batches, relative to the loss of the whole model."""
    gradient_difference: float = 0.0
    """The largest over parameters: see `compare_gradients`."""
    worst_parameter: str = ""

    @property
    def verdict(self) -> str:
        """`exact`, `refused`, or `wrong`."""
        if self.reason:
            return "refused"
        # Not the other way around: a difference of NaN is no agreement.
        is_exact = self.loss_difference <= TOLERANCE and self.gradient_difference <= TOLERANCE
        return "exact" if is_exact else "wrong"


@contextmanager
def group_of_one() -> Iterator[None]:
    """A process group of this process alone, which runs all stages."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def even_stages(num_blocks: int, num_stages: int) -> tuple[range, ...]:
    """Cut into runs of as equal length as can be."""
    bounds = [round(stage * num_blocks / num_stages) for stage in range(num_stages + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(bounds))


def model_loss(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """The model's own."""
    return model(**batch).loss


def split_type(model_type: str, num_stages: int) -> Outcome:
    """Split a type's tiny model evenly, and run two micro batches through it."""
    model = tiny_model(model_type)
    stages = even_stages(len(find_block_parts(model)), num_stages)
    return split_model(model, stages, [tiny_batch(model, seed=seed) for seed in (1, 2)])


def split_model(
    model: PreTrainedModel,
    stages: tuple[range, ...],
    batches: Sequence[Batch],
    *,
    loss: Loss = model_loss,
    schedule: Schedule = Schedule.interleaved_1f1b,
    whole: Run | None = None,
) -> Outcome:
    """Run one step whole, unless that is given, then in stages, all of them in this process. Needs `group_of_one`.

    The model is afterwards as it was.
    """
    whole = whole or run_whole(model, batches, loss)
    cut = split_at_blocks(model, find_block_parts(model), stages, range(len(stages)))
    rank_of_stage = (0,) * len(stages)
    try:
        carry = find_carry(cut, batches[0], rank_of_stage)
    except PartitionError as error:
        return Outcome(model_type=model.config.model_type, stages=stages, reason=error.what)
    losses = run_stages(cut, carry, rank_of_stage, batches, loss=loss, schedule=schedule)
    gradient_difference, worst_parameter = compare_gradients(take_gradients(model), whole.gradients)
    return Outcome(
        model_type=model.config.model_type,
        stages=stages,
        travels=carry.describe(),
        loss_difference=compare_losses(losses, whole.losses),
        gradient_difference=gradient_difference,
        worst_parameter=worst_parameter,
    )


def find_carry(cut: SplitModel, batch: Batch, rank_of_stage: tuple[int, ...]) -> Carry:
    """Try what must travel, from the least to the most.

    Raises:
        PartitionError: nothing suffices; with all reasons.
    """
    link = P2PChannel(rank_of_stage, dist.group.WORLD, CPU)
    problems = []
    for carry in CARRIES:
        problem = probe(cut, carry, batch, link).problem
        if problem is None:
            return carry
        problems.append(problem)
    raise PartitionError("; ".join(dict.fromkeys(problems)))


def run_whole(model: PreTrainedModel, batches: Sequence[Batch], loss: Loss = model_loss) -> Run:
    """One step as one process does it, with gradients accumulated over the micro batches."""
    losses = [loss(model, batch) for batch in batches]
    for value in losses:
        value.backward()
    return Run(tuple(value.item() for value in losses), take_gradients(model))


def run_stages(
    cut: SplitModel,
    carry: Carry,
    rank_of_stage: tuple[int, ...],
    batches: Sequence[Batch],
    *,
    loss: Loss = model_loss,
    schedule: Schedule,
) -> tuple[float, ...]:
    """One step of this rank's stages. Gradients are left on the parameters; the losses are on the last stage's rank."""
    pipeline = Pipeline(
        {stage: cut.stage_module(stage, carry) for stage in cut.mine},
        schedule,
        P2PChannel(rank_of_stage, dist.group.WORLD, CPU),
        num_microbatches=len(batches),
        recorder=Recorder(rank=dist.get_rank(), device=CPU),
        splits_backward=not cut.model.is_activation_checkpointing,
    )
    return tuple(value.item() for value in pipeline.forward_backward([nullcontext(batch) for batch in batches], loss))


def take_gradients(model: PreTrainedModel) -> Gradients:
    """Take the gradients off the model."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}
    model.zero_grad(set_to_none=True)
    return gradients


def compare_losses(losses: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))


def compare_gradients(gradients: Gradients, expected: Gradients) -> tuple[float, str]:
    """Give the largest relative difference, and the parameter where it is.

    Relative to the largest element of the parameter's gradient, but at least to a thousandth of the largest of the
    model: rounding alone makes up a gradient that should be zero. A gradient on one side only is infinitely wrong.

    Args:
        gradients: of all parameters, or of those that one rank holds.
        expected: of the whole model.
    """
    least = 1e-3 * max(_largest(gradient) for gradient in expected.values() if gradient is not None)

    def difference(name: str) -> float:
        ours, whole = gradients[name], expected[name]
        if ours is None or whole is None:
            return 0.0 if ours is whole else math.inf
        return _largest(ours.float() - whole.float()) / max(_largest(whole), least)

    differences = {name: difference(name) for name in gradients}
    # NaN first: it compares as neither more nor less.
    worst = max(differences, key=lambda name: (math.isnan(differences[name]), differences[name]))
    return differences[worst], worst


def _largest(tensor: torch.Tensor) -> float:
    return tensor.abs().max().item()
