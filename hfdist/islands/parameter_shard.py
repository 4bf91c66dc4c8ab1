"""A part of the tensors of a parameter server: what ranks bring of them, their weights and their optimizer.

It decides nothing. The server says, in one order for all shards, with whose gradients it steps, and who gets weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import psutil
import torch

from hfdist.config.islands import Codec
from hfdist.config.optimizer import OptimizerConfig
from hfdist.config.plain_values import from_plain
from hfdist.data.cache import digest_of
from hfdist.errors import ConfigError
from hfdist.islands.codec import decode
from hfdist.islands.parameter_store import OptimizerSlots, ParameterStore, find_slots
from hfdist.islands.segment import Segment
from hfdist.islands.vectors import is_finite
from hfdist.messages.message import Message, NotAMessageError

Send = Callable[[str, int, Mapping[str, object], bytes], None]
"""Sends a message and bytes to a rank of the island with a ticket."""


@dataclass
class _Brought:
    """What an island has brought, by rank."""

    segments: dict[int, list[Segment]] = field(default_factory=dict)
    contents: dict[int, bytes] = field(default_factory=dict)
    """Weights and optimizer; empty once there are weights."""
    pushes: dict[int, bytes] = field(default_factory=dict)
    """Gradients of which nothing was made yet."""


def check_job(job: Message) -> OptimizerSlots:
    """Give what its optimizer keeps; ConfigError: it cannot be stepped here."""
    return find_slots(optimizer_of(job))


def optimizer_of(job: Message) -> OptimizerConfig:
    """Give the settings of a job's optimizer; ConfigError: they have no rate."""
    made: OptimizerConfig = from_plain(OptimizerConfig, job.get("optimizer"), "optimizer")
    if made.lr is None:
        raise ConfigError("the optimizer has no rate", where="optimizer.lr", found="null", allowed="a number > 0")
    return made


class ParameterShard:
    """A part of the tensors. `keep` is called where messages are read, `obey` in one other thread.

    Args:
        job: what all islands have alike, by key.
        send: is called by `obey`.

    Raises:
        NotAMessageError: a job that no island would have.
    """

    def __init__(self, job: Message, send: Send) -> None:
        codec = job.text("islands.codec")
        if codec not in Codec.__members__:
            raise NotAMessageError("there is no such codec")
        self._codec, self._send = Codec[codec], send
        self._optimizer = optimizer_of(job)
        self._slots = find_slots(self._optimizer)
        self._brought: dict[str, _Brought] = {}
        """What each island has brought, by its ticket."""
        self._taken: dict[str, dict[int, bytes]] = {}
        """Pushes of the step that is being made, by ticket and rank."""
        self._store: ParameterStore | None = None

    # ---- what ranks bring ----

    def most_bytes(self, rank: int, message: Message) -> int:
        """Give what follows a message: what a rank brings as it comes, or its gradients."""
        if "segments" in message:
            num_bytes = 4 * (1 + len(self._slots.tensors)) * sum(one.num_elements for one in _read_segments(message))
            return min(num_bytes, psutil.virtual_memory().total)
        if "push" in message and self._store is not None:
            own = self._store.segments.get(rank, ())
            return sum(self._codec.num_bytes(segment.num_elements) for segment in own)
        return 0

    def keep(self, ticket: str, rank: int, message: Message, payload: bytes) -> dict[str, object]:
        """Keep what a rank of the island with a ticket has brought; give what the server must know of it."""
        if len(payload) != self.most_bytes(rank, message):
            raise NotAMessageError(f"{len(payload)} bytes follow, and {self.most_bytes(rank, message)} should")
        brought = self._brought.setdefault(ticket, _Brought())
        if "segments" in message:
            segments = brought.segments[rank] = _read_segments(message)
            if self._store is None:
                if not np.isfinite(np.frombuffer(payload, np.float32)).all():
                    raise NotAMessageError("the weights are not finite")
                brought.contents[rank] = payload
            return {"segments": digest_of([list(segment) for segment in segments])}
        if "push" not in message or self._store is None or rank not in self._store.segments:
            raise NotAMessageError("no rank says that here")
        if rank in brought.pushes:
            raise NotAMessageError("a second push, before the first was answered")
        brought.pushes[rank] = payload
        return {"push": 1}

    # ---- what the server says ----

    def obey(self, command: Message) -> dict[str, object]:
        """Do what the server says, and give what it wants to know."""
        match next(iter(command)):
            case "begin":
                self._begin(self._brought[command.text("begin")], command.integer("updates"))
            case "take":
                weights = command.mapping("take")
                self._taken = {ticket: self._take(ticket) for ticket in weights}
                return self._add(weights)
            case "add":
                return self._add(command.mapping("add"))
            case "step":
                self._stored.step(command.number("step"), command.number("lr"))
                self._give(command)
            case "give":
                self._give(command)
            case "drop":
                self._brought.pop(command.text("drop"), None)
            case other:
                raise NotAMessageError(f"no server says {other}")
        return {}

    @property
    def _stored(self) -> ParameterStore:
        assert self._store is not None
        return self._store

    def _begin(self, newest: _Brought, updates: int) -> None:
        self._store = ParameterStore(self._optimizer, newest.segments, newest.contents, updates)
        for brought in list(self._brought.values()):
            brought.contents = {}

    def _take(self, ticket: str) -> dict[int, bytes]:
        pushes, self._brought[ticket].pushes = self._brought[ticket].pushes, {}
        return pushes

    def _add(self, weights: Message) -> dict[str, object]:
        """Add up with these weights, by ticket, in this order, what was taken; say what is finite, and the squares."""
        self._stored.begin_step()
        finite = []
        for ticket in weights:
            weight, is_good = weights.number(ticket), True
            for rank, push in self._taken[ticket].items() if weight > 0 else ():
                gradients = list(self._decode(rank, push))
                is_good = is_good and all(map(is_finite, gradients))
                self._stored.add(rank, gradients, weight)
            finite.append(is_good)
        return {"finite": finite, "squares": self._stored.squares()}

    def _decode(self, rank: int, push: bytes) -> Iterable[torch.Tensor]:
        start = 0
        for segment in self._stored.segments[rank]:
            end = start + self._codec.num_bytes(segment.num_elements)
            yield decode(self._codec, push[start:end], segment.num_elements)
            start = end

    def _give(self, command: Message) -> None:
        """Give weights to the islands with these tickets; what was taken is used."""
        self._taken = {}
        tickets, told = command.list("give"), command.mapping("told")
        for rank in self._stored.segments if tickets else ():
            content = self._stored.content(rank, with_slots=command.flag("with_slots"))
            for ticket in tickets:
                self._send(ticket, rank, {"weights": self._stored.updates, **told}, content)


def _read_segments(message: Message) -> list[Segment]:
    return [_read_segment(values) for values in message.list("segments")]


def _read_segment(values: object) -> Segment:
    if not isinstance(values, list) or len(values) != len(Segment._fields):
        raise NotAMessageError("a segment has a name, a shape, and four numbers")
    found = Message(zip(Segment._fields, values, strict=True))
    start, run, pitch, num_elements = (found.integer(name) for name in ("start", "run", "pitch", "num_elements"))
    return Segment(found.text("name"), tuple(found.integers("shape")), start, run, pitch, num_elements)
