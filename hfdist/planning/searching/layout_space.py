"""All layouts of so many processes that a run's own checks allow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product

from hfdist.config.checks.values import check_config
from hfdist.config.layout import Layout
from hfdist.config.run import RunConfig
from hfdist.config.strategy import Offload, Schedule, Sharding
from hfdist.errors import ConfigError
from hfdist.optim.registry import check_optimizer
from hfdist.pipeline.schedule import runs_microbatches, stages_per_rank
from hfdist.planning.searching.constants import MODES, ModelConstants
from hfdist.topology import MODEL_AXES

_MOST_STAGES_PER_RANK = 4
"""The most pipeline stages of a rank: more of them only send more."""
_LEAST_TOKENS = 128
"""The fewest tokens of a sequence that a rank of a context group has."""


def divisors(number: int, most: int | None = None) -> list[int]:
    """Give the divisors, the smallest first, up to `most`."""
    end = number if most is None else min(number, most)
    return [one for one in range(1, end + 1) if number % one == 0]


@dataclass(frozen=True)
class Space:
    """The layouts of one run on so many processes: first what a rank computes, then how state is sharded."""

    config: RunConfig
    model: ModelConstants
    processes: int
    per_machine: int
    _answers: dict[tuple[object, ...], bool] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Answers of the checks, by what they ask of a layout."""

    def grids(self) -> Iterator[Layout]:
        """Give layouts with degrees of all axes but `replicate`, and nothing else. Tensor ranks share a machine."""
        for tensor in divisors(self.processes, self.per_machine):
            for context in divisors(self.processes // tensor):
                if (tensor, 1) not in self.model.shares or not self._shares_sequences(context):
                    continue
                most_stages = self.model.num_blocks if self.model.has_pipelines else 1
                for pipeline in divisors(self.processes // (tensor * context), most_stages):
                    data = self.processes // (tensor * context * pipeline)
                    if self.config.train.global_batch_size % data != 0:
                        continue
                    for expert in divisors(data):
                        if (tensor, expert) in self.model.shares:
                            one = Layout(data=data, pipeline=pipeline, context=context, tensor=tensor, expert=expert)
                            yield one
                            if tensor in self.model.sequence_degrees and context * expert == 1:
                                yield replace(one, sequence=True)

    def _shares_sequences(self, context: int) -> bool:
        length = self.model.sequence_length
        fits = length % (2 * context) == 0 and length // context >= min(_LEAST_TOKENS, length // 2)
        return context == 1 or (self.model.shares_tokens and fits)

    def schedules(self, grid: Layout) -> Iterator[Layout]:
        """Give a grid with each schedule and number of stages."""
        if grid.pipeline == 1:
            yield grid
            return
        most = min(_MOST_STAGES_PER_RANK, self.model.num_blocks // grid.pipeline)
        for schedule in Schedule:
            for per_rank in range(1, most + 1):
                # What auto takes is one of the others.
                if schedule is not Schedule.auto and _runs(schedule, per_rank):
                    yield replace(grid, schedule=schedule, stages_per_rank=per_rank)

    def steps(self, layout: Layout) -> Iterator[Layout]:
        """Give a layout with each division of the step into micro batches, small ones first."""
        share = self.config.train.global_batch_size // layout.data
        for micro_batch_size in divisors(share):
            number = share // micro_batch_size
            if layout.pipeline == 1 or runs_microbatches(
                layout.schedule, layout.pipeline, layout.stages_per_rank, number
            ):
                yield replace(layout, micro_batch_size=micro_batch_size, num_microbatches=number)

    def shardings(self, layout: Layout, sharding: Sharding, offload: Offload) -> Iterator[Layout]:
        """Give a layout with this sharding and offloading, with each number of replicas."""
        for replicate in divisors(layout.data) if sharding is Sharding.fsdp2 else [1]:
            one = replace(layout, sharding=sharding, replicate=replicate, offload=offload)
            if one.shard % one.expert == 0 and _has_effect(one) and self._is_allowed(one):
                yield one

    def layouts(self) -> Iterator[Layout]:
        """Give all layouts without offloading, whether they fit or not."""
        for grid in self.grids():
            for scheduled, mode in product(self.schedules(grid), MODES):
                for layout in self.steps(replace(scheduled, recompute=mode)):
                    for sharding in Sharding:
                        yield from self.shardings(layout, sharding, Offload.none)

    def _is_allowed(self, layout: Layout) -> bool:
        # Checks ask whether a degree is more than one, not how much it is.
        like = tuple(getattr(layout, axis) > 1 for axis in ("replicate", *MODEL_AXES))
        key = (*like, layout.sequence, layout.sharding, layout.offload, layout.recompute, layout.micro_batch_size > 1)
        if key not in self._answers:
            self._answers[key] = passes_checks(layout.apply(self.config))
        return self._answers[key]


def passes_checks(config: RunConfig) -> bool:
    """Whether a run would take this config, as far as that shows before a model is made."""
    if config.strategy.deepspeed and not config.strategy.sharding.is_deepspeed:
        return False
    try:
        check_config(config)
        check_optimizer(config)
    except ConfigError:
        return False
    return True


def _has_effect(layout: Layout) -> bool:
    """Whether no other layout is the same thing: what is sharded over one rank is not sharded."""
    match layout.sharding:
        case Sharding.none:
            return layout.offload is Offload.none
        case Sharding.fsdp2:
            return layout.shard * layout.context > 1
    ranks = layout.data * (layout.context if layout.pipeline > 1 else 1)
    return ranks > 1 or layout.offload is Offload.cpu


@cache
def _runs(schedule: Schedule, per_rank: int) -> bool:
    try:
        return stages_per_rank(schedule, per_rank) == per_rank
    except ConfigError:
        return False
