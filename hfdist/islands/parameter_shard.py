"""A shard of a parameter server: it keeps what ranks bring of its part of the tensors, and steps that part.

A shard decides nothing. The server sends commands, in the same order to all shards. The first member names the command:

    begin: ticket           make the store of the tensors that this island has brought
    take: {ticket: share}   take the pushes of these islands, and add them up by their shares
    add: {ticket: share}    add up anew, without some of the islands
    step: scale, lr         step the optimizer, and then do as for `give`
    give: [ticket]          give weights to these islands
    drop: ticket            forget what this island has brought
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
"""Sends a message and the bytes that follow it to a rank: (ticket of its island, rank, message, bytes)."""


@dataclass
class _Brought:
    """What the ranks of one island have brought to this shard, by rank."""

    segments: dict[int, list[Segment]] = field(default_factory=dict)
    """The segments of each rank that this shard has."""
    contents: dict[int, bytes] = field(default_factory=dict)
    """Weights and the optimizer's tensors, as the rank had them; empty once this shard has a store."""
    pushes: dict[int, bytes] = field(default_factory=dict)
    """Encoded gradients that no step has taken yet."""


def check_job(job: Message) -> OptimizerSlots:
    """Give the state that a job's optimizer keeps for each parameter; ConfigError: it cannot be stepped here."""
    return find_slots(optimizer_of(job))


def optimizer_of(job: Message) -> OptimizerConfig:
    """Give the settings of a job's optimizer; ConfigError: they are not settings, or have no rate."""
    made: OptimizerConfig = from_plain(OptimizerConfig, job.get("optimizer"), "optimizer")
    if made.lr is None:
        raise ConfigError("the optimizer has no rate", where="optimizer.lr", found="null", allowed="a number > 0")
    return made


class ParameterShard:
    """One shard. `keep` is called by the thread that reads messages, `obey` by one other thread.

    Args:
        job: values that all islands have alike, by key.
        send: sends weights to a rank; `obey` calls it.

    Raises:
        NotAMessageError: the job is one that no island would have.
        ConfigError: the job's optimizer cannot be stepped here.
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
        """Weights and optimizer; None: no island has begun yet."""

    # ---- what ranks bring ----

    def most_bytes(self, rank: int, message: Message) -> int:
        """Give how many bytes follow a message of a rank; NotAMessageError: no rank would send it.

        These are the tensors that it brings when it has connected, or its gradients.
        """
        if "segments" in message:
            num_elements = sum(segment.num_elements for segment in _read_segments(message))
            # A float32 number for each element of the weights and of each tensor of the optimizer.
            num_bytes = 4 * num_elements * (1 + len(self._slots.tensors))
            return min(num_bytes, psutil.virtual_memory().total)
        if "push" in message and self._store is not None:
            segments = self._store.segments.get(rank, ())
            return sum(self._codec.num_bytes(segment.num_elements) for segment in segments)
        return 0

    def keep(self, ticket: str, rank: int, message: Message, payload: bytes) -> dict[str, object]:
        """Keep what a rank has brought until a command needs it.

        Args:
            ticket: the ticket of the rank's island.
            rank: the rank.
            message: what the rank has sent.
            payload: the bytes that have followed the message.

        Returns:
            What the server must know of it: a digest of the segments, or that a push has come.

        Raises:
            NotAMessageError: no rank would send this.
        """
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
        """Do what a command says (see the first lines of this file), and give the answer for the server."""
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
        # The server sends `begin` before all other commands that need the store.
        assert self._store is not None
        return self._store

    def _begin(self, newest: _Brought, updates: int) -> None:
        """Make the store of an island's tensors; what other islands have brought is not needed any more."""
        self._store = ParameterStore(self._optimizer, newest.segments, newest.contents, updates)
        # A copy of the list: the other thread may add an island.
        for brought in list(self._brought.values()):
            brought.contents = {}

    def _take(self, ticket: str) -> dict[int, bytes]:
        """Take the pushes of an island, so that its next ones can come."""
        brought = self._brought[ticket]
        pushes, brought.pushes = brought.pushes, {}
        return pushes

    def _add(self, shares: Message) -> dict[str, object]:
        """Add up the taken pushes by the shares of their islands, in the order of these.

        Returns:
            `finite`: whether the pushes of an island are finite, for each one; `squares`: numbers whose sum is that of
            the squares of the gradients.
        """
        self._stored.begin_step()
        finite = []
        for ticket in shares:
            share = shares.number(ticket)
            # Without a share nothing is added, and nothing can be wrong.
            pushes = self._taken[ticket] if share > 0 else {}
            are_finite = True
            for rank, push in pushes.items():
                gradients = list(self._decode(rank, push))
                are_finite = are_finite and all(map(is_finite, gradients))
                self._stored.add(rank, gradients, share)
            finite.append(are_finite)
        return {"finite": finite, "squares": self._stored.squares()}

    def _decode(self, rank: int, push: bytes) -> Iterator[torch.Tensor]:
        """Give the gradients of each segment of a rank, of shape [elements]."""
        start = 0
        for segment in self._stored.segments[rank]:
            end = start + self._codec.num_bytes(segment.num_elements)
            yield decode(self._codec, push[start:end], segment.num_elements)
            start = end

    def _give(self, command: Message) -> None:
        """Send weights to all ranks of the islands that a command names, and forget the pushes of the step."""
        self._taken = {}
        tickets = command.list("give")
        if not tickets:
            return
        # The number of updates that have made the weights, and what the server adds.
        message = {"weights": self._stored.updates, **command.mapping("told")}
        for rank in self._stored.segments:
            content = self._stored.content(rank, with_slots=command.flag("with_slots"))
            for ticket in tickets:
                self._send(ticket, rank, message, content)


def _read_segments(message: Message) -> list[Segment]:
    return [_read_segment(values) for values in message.list("segments")]


def _read_segment(values: object) -> Segment:
    """Make a segment of a list of its fields; NotAMessageError: they are not of that kind."""
    if not isinstance(values, list) or len(values) != len(Segment._fields):
        raise NotAMessageError("a segment has a name, a shape, and four numbers")
    found = Message(zip(Segment._fields, values, strict=True))
    start, run, pitch, num_elements = (found.integer(name) for name in ("start", "run", "pitch", "num_elements"))
    return Segment(found.text("name"), tuple(found.integers("shape")), start, run, pitch, num_elements)
