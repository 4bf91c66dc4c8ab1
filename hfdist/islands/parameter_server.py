"""A parameter server: islands push gradients, it steps the optimizer, and gives them weights.

Synchronous: it waits for all islands, and steps once with the mean of what they push, weighted by their targets, as ddp
does. Else each push is a step. With bounded staleness (stale synchronous parallel, Ho et al. 2013) an island waits for
weights while it is more than so many steps ahead of the slowest one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from omegaconf import OmegaConf

from hfdist.config.islands import Codec
from hfdist.config.optimizer import OptimizerConfig
from hfdist.islands.codec import decode, num_bytes
from hfdist.islands.membership import Island
from hfdist.islands.parameter_store import ParameterStore, Segment, find_slots


@dataclass(frozen=True, kw_only=True)
class _Push:
    """Of one rank: what it has behind a step."""

    gradients: bytes
    targets: float
    lr: float


@dataclass
class _Worker:
    """An island."""

    island: Island
    segments: dict[int, list[Segment]] = field(default_factory=dict)
    """By rank."""
    contents: dict[int, bytes] = field(default_factory=dict)
    """By rank: weights and optimizer as it brings them; empty once it trains."""
    updates: int = 0
    step: int = 0
    state: Any = None
    """What others need besides tensors to go on from its step."""
    pushes: dict[int, _Push] = field(default_factory=dict)
    """By rank."""
    pulls: set[int] = field(default_factory=set)
    """Ranks that ask for weights and slots."""
    trains: bool = False
    waits: bool = False
    """Whether it has pushed, and waits for weights."""

    def has_all(self, of_ranks: Mapping[int, Any]) -> bool:
        """Whether there is something of each rank."""
        return self.island.is_complete and len(of_ranks) == len(self.island.addresses)


def check_job(job: Mapping[str, Any]) -> None:
    """Raise a ConfigError if its optimizer cannot be stepped here."""
    find_slots(_optimizer_of(job))


def _optimizer_of(job: Mapping[str, Any]) -> OptimizerConfig:
    config: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(OptimizerConfig), job["optimizer"]))
    made: OptimizerConfig = config
    return made


class ParameterServer:
    """Serves the islands of one job.

    Args:
        job: what all islands have alike, by key.
        islands: that are connected, by index; it is live.
        least: islands with which the training begins; None: as many as they say.
        say: takes a line for people.

    Raises:
        ValueError: a job that no island would have.
    """

    def __init__(
        self, job: Mapping[str, Any], islands: Mapping[int, Island], least: int | None, say: Callable[[str], None]
    ) -> None:
        self._islands, self._say = islands, say
        self._least = int(job["islands.count"]) if least is None else least
        self._codec = Codec(job["islands.codec"])
        staleness = job["islands.staleness"]
        self._staleness: int | None = None if staleness is None else int(staleness)
        """None: no island waits for another."""
        self._optimizer = _optimizer_of(job)
        self._max_norm = float(job["train.max_grad_norm"])
        self._workers: dict[int, _Worker] = {}
        self._store: ParameterStore | None = None
        self._step = 0
        """Of the island that is ahead of all."""
        self._state: Any = None
        """Of it, besides tensors."""
        self._order = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- messages ----

    def take(self, island: Island, rank: int, message: dict[str, Any], payload: bytes) -> None:
        """Take what a rank has sent."""
        worker = self._workers.get(island.index)
        if "segments" in message:
            if worker is None or worker.island is not island:
                worker = self._workers[island.index] = _Worker(island)
            self._add(worker, rank, message, payload)
        elif "push" in message and worker is not None and worker.trains:
            self._push(worker, rank, message, payload)
        elif "pull" in message and worker is not None and worker.trains:
            worker.pulls.add(rank)
            if len(worker.pulls) == len(worker.segments):
                worker.pulls = set()
                self._answer([worker], with_slots=True)

    def lose(self, index: int) -> None:
        """Go on without an island."""
        self._workers.pop(index, None)
        self._go_on()

    def _add(self, worker: _Worker, rank: int, message: dict[str, Any], payload: bytes) -> None:
        worker.segments[rank] = [
            Segment(str(name), tuple(map(int, shape)), *map(int, place)) for name, shape, *place in message["segments"]
        ]
        worker.contents[rank] = payload
        if self._store is None and not message["may_begin"]:
            # What its optimizer had kept was at a server that is gone.
            self._say(f"island {worker.island.index} must go on from its checkpoint: this server has no weights")
            raise ValueError("no weights")
        worker.step, worker.updates = int(message["step"]), int(message["updates"])
        worker.state = message["state"] if rank == 0 else worker.state
        if not worker.has_all(worker.segments):
            return
        if self._store is not None:
            if any(tuple(own) != self._store.segments.get(rank) for rank, own in worker.segments.items()):
                raise ValueError(f"island {worker.island.index} has other parameters")
            self._admit([worker])
            return
        there = [one for one in self._workers.values() if one.has_all(one.segments)]
        if len(there) < self._least:
            self._say(f"{len(there)} of {self._least} islands are there")
            return
        newest = max(there, key=lambda one: one.step)
        self._step, self._state = newest.step, newest.state
        self._store = ParameterStore(self._optimizer, self._max_norm, newest.segments, newest.contents, newest.updates)
        self._say(f"islands {', '.join(str(one.island.index) for one in there)} train from step {newest.step}")
        self._admit(there)

    def _admit(self, workers: Sequence[_Worker]) -> None:
        for worker in workers:
            worker.trains, worker.contents, worker.step = True, {}, self._step
        self._answer(workers, with_slots=True)

    def _push(self, worker: _Worker, rank: int, message: dict[str, Any], payload: bytes) -> None:
        assert self._store is not None
        if len(payload) != num_bytes(self._codec, self._store.num_elements(rank)):
            raise ValueError(f"{len(payload)} bytes are not the gradients of rank {rank}")
        worker.pushes[rank] = _Push(
            gradients=payload,
            targets=float(message["targets"]),
            lr=float(message["lr"]),
        )
        step = int(message["push"])
        if rank == 0 and step > self._step:
            self._step, self._state = step, message["state"]
        if not worker.has_all(worker.pushes):
            return
        worker.step, worker.waits = step, True
        if self._staleness != 0:
            self._update([worker])
        self._go_on()

    # ---- who waits for whom ----

    def _go_on(self) -> None:
        """Step if all have pushed, and give weights to those that need not wait any more."""
        training = [worker for worker in self._workers.values() if worker.trains]
        waiting = [worker for worker in training if worker.waits]
        if self._staleness == 0:
            if len(waiting) == len(training) > 0:
                self._update(training)
                self._release(training)
            return
        slowest = min((worker.step for worker in training), default=0)
        ready = [one for one in waiting if self._staleness is None or one.step <= slowest + self._staleness]
        self._release(ready)

    def _release(self, workers: Sequence[_Worker]) -> None:
        for worker in workers:
            worker.waits = False
        self._answer(workers, with_slots=False)

    # ---- the store, one call after another, beside the beats ----

    def _update(self, workers: Sequence[_Worker]) -> None:
        # In one order, so that the same sums are made whoever has connected first.
        pushes = [worker.pushes for worker in sorted(workers, key=lambda worker: worker.island.index)]
        lr = max(workers, key=lambda worker: worker.step).pushes[0].lr
        for worker in workers:
            worker.pushes = {}
        store = self._store
        assert store is not None
        self._do(lambda: asyncio.to_thread(self._step_with, store, pushes, lr))

    def _step_with(self, store: ParameterStore, pushes: Sequence[Mapping[int, _Push]], lr: float) -> None:
        weights = [push[0].targets for push in pushes]
        if sum(weights) <= 0:
            return
        gradients: dict[int, torch.Tensor] = {}
        for rank in store.segments:
            total = torch.zeros(store.num_elements(rank))
            for push, weight in zip(pushes, weights, strict=True):
                if weight > 0:
                    own = decode(self._codec, push[rank].gradients, len(total))
                    total.add_(own, alpha=weight / sum(weights))
            gradients[rank] = total
        if not store.step(gradients, lr):
            self._say(f"update {store.updates}: a gradient is not finite, and is left out")

    def _answer(self, workers: Sequence[_Worker], *, with_slots: bool) -> None:
        told = {"step": self._step, "state": self._state}
        if workers:
            islands = [worker.island for worker in workers]
            self._do(lambda: self._give(islands, told, with_slots=with_slots))

    def _do(self, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Let it run behind all earlier ones."""

        async def run() -> None:
            # It wakes who waits in their order.
            async with self._order:
                await call()

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _give(self, islands: Sequence[Island], told: Mapping[str, Any], *, with_slots: bool) -> None:
        store = self._store
        assert store is not None
        for rank in store.segments:
            content = await asyncio.to_thread(store.content, rank, with_slots=with_slots)
            for island in islands:
                if self._islands.get(island.index) is island:
                    island.connections[rank].send({"weights": store.updates, **told}, content)
