"""A parameter server: islands push gradients, it steps the optimizer, and gives them weights.

    staleness 0       synchronous: it waits for the pushes of all islands, and steps once with their mean, weighted by
                      their targets, as ddp does
    staleness n       each push is a step; an island waits for weights while it is more than n steps ahead of the
                      slowest one (stale synchronous parallel, Ho et al. 2013)
    staleness None    each push is a step, and no island waits for another

A step has the rate of the schedule, and leaves out pushes that are not finite. This process has the first shard of the
tensors, and tells all shards what to do, one command after another.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hfdist.errors import named_line
from hfdist.islands.membership import Island, JobIslands
from hfdist.islands.parameter_shard import ParameterShard, optimizer_of
from hfdist.islands.shard_link import ShardLink
from hfdist.messages.message import Message, NotAMessageError
from hfdist.optim.schedule import rate_at

_MOST_STEPS = 2**40
"""The steps of a job that does not say how many it has."""
_MOST_BAD = 5
"""Number of pushes in a row that are left out before the island itself is."""
_CLIP_EPS = 1e-6
"""What torch.nn.utils.clip_grad_norm_ adds to the norm, too."""


class _ShardRank(NamedTuple):
    shard: int
    rank: int


@dataclass
class _Worker:
    """An island as the server follows it: it brings its tensors, trains, pushes, and waits for weights."""

    island: Island
    num_shards: int
    layout: dict[_ShardRank, str] = field(default_factory=dict)
    """Digests of the segments that each rank has brought to each shard."""
    pushed: set[_ShardRank] = field(default_factory=set)
    """Ranks whose gradients have come, and to which shards."""
    updates: int = 0
    """Number of the optimizer's steps that have made the weights that the island has brought."""
    step: int = 0
    """Step of the island's last whole push, or of the weights that it was given at its begin."""
    next_step: int = 0
    """Step of the push that is coming."""
    targets: float = 0.0
    """Number of targets in that step."""
    state: object = None
    """The state that another island needs besides tensors to go on from the island's step."""
    pulls: set[int] = field(default_factory=set)
    """Ranks that ask for weights and the optimizer's tensors."""
    trains: bool = False
    """Whether the island was given weights to train with."""
    waits: bool = False
    """Whether the island has pushed, and waits for weights."""

    def has_all(self, noted: Collection[_ShardRank]) -> bool:
        """Whether something was noted of each rank of the island at each shard."""
        return self.island.is_complete and len(noted) == self.num_shards * len(self.island.addresses)


