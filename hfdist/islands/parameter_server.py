"""A parameter server: islands push gradients, it steps the optimizer, and gives them weights.

Synchronous: it waits for all islands, and steps once with the mean of what they push, weighted by their targets, as ddp
does. Else each push is a step. With bounded staleness (stale synchronous parallel, Ho et al. 2013) an island waits for
weights while it is more than so many steps ahead of the slowest one. A step has the rate that the schedule has for it,
and leaves out what is not finite.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field

from hfdist.errors import named_line
from hfdist.islands.membership import Island, JobIslands
from hfdist.islands.parameter_shard import ParameterShard, optimizer_of
from hfdist.islands.shard_link import ShardLink
from hfdist.messages.message import Message, NotAMessageError
from hfdist.optim.schedule import rate_at

_MOST_STEPS = 2**40
_MOST_BAD = 5
"""Number of pushes in a row that are left out before the island itself is."""
_ShardRank = tuple[int, int]
"""Number of a shard, and a rank."""


@dataclass
class _Worker:
    """An island."""

    island: Island
    num_shards: int
    layout: dict[_ShardRank, str] = field(default_factory=dict)
    """Digests of the segments that each rank has brought to each shard."""
    pushed: set[_ShardRank] = field(default_factory=set)
    """Ranks that have pushed, and to which shards."""
    updates: int = 0
    step: int = 0
    next_step: int = 0
    """Step of what is being pushed."""
    targets: float = 0.0
    """Targets of the step that is being pushed."""
    state: object = None
    """What others need besides tensors to go on from its step."""
    pulls: set[int] = field(default_factory=set)
    """Ranks that ask for weights and slots."""
    trains: bool = False
    waits: bool = False
    """Whether it has pushed, and waits for weights."""

    def has_all(self, noted: Mapping[_ShardRank, str] | set[_ShardRank]) -> bool:
        """Whether there is something of each rank at each shard."""
        return self.island.is_complete and len(noted) == self.num_shards * len(self.island.addresses)


class ParameterServer:
    """Serves the islands of one job.

    Args:
        job: what all islands have alike, by key.
        islands: of the job.
        links: to the other shards, of which each has a part of the tensors; this process has the first.

    Raises:
        NotAMessageError: a job that no island would have.
    """

    def __init__(self, job: Message, islands: JobIslands, links: Sequence[ShardLink]) -> None:
        self._islands, self._end, self._say, self._links = islands.connected, islands.end, islands.say, links
        count = job.integer("islands.count", least=1)
        self._least = count if islands.least is None else islands.least
        self._staleness = None if job.get("islands.staleness") is None else job.integer("islands.staleness")
        """Steps that an island may be ahead of the slowest; None: no island waits for another."""
        self._max_norm = job.number("train.max_grad_norm")
        self._max_steps = job.integer("train.max_steps", least=1, default=_MOST_STEPS)
        self._rate_at = rate_at(optimizer_of(job), self._max_steps)
        self._bad: Counter[int] = Counter()
        """Number of pushes in a row that were left out, by island."""
        self._workers: dict[int, _Worker] = {}
        self._layout: dict[_ShardRank, str] | None = None
        """Layout of the weights that all train; None: there are no weights yet."""
        self._step = 0
        """Step of the island that is ahead of all others."""
        self._state: object = None
        """State of the island that is ahead of all others, without tensors."""
        self._order = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._own = ParameterShard(job, self._send)
        for number, link in enumerate(links, 1):
            link.report = functools.partial(self._hear_shard, number)
            self._do(functools.partial(link.ask, {"job": dict(job)}))

    # ---- messages ----

    def most_bytes(self, rank: int, message: Message) -> int:
        """Give what follows a message: what a rank brings as it comes, or its gradients."""
        return self._own.most_bytes(rank, message)

    def take(self, island: Island, rank: int, message: Message, payload: bytes) -> None:
        """Take what a rank has sent."""
        worker = self._worker_of(island)
        if "segments" in message:
            self._bring(worker, rank, message, payload)
        elif not worker.trains:
            raise NotAMessageError("no rank says that before it trains")
        elif "push" in message:
            self._push(worker, rank, message, payload)
        elif "pull" in message:
            worker.pulls.add(rank)
            if len(worker.pulls) == len(island.addresses):
                worker.pulls = set()
                self._answer([worker], with_slots=True)
        else:
            raise NotAMessageError("no rank says that here")

    def tick(self) -> None:
        """Do nothing: islands that are slow are waited for."""

    def lose(self, index: int) -> None:
        """Go on without an island."""
        worker = self._workers.pop(index, None)
        self._bad.pop(index, None)
        if worker is not None and self._islands:
            # Without islands there is no server, and a shard keeps nothing.
            self._drop(worker.island.ticket)
        self._go_on()

    def _hear_shard(self, shard: int, message: Message) -> None:
        """Take what another shard says of a rank."""
        ticket = message.text("ticket")
        island = next((one for one in self._islands.values() if one.ticket == ticket), None)
        if island is None:
            # It was lost meanwhile.
            self._drop(ticket)
        elif "bad" in message:
            self._end(island, message.text("bad"))
        else:
            self._note(self._worker_of(island), shard, message.integer("rank"), message)

    def _worker_of(self, island: Island) -> _Worker:
        worker = self._workers.get(island.index)
        if worker is None or worker.island is not island:
            worker = self._workers[island.index] = _Worker(island, 1 + len(self._links))
        return worker

    def _bring(self, worker: _Worker, rank: int, message: Message, payload: bytes) -> None:
        step, updates = message.integer("step", most=self._max_steps), message.integer("updates")
        if rank == 0:
            worker.step, worker.updates, worker.state = step, updates, dict(message.mapping("state"))
        if self._layout is None and not message.flag("may_begin"):
            # What its optimizer had kept was at a server that is gone.
            self._say(f"island {worker.island.index} must go on from its checkpoint: this server has no weights")
            raise ConnectionResetError
        self._note(worker, 0, rank, Message(self._own.keep(worker.island.ticket, rank, message, payload)))

    def _push(self, worker: _Worker, rank: int, message: Message, payload: bytes) -> None:
        step = message.integer("push", least=1, most=min(self._max_steps, worker.step + 1))
        targets = message.number("targets")
        kept = self._own.keep(worker.island.ticket, rank, message, payload)
        worker.next_step = step
        if rank == 0:
            worker.targets = targets
            if step > self._step:
                self._step, self._state = step, dict(message.mapping("state"))
        self._note(worker, 0, rank, Message(kept))

    def _note(self, worker: _Worker, shard: int, rank: int, kept: Message) -> None:
        """Note what a shard keeps of a rank, and go on once each has all of the island's."""
        if "segments" in kept:
            worker.layout[shard, rank] = kept.text("segments")
            if worker.has_all(worker.layout):
                self._begin_or_admit(worker)
            return
        worker.pushed.add((shard, rank))
        if not worker.has_all(worker.pushed):
            return
        worker.step, worker.waits = worker.next_step, True
        self._go_on([] if self._staleness == 0 else [worker])

    def _begin_or_admit(self, worker: _Worker) -> None:
        if self._layout is not None:
            self._admit([worker])
            return
        present = [one for one in self._workers.values() if one.has_all(one.layout)]
        if len(present) < self._least:
            self._say(f"{len(present)} of {self._least} islands are there")
            return
        newest = max(present, key=lambda one: one.step)
        self._step, self._state, self._layout = newest.step, newest.state, dict(newest.layout)
        begin = {"begin": newest.island.ticket, "updates": newest.updates}
        self._do(lambda: self._ask(begin))
        admitted = self._admit(present)
        self._say(f"islands {', '.join(str(one.island.index) for one in admitted)} train from step {newest.step}")

    def _admit(self, workers: Sequence[_Worker]) -> list[_Worker]:
        """Let islands train that have the parameters of the store, and end the others; give those that train."""
        admitted = []
        for worker in workers:
            if worker.layout != self._layout:
                self._end(worker.island, "it has other parameters")
                continue
            worker.trains, worker.step = True, self._step
            admitted.append(worker)
        self._answer(admitted, with_slots=True)
        return admitted

    # ---- who waits for whom ----

    def _go_on(self, pushed: Sequence[_Worker] = ()) -> None:
        """Step, if there is what to step with, and give weights to those that need not wait any more."""
        training = [worker for worker in self._workers.values() if worker.trains]
        waiting = [worker for worker in training if worker.waits]
        if self._staleness == 0:
            pushed = ready = training if len(waiting) == len(training) else []
        else:
            slowest = min((worker.step for worker in training), default=0)
            ready = [one for one in waiting if self._staleness is None or one.step <= slowest + self._staleness]
        for worker in ready:
            worker.waits = False
        if pushed:
            self._update(pushed, ready)
        else:
            self._answer(ready, with_slots=False)

    # ---- the shards, one call after another, beside the beats ----

    def _update(self, workers: Sequence[_Worker], ready: Sequence[_Worker]) -> None:
        # All are added in one order, so that sums are the same whoever has connected first.
        targets = {one.island: one.targets for one in sorted(workers, key=lambda worker: worker.island.index)}
        lr = self._rate_at(max(worker.step for worker in workers) - 1)
        for worker in workers:
            worker.pushed = set()
        give, told = _give(ready), self._told
        self._do(lambda: self._step_with(targets, lr, give, told))

    async def _step_with(
        self, targets: Mapping[Island, float], lr: float, give: dict[str, object], told: dict[str, object]
    ) -> None:
        """Step with what is finite of the pushes of islands, weighted by their targets, and give weights.

        A shard is asked twice: what it has taken must be known of all, and the norm. It is asked a third time only if
        something is not finite.
        """
        answers = await self._ask({"take": _shares(targets)})
        finite = [all(of_shards) for of_shards in zip(*(answer.list("finite") for answer in answers), strict=True)]
        good = {island: number for (island, number), ok in zip(targets.items(), finite, strict=True) if ok}
        if len(good) < len(targets):
            answers = await self._ask({"add": _shares(good)})
        # The sum is exact, and so the same for any number of shards.
        norm = math.sqrt(math.fsum(part for answer in answers for part in answer.list("squares")))
        step: dict[str, object] = {}
        if sum(good.values()) > 0:
            if math.isfinite(norm):
                # torch.nn.utils.clip_grad_norm_ computes it so.
                step = {"step": min(1.0, self._max_norm / (norm + 1e-6)), "lr": lr}
            else:
                self._say("a step is left out: the sum of what islands have pushed is not finite")
        await self._ask(step | give, of_first={"told": told})
        for island in targets:
            if self._islands.get(island.index) is not island:
                # It has left meanwhile: who comes back under its index begins anew.
                continue
            if island in good:
                self._bad.pop(island.index, None)
                continue
            self._bad[island.index] += 1
            self._say(f"island {island.index} is left out of a step: what it has pushed is not finite")
            if self._bad[island.index] >= _MOST_BAD:
                self._end(island, f"what it has pushed is not finite, {_MOST_BAD} times in a row")

    def _answer(self, workers: Sequence[_Worker], *, with_slots: bool) -> None:
        if workers:
            give, told = _give(workers, with_slots=with_slots), self._told
            self._do(lambda: self._ask(give, of_first={"told": told}))

    @property
    def _told(self) -> dict[str, object]:
        """What the first shard says with the weights that it gives: of the island that is ahead of all others."""
        return {"step": self._step, "state": self._state}

    def _drop(self, ticket: str) -> None:
        self._do(lambda: self._ask({"drop": ticket}))

    async def _ask(
        self, command: Mapping[str, object], *, of_first: Mapping[str, object] | None = None
    ) -> list[Message]:
        """Say the same to all shards, and give their answers; `of_first`: what the first is told besides."""

        async def ask_own() -> Message:
            return Message(await asyncio.to_thread(self._own.obey, Message({**command, **(of_first or {})})))

        return await asyncio.gather(ask_own(), *(link.ask(command) for link in self._links))

    def _do(self, call: Callable[[], Coroutine[None, None, object]]) -> None:
        """Let a call run after all earlier ones."""

        async def run() -> None:
            # It wakes who waits in their order. A shard that has ended ends all islands.
            try:
                async with self._order:
                    await call()
            except ConnectionResetError:
                pass
            except Exception as error:
                # Such as memory that is not there: else islands would wait for weights that never come.
                for island in list(self._islands.values()):
                    self._end(island, f"the server has failed: {named_line(error)}")

        task = self._loop.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _send(self, ticket: str, rank: int, message: Mapping[str, object], payload: bytes) -> None:
        self._loop.call_soon_threadsafe(self._send_now, ticket, rank, message, payload)

    def _send_now(self, ticket: str, rank: int, message: Mapping[str, object], payload: bytes) -> None:
        for island in self._islands.values():
            if island.ticket == ticket:
                island.connections[rank].send(message, payload)


def _give(workers: Sequence[_Worker], *, with_slots: bool = False) -> dict[str, object]:
    """Say to a shard who gets weights."""
    return {"give": [worker.island.ticket for worker in workers], "told": {}, "with_slots": with_slots}


def _shares(targets: Mapping[Island, float]) -> dict[str, float]:
    """Give the share of each island in a step, by its ticket."""
    total = sum(targets.values())
    return {island.ticket: number / total if total > 0 else 0.0 for island, number in targets.items()}
