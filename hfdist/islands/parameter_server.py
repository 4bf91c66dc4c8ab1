"""A parameter server: islands push gradients, it steps the optimizer, and gives them weights.

Synchronous: it waits for all islands, and steps once with the mean of what they push, weighted by their targets, as ddp
does. Else each push is a step. With bounded staleness (stale synchronous parallel, Ho et al. 2013) an island waits for
weights while it is more than so many steps ahead of the slowest one. A step has the rate that the schedule has for it,
and leaves out what is not finite.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import psutil
import torch

from hfdist.config.islands import Codec
from hfdist.config.optimizer import OptimizerConfig
from hfdist.config.plain_values import from_plain
from hfdist.errors import ConfigError
from hfdist.islands.codec import decode
from hfdist.islands.membership import Island
from hfdist.islands.outer import is_finite
from hfdist.islands.parameter_store import OptimizerSlots, ParameterStore, Segment, find_slots
from hfdist.messages.message import Message, NotAMessageError
from hfdist.optim.schedule import rate_at

_MOST_STEPS = 2**40
_MOST_BAD = 5
"""Number of pushes in a row that are left out before the island itself is."""


@dataclass(frozen=True, kw_only=True)
class _Push:
    """What one rank pushes after a step."""

    gradients: bytes
    targets: float


@dataclass
class _Worker:
    """An island."""

    island: Island
    segments: dict[int, list[Segment]] = field(default_factory=dict)
    """Segments of the island's ranks, by rank."""
    contents: dict[int, bytes] = field(default_factory=dict)
    """Weights and optimizer as a rank brings them, by rank; empty once the island trains."""
    updates: int = 0
    step: int = 0
    state: object = None
    """What others need besides tensors to go on from its step."""
    pushes: dict[int, _Push] = field(default_factory=dict)
    """Pushes of the island's ranks, by rank."""
    pulls: set[int] = field(default_factory=set)
    """Ranks that ask for weights and slots."""
    trains: bool = False
    waits: bool = False
    """Whether it has pushed, and waits for weights."""

    def has_all(self, of_ranks: Mapping[int, object]) -> bool:
        """Whether there is something of each rank."""
        return self.island.is_complete and len(of_ranks) == len(self.island.addresses)


def check_job(job: Message) -> OptimizerSlots:
    """Give what its optimizer keeps; ConfigError: it cannot be stepped here."""
    return find_slots(_optimizer_of(job))


def _optimizer_of(job: Message) -> OptimizerConfig:
    made: OptimizerConfig = from_plain(OptimizerConfig, job.get("optimizer"), "optimizer")
    if made.lr is None:
        raise ConfigError("the optimizer has no rate", where="optimizer.lr", found="null", allowed="a number > 0")
    return made


