"""Finds the fastest layouts of a run on a given number of processes, of all that the run's own checks allow.

The search goes from what a rank computes to how state is sharded. Two bounds cut it short:

    memory   larger micro batches need more: after the first that fits in no sharding, no larger one is looked at
    time     layouts come in the order of their least seconds; the search ends at the first whose least seconds are
             more than those of the worst layout kept
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from heapq import heapify, heappop
from math import inf

from transformers import PreTrainedConfig

from hfdist.config.layout import Layout
from hfdist.config.run import RunConfig
from hfdist.config.strategy import Offload, Sharding
from hfdist.errors import ConfigError
from hfdist.planning.searching.confirm import confirm
from hfdist.planning.searching.constants import MODES, ModelConstants
from hfdist.planning.searching.evaluate import Candidate, Evaluator, Machines
from hfdist.planning.searching.layout_space import Space, divisors
from hfdist.planning.searching.short_traces import measure_constants

_MOST_TRACED = 3
"""The most layouts that are traced."""
_MOST_TRACED_BLOCKS = 40
"""The most blocks of all traced layouts together: a trace takes as long as its blocks are many."""


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

    The first three are traced; of a model of many blocks fewer are, or none.

    Args:
        config: the run's config; its layout, micro batches and activation checkpointing are what is chosen.
        architecture: the model's config, with the vocabulary of the tokenizer.
        machines: the machines on which the run is to be.
        processes: how many ranks.
        best: how many layouts to give at the most.

    Raises:
        ConfigError: as the run itself would on one process.
    """
    model = measure(config, architecture, machines, processes=processes)
    found = search_layouts(config, model, machines, processes=processes, best=best)
    wanted = min(_MOST_TRACED, _MOST_TRACED_BLOCKS // max(1, model.num_blocks))
    return replace(found, candidates=confirm(found.candidates, architecture, model, machines, wanted=wanted))


def measure(
    config: RunConfig,
    architecture: PreTrainedConfig,
    machines: Machines,
    *,
    processes: int | None = None,
    as_asked: bool = False,
) -> ModelConstants:
    """Trace the constants that a search needs.

    Args:
        config: the run's config.
        architecture: the model's config, with the vocabulary of the tokenizer.
        machines: the machines on which the run is to be.
        processes: how many ranks; None: any number.
        as_asked: whether the constants of the layout that `config` asks for are needed, too.

    Raises:
        ConfigError: the model does not divide as `config` asks.
    """
    # Tensor ranks share a machine: no degree is larger.
    degrees = divisors(processes or machines.per_machine, machines.per_machine)
    is_gpu = not machines.hardware.is_cpu
    return measure_constants(config, architecture, is_gpu=is_gpu, tensor_degrees=degrees, as_asked=as_asked)


def search_layouts(
    config: RunConfig, model: ModelConstants, machines: Machines, *, processes: int, best: int = 10
) -> SearchResult:
    """Give the fastest layouts that fit, by formulas.

    Args:
        config: the run's config; its layout, micro batches and activation checkpointing are what is chosen.
        model: the model's constants, as `measure` gives them.
        machines: the machines on which the run is to be.
        processes: how many ranks.
        best: how many layouts to give at the most.
    """
    space = Space(config, model, processes, machines.per_machine)
    evaluator = Evaluator(config, model, machines)
    best_layouts = _Search(space, evaluator, best)
    # What steps on a host cost is not known: offloading is for what does not fit without.
    best_layouts.run(Offload.none)
    if not best_layouts.found:
        best_layouts.run(Offload.cpu)
    return SearchResult(
        candidates=tuple(best_layouts.found),
        num_bounded=best_layouts.num_bounded,
        num_pruned=best_layouts.num_pruned,
        num_evaluated=best_layouts.num_evaluated,
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