class ParameterServer:
    """The coordinator of a job whose islands push gradients.

    Args:
        job: values that all islands have alike, by key.
        islands: the connected islands of the job.
        links: connections to the other shards, in order; this process has the first shard.

    Raises:
        NotAMessageError: the job is one that no island would have.
        ConfigError: the job's optimizer cannot be stepped here.
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
        """Held by the commands to the shards that are under way: later ones wait in their order."""
        self._tasks: set[asyncio.Task[None]] = set()
        """Tasks that are under way: an event loop holds them weakly."""
        self._loop = asyncio.get_running_loop()
        self._own = ParameterShard(job, self._send)
        for number, link in enumerate(links, 1):
            link.report = functools.partial(self._hear_shard, number)
            self._do(functools.partial(link.ask, {"job": dict(job)}))

    # ---- messages ----

    def most_bytes(self, rank: int, message: Message) -> int:
        """Give how many bytes may follow a message: the tensors that a rank brings at first, or its gradients."""
        return self._own.most_bytes(rank, message)

    def take(self, island: Island, rank: int, message: Message, payload: bytes) -> None:
        """Act on what a rank brings, pushes or asks for; NotAMessageError: no rank would send it."""
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
        """Go on without the island of this index, which has left."""
        worker = self._workers.pop(index, None)
        self._bad.pop(index, None)
        if worker is not None and self._islands:
            # Without islands there is no server, and a shard keeps nothing.
            self._drop(worker.island.ticket)
        self._go_on()

    def _hear_shard(self, shard: int, message: Message) -> None:
        """Take the report of another shard on what a rank has brought to it."""
        ticket = message.text("ticket")
        island = next((one for one in self._islands.values() if one.ticket == ticket), None)
        if island is None:
            # The island was lost meanwhile.
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
        """Take the tensors of a rank whose island has connected."""
        step, updates = message.integer("step", most=self._max_steps), message.integer("updates")
        if rank == 0:
            worker.step, worker.updates, worker.state = step, updates, dict(message.mapping("state"))
        if self._layout is None and not message.flag("may_begin"):
            # The state of its optimizer was at a server that is gone.
            self._say(f"island {worker.island.index} must go on from its checkpoint: this server has no weights")
            raise ConnectionResetError
        self._note(worker, 0, rank, Message(self._own.keep(worker.island.ticket, rank, message, payload)))

    def _push(self, worker: _Worker, rank: int, message: Message, payload: bytes) -> None:
        """Take the gradients of a rank."""
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
        """Note that a shard has tensors or gradients of a rank, and go on once all have come of the island."""
        if "segments" in kept:
            worker.layout[_ShardRank(shard, rank)] = kept.text("segments")
            if worker.has_all(worker.layout):
                self._begin_or_admit(worker)
            return
        worker.pushed.add(_ShardRank(shard, rank))
        if not worker.has_all(worker.pushed):
            return
        worker.step, worker.waits = worker.next_step, True
        self._go_on([] if self._staleness == 0 else [worker])

    def _begin_or_admit(self, worker: _Worker) -> None:
        """Let an island train with the present weights; or, once enough have come, all with those of the newest."""
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
        """Give weights to the islands whose parameters are those of the store, and end the others; list the first."""
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
        """Step with pushes, if there are any, and give weights to the islands that need not wait any more.

        Args:
            pushed: islands whose pushes are a step of their own; none in a synchronous job, where all make one step.
        """
        training = [worker for worker in self._workers.values() if worker.trains]
        ready = [worker for worker in training if worker.waits]
        if self._staleness == 0:
            if len(ready) < len(training):
                return
            pushed = ready
        elif self._staleness is not None and ready:
            slowest = min(worker.step for worker in training)
            ready = [worker for worker in ready if worker.step <= slowest + self._staleness]
        for worker in ready:
            worker.waits = False
        if pushed:
            self._update(pushed, ready)
        else:
            self._answer(ready, with_slots=False)

    # ---- the shards, one call after another, beside the beats ----

    def _update(self, pushed: Sequence[_Worker], ready: Sequence[_Worker]) -> None:
        """Step with the pushes of some islands, and then give weights to those that are ready."""
        # In one order, so that the same sums are made whoever has connected first.
        targets = {one.island: one.targets for one in sorted(pushed, key=lambda worker: worker.island.index)}
        lr = self._rate_at(max(worker.step for worker in pushed) - 1)
        for worker in pushed:
            worker.pushed = set()
        give, told = _give(ready), self._told
        self._do(lambda: self._step_with(targets, lr, give, told))

    async def _step_with(
        self, targets: Mapping[Island, float], lr: float, give: dict[str, object], told: dict[str, object]
    ) -> None:
        """Step with the finite pushes of islands, weighted by their targets, and give weights."""
        # take    each shard adds up its part of all pushes, and says what is finite, and its squares
        # add     only if something is not finite: each shard adds up the good pushes alone
        # step    each shard scales by the norm over all shards, steps, and gives weights
        answers = await self._ask({"take": _shares(targets)})
        good = dict(targets)
        for answer in answers:
            for island, is_finite in zip(targets, answer.list("finite"), strict=True):
                if not is_finite:
                    good.pop(island, None)
        if len(good) < len(targets):
            answers = await self._ask({"add": _shares(good)})
        # The sum is exact, and so the same for any number of shards.
        norm = math.sqrt(math.fsum(part for answer in answers for part in answer.list("squares")))
        step: dict[str, object] = {}
        if sum(good.values()) > 0:
            if math.isfinite(norm):
                step = {"step": min(1.0, self._max_norm / (norm + _CLIP_EPS)), "lr": lr}
            else:
                self._say("a step is left out: the sum of what islands have pushed is not finite")
        await self._ask(step | give, of_first={"told": told})
        self._count_bad(targets, good)

    def _count_bad(self, pushed: Collection[Island], good: Collection[Island]) -> None:
        """Count the pushes in a row of each island that were left out, and end who has sent too many."""
        for island in pushed:
            if self._islands.get(island.index) is not island:
                # The island has left meanwhile: who comes back under its index begins anew.
                continue
            if island in good:
                self._bad.pop(island.index, None)
                continue
            self._bad[island.index] += 1
            self._say(f"island {island.index} is left out of a step: what it has pushed is not finite")
            if self._bad[island.index] >= _MOST_BAD:
                self._end(island, f"what it has pushed is not finite, {_MOST_BAD} times in a row")

    def _answer(self, workers: Sequence[_Worker], *, with_slots: bool) -> None:
        """Let all shards give weights to some islands; `with_slots`: and the optimizer's tensors."""
        if workers:
            give, told = _give(workers, with_slots=with_slots), self._told
            self._do(lambda: self._ask(give, of_first={"told": told}))

    @property
    def _told(self) -> dict[str, object]:
        """The step and state of the island that is ahead of all others, which the first shard sends with weights."""
        return {"step": self._step, "state": self._state}

    def _drop(self, ticket: str) -> None:
        """Let all shards forget what the island with a ticket has brought."""
        self._do(lambda: self._ask({"drop": ticket}))

    async def _ask(
        self, command: Mapping[str, object], *, of_first: Mapping[str, object] | None = None
    ) -> list[Message]:
        """Send a command to all shards, and give their answers, in order.

        Args:
            command: the command.
            of_first: members of the command that only the first shard gets, in place of those of the same name.
        """
        to_first = Message({**command, **(of_first or {})})

        async def ask_own() -> Message:
            return Message(await asyncio.to_thread(self._own.obey, to_first))

        return await asyncio.gather(ask_own(), *(link.ask(command) for link in self._links))

    def _do(self, call: Callable[[], Coroutine[None, None, object]]) -> None:
        """Let a call run once all earlier ones have ended, beside the reading of messages."""

        async def run() -> None:
            try:
                # The lock is given in the order in which the tasks have asked for it.
                async with self._order:
                    await call()
            except ConnectionResetError:
                # A shard has ended, and with that the server ends all islands.
                pass
            except Exception as error:
                # Such as memory that is not there: else islands would wait for weights that never come.
                for island in list(self._islands.values()):
                    self._end(island, f"the server has failed: {named_line(error)}")

        task = self._loop.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _send(self, ticket: str, rank: int, message: Mapping[str, object], payload: bytes) -> None:
        """Send to a rank; the thread of the own shard calls this, and the connections belong to the event loop."""
        self._loop.call_soon_threadsafe(self._send_now, ticket, rank, message, payload)

    def _send_now(self, ticket: str, rank: int, message: Mapping[str, object], payload: bytes) -> None:
        for island in self._islands.values():
            if island.ticket == ticket:
                island.connections[rank].send(message, payload)


def _give(workers: Sequence[_Worker], *, with_slots: bool = False) -> dict[str, object]:
    """Make the command by which a shard gives weights to some islands."""
    return {"give": [worker.island.ticket for worker in workers], "told": {}, "with_slots": with_slots}


def _shares(targets: Mapping[Island, float]) -> dict[str, float]:
    """Give the share of each island in the targets of a step, by its ticket; 0 for all if there are no targets."""
    total = sum(targets.values())
    if total == 0:
        return {island.ticket: 0.0 for island in targets}
    return {island.ticket: number / total for island, number in targets.items()}