class ParameterServer:
    """Serves the islands of one job.

    Args:
        job: what all islands have alike, by key.
        islands: that are connected, by index; it is live.
        least: islands with which the training begins; None: as many as they say.
        end: ends an island that cannot take part, and tells it why.
        say: takes a line for people.

    Raises:
        NotAMessageError: a job that no island would have.
    """

    def __init__(
        self,
        job: Message,
        islands: Mapping[int, Island],
        least: int | None,
        end: Callable[[Island, str], None],
        say: Callable[[str], None],
    ) -> None:
        self._islands, self._end, self._say = islands, end, say
        count = job.integer("islands.count", least=1)
        self._least = count if least is None else least
        codec = job.text("islands.codec")
        if codec not in Codec.__members__:
            raise NotAMessageError("there is no such codec")
        self._codec = Codec[codec]
        self._staleness = None if job.get("islands.staleness") is None else job.integer("islands.staleness")
        """Steps that an island may be ahead of the slowest; None: no island waits for another."""
        self._optimizer, self._slots = _optimizer_of(job), check_job(job)
        self._max_norm = job.number("train.max_grad_norm")
        self._max_steps = job.integer("train.max_steps", least=1, default=_MOST_STEPS)
        self._rate_at = rate_at(self._optimizer, self._max_steps)
        self._bad: Counter[int] = Counter()
        """Number of pushes in a row that were left out, by island."""
        self._workers: dict[int, _Worker] = {}
        self._store: ParameterStore | None = None
        self._step = 0
        """Step of the island that is ahead of all others."""
        self._state: object = None
        """State of the island that is ahead of all others, without tensors."""
        self._order = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- messages ----

    def most_bytes(self, rank: int, message: Message) -> int:
        """Give what follows a message: what a rank brings as it comes, or its gradients."""
        if "segments" in message:
            num_bytes = 4 * (1 + len(self._slots.tensors)) * sum(one.num_elements for one in _read_segments(message))
            return min(num_bytes, psutil.virtual_memory().total)
        if "push" in message and self._store is not None and rank in self._store.segments:
            return self._codec.num_bytes(self._store.num_elements(rank))
        return 0

    def take(self, island: Island, rank: int, message: Message, payload: bytes) -> None:
        """Take what a rank has sent."""
        if len(payload) != self.most_bytes(rank, message):
            raise NotAMessageError(f"{len(payload)} bytes follow, and {self.most_bytes(rank, message)} should")
        worker = self._workers.get(island.index)
        if "segments" in message:
            if worker is None or worker.island is not island:
                worker = self._workers[island.index] = _Worker(island)
            self._add(worker, rank, message, payload)
        elif worker is None or not worker.trains:
            raise NotAMessageError("no rank says that before it trains")
        elif "push" in message:
            self._push(worker, rank, message, payload)
        elif "pull" in message:
            worker.pulls.add(rank)
            if len(worker.pulls) == len(worker.segments):
                worker.pulls = set()
                self._answer([worker], with_slots=True)
        else:
            raise NotAMessageError("no rank says that here")

    def tick(self) -> None:
        """Wait for who is slow."""

    def lose(self, index: int) -> None:
        """Go on without an island."""
        self._workers.pop(index, None)
        self._bad.pop(index, None)
        self._go_on()

    def _add(self, worker: _Worker, rank: int, message: Message, payload: bytes) -> None:
        step, updates = message.integer("step", most=self._max_steps), message.integer("updates")
        if rank == 0:
            worker.step, worker.updates, worker.state = step, updates, dict(message.mapping("state"))
        worker.segments[rank] = _read_segments(message)
        if self._store is None:
            if not message.flag("may_begin"):
                # What its optimizer had kept was at a server that is gone.
                self._say(f"island {worker.island.index} must go on from its checkpoint: this server has no weights")
                raise ConnectionResetError
            if not np.isfinite(np.frombuffer(payload, np.float32)).all():
                raise NotAMessageError("the weights are not finite")
            worker.contents[rank] = payload
        if not worker.has_all(worker.segments):
            return
        if self._store is not None:
            self._admit([worker])
            return
        there = [one for one in self._workers.values() if one.has_all(one.contents)]
        if len(there) < self._least:
            self._say(f"{len(there)} of {self._least} islands are there")
            return
        newest = max(there, key=lambda one: one.step)
        self._step, self._state = newest.step, newest.state
        self._store = ParameterStore(self._optimizer, self._max_norm, newest.segments, newest.contents, newest.updates)
        admitted = self._admit(there)
        self._say(f"islands {', '.join(str(one.island.index) for one in admitted)} train from step {newest.step}")

    def _admit(self, workers: Sequence[_Worker]) -> list[_Worker]:
        """Let islands train that have the parameters of the store, and end the others; give those that train."""
        assert self._store is not None
        admitted = []
        for worker in workers:
            if {rank: tuple(own) for rank, own in worker.segments.items()} != self._store.segments:
                self._end(worker.island, "it has other parameters")
                continue
            worker.trains, worker.contents, worker.step = True, {}, self._step
            admitted.append(worker)
        self._answer(admitted, with_slots=True)
        return admitted

    def _push(self, worker: _Worker, rank: int, message: Message, payload: bytes) -> None:
        step = message.integer("push", least=1, most=min(self._max_steps, worker.step + 1))
        worker.pushes[rank] = _Push(gradients=payload, targets=message.number("targets"))
        if rank == 0 and step > self._step:
            self._step, self._state = step, dict(message.mapping("state"))
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
        pushes = {one.island: one.pushes for one in sorted(workers, key=lambda worker: worker.island.index)}
        lr = self._rate_at(max(worker.step for worker in workers) - 1)
        for worker in workers:
            worker.pushes = {}
        store = self._store
        assert store is not None
        self._do(lambda: self._step_with(store, pushes, lr))

    async def _step_with(self, store: ParameterStore, pushes: Mapping[Island, Mapping[int, _Push]], lr: float) -> None:
        bad = await asyncio.to_thread(self._step_store, store, pushes, lr)
        for island in pushes:
            if self._islands.get(island.index) is not island:
                # It has left meanwhile: who comes back under its index begins anew.
                continue
            if island.index not in bad:
                self._bad.pop(island.index, None)
                continue
            self._bad[island.index] += 1
            self._say(f"island {island.index} is left out of a step: what it has pushed is not finite")
            if self._bad[island.index] >= _MOST_BAD:
                self._end(island, f"what it has pushed is not finite, {_MOST_BAD} times in a row")

    def _step_store(self, store: ParameterStore, pushes: Mapping[Island, Mapping[int, _Push]], lr: float) -> list[int]:
        """Step with all pushes that are finite; give the islands whose own are not."""

        def decoded(push: _Push, rank: int) -> torch.Tensor:
            return decode(self._codec, push.gradients, store.num_elements(rank))

        good = {
            island.index: push
            for island, push in pushes.items()
            if push[0].targets == 0 or all(is_finite(decoded(own, rank)) for rank, own in push.items())
        }
        total_targets = sum(push[0].targets for push in good.values())
        if total_targets > 0:
            gradients: dict[int, torch.Tensor] = {}
            for rank in store.segments:
                gradients[rank] = torch.zeros(store.num_elements(rank))
                for push in good.values():
                    if push[0].targets > 0:
                        gradients[rank].add_(decoded(push[rank], rank), alpha=push[0].targets / total_targets)
            store.step(gradients, lr)
        return [island.index for island in pushes if island.index not in good]

    def _answer(self, workers: Sequence[_Worker], *, with_slots: bool) -> None:
        told = {"step": self._step, "state": self._state}
        if workers:
            islands = [worker.island for worker in workers]
            self._do(lambda: self._give(islands, told, with_slots=with_slots))

    def _do(self, call: Callable[[], Awaitable[None]]) -> None:
        """Let a call run after all earlier ones."""

        async def run() -> None:
            # It wakes who waits in their order.
            async with self._order:
                await call()

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _give(self, islands: Sequence[Island], told: Mapping[str, object], *, with_slots: bool) -> None:
        store = self._store
        assert store is not None
        for rank in store.segments:
            content = await asyncio.to_thread(store.content, rank, with_slots=with_slots)
            for island in islands:
                if self._islands.get(island.index) is island:
                    island.connections[rank].send({"weights": store.updates, **told}, content)


def _read_segments(message: Message) -> list[Segment]:
    found = []
    for one in message.list("segments"):
        if not isinstance(one, list) or len(one) != len(Segment._fields) or not isinstance(one[1], list):
            raise NotAMessageError("a segment has a name, a shape, and four numbers")
        name, shape, *place = one
        given = Message({"name": name} | {f"{number}": value for number, value in enumerate([*shape, *place])})
        numbers = [given.integer(f"{number}") for number in range(len(given) - 1)]
        found.append(Segment(given.text("name"), tuple(numbers[:-4]), *numbers[-4:]))
    return found
