"""The best layouts of a run on so many processes, of all that its own checks allow, and the fewest processes that fit.

The search goes from what a rank computes to how state is sharded. Two bounds cut it short. Of memory: micro batches
only need more as they grow, so that none is looked at after the first that does not fit in any sharding. Of time:
layouts are looked at in the order of the seconds that they take at the least, until that is more than the worst of the
best ones takes.
"""

from __future__ import annotations

import logging
import warnings
from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from heapq import heapify, heappop
from math import inf

from transformers import PreTrainedConfig

from hfdist.config.checks.preflight import plan_run
from hfdist.config.layout import Layout
from hfdist.config.run import RunConfig
from hfdist.config.strategy import Offload, Sharding
from hfdist.errors import ConfigError, ResourceError
from hfdist.pipeline.schedule import stages_per_rank
from hfdist.planning.searching.constants import MODES, ModelConstants
from hfdist.planning.searching.evaluate import Candidate, Evaluator, Machines
from hfdist.planning.searching.layout_space import Space, divisors
from hfdist.planning.searching.short_traces import measure_constants
from hfdist.planning.tracing.memory import fullest_pipeline, trace_rank

logger = logging.getLogger(__name__)

_MOST_TRACED, _MOST_TRACED_BLOCKS = 3, 40
"""Layouts that are traced, and all blocks of these."""
_MOST_PROCESSES = 2**17
"""The most processes that `fewest_processes` tries."""


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The best layouts that fit, the fastest first, and how much was looked at."""

    candidates: tuple[Candidate, ...]
    num_bounded: int
    """Ways to compute a step whose bounds were found."""
    num_pruned: int
    """Ways to compute a step that do not fit in any sharding; larger micro batches are not counted after them."""
    num_evaluated: int
    """Layouts whose time was computed."""


def search(
    config: RunConfig,
    architecture: PreTrainedConfig,
    machines: Machines,
    *,
    processes: int,
    best: int = 10,
) -> SearchResult:
    """Give the fastest layouts of a run that fit, the first of them by traces, the others by formulas.

    The first three are traced, of a model of many blocks fewer, since a trace takes as long as its blocks are many.

    Args:
        config: of the run; its layout, micro batches and activation checkpointing are what is chosen.
        architecture: from `find_architecture`, with the vocabulary of the tokenizer.
        machines: where it is to run.
        processes: how many ranks.
        best: how many layouts to give at the most.

    Raises:
        ConfigError: as the run itself would on one process.
    """
    model = measure(config, architecture, machines, processes=processes)
    found = search_layouts(config, model, machines, processes=processes, best=best)
    number = min(_MOST_TRACED, _MOST_TRACED_BLOCKS // max(1, model.num_blocks))
    return replace(found, candidates=confirm(found.candidates, architecture, model, machines, number=number))


def measure(
    config: RunConfig,
    architecture: PreTrainedConfig,
    machines: Machines,
    *,
    processes: int | None = None,
    as_asked: bool = False,
) -> ModelConstants:
    """Trace the constants that a search over so many processes needs; None: over any number.

    `as_asked`: and those of the layout that `config` asks for; ConfigError: the model does not divide so.
    """
    degrees, is_gpu = divisors(processes or machines.per_machine, machines.per_machine), not machines.hardware.is_cpu
    return measure_constants(config, architecture, is_gpu=is_gpu, tensor_degrees=degrees, as_asked=as_asked)


def search_layouts(
    config: RunConfig, model: ModelConstants, machines: Machines, *, processes: int, best: int = 10
) -> SearchResult:
    """Give the fastest layouts that fit, by formulas.

    Args:
        config: of the run; its layout, micro batches and activation checkpointing are what is chosen.
        model: what `measure_constants` found for it.
        machines: where it is to run.
        processes: how many ranks.
        best: how many layouts to give at the most.
    """
    space = Space(config, model, processes, machines.per_machine)
    evaluator = Evaluator(config, model, machines)
    search = _Search(space, evaluator, best)
    # What steps on a host cost is not known: offloading is for what does not fit without.
    search.run(Offload.none)
    if not search.found:
        search.run(Offload.cpu)
    return SearchResult(
        candidates=tuple(search.found),
        num_bounded=search.num_bounded,
        num_pruned=search.num_pruned,
        num_evaluated=search.num_evaluated,
    )


class _Search:
    """The best layouts so far: for each way to compute a step and each sharding, the best number of replicas."""

    def __init__(self, space: Space, evaluator: Evaluator, best: int) -> None:
        self._space, self._evaluator, self._best = space, evaluator, best
        self.found: list[Candidate] = []
        self.num_bounded = self.num_pruned = self.num_evaluated = 0

    def run(self, offload: Offload) -> None:
        """Look at all layouts with or without offloading."""
        queue = self._bounded(offload)
        self.num_bounded += len(queue)
        heapify(queue)
        while queue:
            least, _, layout = heappop(queue)
            if least >= self._worst:
                break
            if self._evaluator.least_seconds(layout, with_model_axes=True) >= self._worst:
                continue
            for sharding in Sharding:
                self._take_best(self._space.shardings(layout, sharding, offload))

    @property
    def _worst(self) -> float:
        return self.found[-1].time.seconds if len(self.found) >= self._best else inf

    def _take_best(self, layouts: Iterable[Layout]) -> None:
        best: Candidate | None = None
        for layout in layouts:
            self.num_evaluated += 1
            most = self._worst if best is None else best.time.seconds
            best = self._evaluator.evaluate(layout, most_seconds=most) or best
        if best is not None:
            insort(self.found, best, key=_order)
            del self.found[self._best :]

    def _bounded(self, offload: Offload) -> list[tuple[float, int, Layout]]:
        """Give all ways to compute a step that may fit, with the seconds that they take at the least."""
        queue: list[tuple[float, int, Layout]] = []
        for grid in self._space.grids():
            for scheduled in self._space.schedules(replace(grid, offload=offload)):
                for layout in self._fitting(scheduled):
                    # What a strategy refuses, such as compressed gradients of one process, is no layout.
                    with suppress(ConfigError):
                        queue.append((self._evaluator.least_seconds(layout), len(queue), layout))
        return queue

    def _fitting(self, layout: Layout) -> Iterator[Layout]:
        for mode in MODES:
            for one in self._space.steps(replace(layout, recompute=mode)):
                if self._evaluator.least_bytes(one) > self._evaluator.available_bytes:
                    self.num_pruned += 1
                    # Larger micro batches only need more.
                    break
                yield one


def _order(candidate: Candidate) -> tuple[float, float]:
    return candidate.time.seconds, candidate.memory.use.total


def fewest_processes(
    config: RunConfig, architecture: PreTrainedConfig, machines: Machines, *, searches: bool
) -> Candidate:
    """Give a layout of the fewest processes that fit: shares of one machine, or whole machines.

    Args:
        config: of the run.
        architecture: from `find_architecture`, with the vocabulary of the tokenizer.
        machines: where it is to run.
        searches: whether any layout will do, and the fastest is given; else that of `config`, with more data ranks.

    Raises:
        ConfigError: as the run itself would on one process, or in the layout of `config`.
        ResourceError: it fits on no number of processes.
    """
    model = measure(config, architecture, machines, as_asked=not searches)
    evaluator = Evaluator(config, model, machines)
    for processes in _counts(machines.per_machine):
        if searches:
            found = search_layouts(config, model, machines, processes=processes, best=3).candidates
        else:
            found = tuple(filter(None, [_as_asked(evaluator, processes)]))
        found = confirm(found, architecture, model, machines, number=1)
        if found:
            return found[0]
    raise ResourceError(
        "the run fits on no number of processes" if searches else "the layout fits on no number of processes",
        where="plan.find",
        found=f"up to {_MOST_PROCESSES} of {machines.usable_bytes / 2**30:.3g} GiB",
        hint="train.micro_batch_size=1 train.gradient_checkpointing=true"
        + ("" if searches else ", or plan.search=true, which looks at all layouts"),
    )


def _counts(per_machine: int) -> Iterator[int]:
    """Shares of a machine, and then machines: by ones, and later by larger steps."""
    yield from divisors(per_machine)
    machines = 2
    while machines * per_machine <= _MOST_PROCESSES:
        yield machines * per_machine
        # Steps of a quarter at the most: 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, ...
        machines += max(1, 2 ** (machines.bit_length() - 3))


def _as_asked(evaluator: Evaluator, processes: int) -> Candidate | None:
    strategy = evaluator.config.strategy
    free = replace(evaluator.config, strategy=replace(strategy, data=None))
    try:
        layout = Layout.of(free, processes, stages_per_rank(strategy.schedule, strategy.stages_per_rank))
        plan_run(layout.apply(evaluator.config), world_size=processes)
    except ConfigError:
        return None
    return evaluator.evaluate(layout)


def confirm(
    candidates: Sequence[Candidate],
    architecture: PreTrainedConfig,
    model: ModelConstants,
    machines: Machines,
    *,
    number: int,
) -> tuple[Candidate, ...]:
    """Trace the first layouts until so many fit, and give these, the fastest first, before those that were not traced.

    Of a pipeline the rank that holds most by formula is traced.

    Args:
        candidates: from a search, the fastest first.
        architecture: from `find_architecture`, with the vocabulary of the tokenizer.
        model: from `measure`.
        machines: where it is to run.
        number: how many to trace at the least; of those that do not fit more.
    """
    traced: list[Candidate] = []
    left = list(candidates)
    while left and len(traced) < number:
        with warnings.catch_warnings():
            # What libraries say to developers.
            warnings.simplefilter("ignore")
            one = _trace(left.pop(0), architecture, model, machines)
        if one is not None:
            traced.append(one)
    return (*sorted(traced, key=lambda one: one.time.seconds), *left)


def _trace(
    candidate: Candidate, architecture: PreTrainedConfig, model: ModelConstants, machines: Machines
) -> Candidate | None:
    """Give it with the memory and time of its trace; None: it does not fit, or the model cannot be run so."""
    layout, evaluator = candidate.layout, Evaluator(candidate.config, model, machines)
    try:
        strategy = evaluator.strategy(layout, candidate.config)
        pipeline = fullest_pipeline(candidate.config, architecture, strategy)
        trace = trace_rank(
            candidate.config,
            architecture,
            world_size=layout.world_size,
            rank=pipeline[candidate.memory.rank // len(strategy.topology.pipelines)],
            device_type=machines.hardware.device_type,
        )
    except ConfigError:
        return None
    except Exception as error:
        # A model may ask for values that fake tensors lack; what a run would refuse is a ConfigError.
        logger.info("not traced: %s: %s", layout, error)
        return candidate
    memory = trace.peak.with_runtime(machines.runtime_bytes)
    if memory.use.total > machines.usable_bytes:
        return None
    time = evaluator.time(replace(trace.costs, traffic=candidate.traffic), strategy)
    return replace(candidate, memory=memory, time=time, mfu=evaluator.mfu(layout, time), is_traced=True)
