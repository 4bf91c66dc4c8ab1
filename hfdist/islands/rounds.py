"""A round's end: the ranks of an island meet those of the others, exchange, and begin the next round alike."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from hfdist.checkpoint.piece import Piece
from hfdist.collectives import first_problem, gather_json, on_all_ranks, on_rank_zero, rank
from hfdist.config.islands import IslandsConfig
from hfdist.data.cache import digest_of
from hfdist.errors import NumericsError, PeerError
from hfdist.islands.data_share import DataShare
from hfdist.islands.handed_state import find_mismatch, take_state, write_state
from hfdist.islands.member import make_member
from hfdist.islands.open_transport import find_own_host, open_transport
from hfdist.islands.outer import OuterOptimizer
from hfdist.islands.rendezvous_messages import Arrival, Participants
from hfdist.islands.transport import MOST_PART_BYTES, AbortedError, BadPartError, Transport
from hfdist.islands.vectors import is_finite
from hfdist.messages.message import MOST_BYTES, Message, NotAMessageError, read_message

logger = logging.getLogger(__name__)

_STATE = "state"
_ABORTED = "aborted"
"""Why a rank has no state of another island, where that is nobody's fault."""
_MOST_HEADER_BYTES = 2**26
_MOST_TRIES = 12
"""The most tries of the exchange of one step."""
_REST_SECONDS, _MOST_REST_SECONDS = 0.1, 5.0
"""Seconds before a try: twice the first number before the third try, then doubled each time; at most the second."""


@dataclass
class _Exchange:
    """An exchange that is under way."""

    step: int
    fragment: int | None
    changes: torch.Tensor
    weight: float
    """Weight of this island's changes, in the mean of all islands."""
    rests: bool
    sent_before: int
    """Bytes that this rank had sent to other islands when the exchange began."""
    participants: Participants | None = None
    """Who takes part; None: they are not known yet."""
    mean: Future[torch.Tensor] | None = None
    """Mean of the changes of all members; None: this island is no member."""
    waited_seconds: float = 0.0
    num_tries: int = 0
    bad: dict[int, str] = field(default_factory=dict)
    """Islands whose parts could not be used in the last try, with why."""

    @property
    def has_no_members(self) -> bool:
        """Whether there is nothing to exchange: others begin at the same weights."""
        return self.participants is not None and not self.participants.members


class Rounds:
    """An island's part in the rounds. All its ranks call its methods together.

    Args:
        config: `islands.*`.
        job: what must be the same on all islands, by key.
        outer: of this rank.
        list_pieces: gives all that a rank of an island has, outer state included, anew each time.
        data_share: of the stream that all islands read; None: each has data of its own.
    """

    def __init__(
        self,
        config: IslandsConfig,
        job: Mapping[str, object],
        outer: OuterOptimizer,
        list_pieces: Callable[[], list[Piece]],
        data_share: DataShare | None,
    ) -> None:
        self._config, self._outer, self._list_pieces, self._data_share = config, outer, list_pieces, data_share
        address = config.address
        assert address is not None
        state_bytes = sum(piece.view.nbytes for piece in list_pieces())
        most_bytes = max(MOST_PART_BYTES, state_bytes + MOST_BYTES)
        opened: list[Transport] = []

        def open_own() -> str:
            # Within, as the others must hear of a machine that finds no way to the server.
            host = find_own_host(address, config.timeout_seconds)
            opened.append(open_transport(config, host, most_bytes))
            return opened[0].address

        addresses = on_all_ranks(open_own)
        (self._transport,) = opened
        self._member = make_member(config, job, addresses)
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="islands")
        self._exchange: _Exchange | None = None
        self._figures: dict[str, float] = {}
        self.rests = False
        """Whether this island does not train in the round that begins."""

    @property
    def is_open(self) -> bool:
        """Whether an exchange is under way."""
        return self._exchange is not None

    @property
    def deals(self) -> bool:
        """Whether the exchange under way gives data to other islands, so that nothing is read meanwhile."""
        participants = None if self._exchange is None else self._exchange.participants
        return participants is not None and self._data_share is not None and self._data_share.deals(participants.there)

    @property
    def open_step(self) -> int:
        """Step after which the exchange under way began."""
        assert self._exchange is not None
        return self._exchange.step

    def begin(self, step: int, fragment: int | None = None, *, weight: float = 1.0, rests: bool = False) -> None:
        """Meet the other islands after a step, or before the first one, and begin to exchange.

        Args:
            step: the step that has just ended.
            fragment: of the model, that is exchanged; None: all.
            weight: of what this island has learned, in the mean of all.
            rests: whether it has not trained, and waits for what the others learn.

        Raises:
            NumericsError: the weights of this island are not finite.
            PeerError: the server does not answer.
            ConfigError: the server refuses this island.
        """
        begin, is_start = time.monotonic(), step == self._outer.step
        changes = torch.empty(0) if is_start else self._outer.changes(fragment)
        if not all(gather_json(is_finite(changes))):
            what = "the weights of this island are not finite, so that it leaves the others"
            raise NumericsError(what, where=f"step {step}", hint="the same command goes on from its last checkpoint")
        self._exchange = _Exchange(step, fragment, changes, weight, rests, self._transport.sent_bytes)
        self._come(self._exchange)
        self._exchange.waited_seconds = time.monotonic() - begin

    def end(self, state: Callable[[], Mapping[str, object]]) -> dict[str, object] | None:
        """Wait for the end of the exchange, and take what it gives.

        Args:
            state: gives what an island needs besides tensors to go on as this one, as JSON.

        Returns:
            The state of the island whose tensors this one has got; None: it goes on with its own.

        Raises:
            PeerError: the server does not answer, or has ended this island; or no exchange comes to its end.
            ConfigError: the server refuses this island.
        """
        begin, exchange = time.monotonic(), self._exchange
        assert exchange is not None
        taken_state = None
        while not exchange.has_no_members:
            participants = exchange.participants
            if participants is not None and exchange.mean is not None:
                if self._settle(exchange, participants):
                    self._hand_over(participants, state)
                    break
            elif participants is not None:
                taken_state = self._receive(exchange, participants)
                if taken_state is not None:
                    break
            self._try_again(exchange)
        self._exchange, participants = None, exchange.participants
        if participants is not None and exchange.has_no_members and self._data_share is not None:
            self._data_share.begin(participants.there)
        self.rests = participants is not None and self._config.index in participants.resting
        if participants is not None and participants.members:
            self._transport.forget(participants.number)
            exchange.waited_seconds += time.monotonic() - begin
            self._note(exchange, len(participants.members))
        return taken_state

    def _note(self, exchange: _Exchange, num_members: int) -> None:
        """Add an exchange that has ended to the figures of the next training line."""
        sent_bytes = self._transport.sent_bytes - exchange.sent_before
        self._figures["islands/members"] = num_members
        self._figures["islands/sent_bytes"] = self._figures.get("islands/sent_bytes", 0) + sent_bytes
        self._figures["islands/wait_seconds"] = self._figures.get("islands/wait_seconds", 0.0) + exchange.waited_seconds

    def figures(self) -> dict[str, float]:
        """Give what a training line says of exchanges since the last line, of this rank."""
        figures, self._figures = self._figures, {}
        return figures

    def leave(self) -> None:
        """Take part no more, once what this island has given to others is there."""
        if not self.is_open:
            # Before the bye: what an island has not given until then is lost with it.
            on_all_ranks(self._transport.close)
        if rank() == 0:
            self._member.leave()
        self._member.close()
        # Without a connection what is under way is aborted.
        self._sender.shutdown()
        self._transport.close()

    def _try_again(self, exchange: _Exchange) -> None:
        """Come to another rendezvous, later each time; PeerError: that was often enough."""
        exchange.num_tries += 1
        if exchange.num_tries >= _MOST_TRIES:
            whose = "; ".join(f"island {index}: {why}" for index, why in exchange.bad.items())
            what, hint = f"no exchange of {_MOST_TRIES} has come to its end", "the lines of `hfdist serve` say why"
            raise PeerError(what, where=f"step {exchange.step}", found=whose or None, hint=hint)
        # The second try at once: where an island is lost, the others need not wait.
        if exchange.num_tries > 1:
            time.sleep(min(_MOST_REST_SECONDS, _REST_SECONDS * 2 ** (exchange.num_tries - 1)))
        self._come(exchange)

    def _come(self, exchange: _Exchange) -> None:
        """Come to a rendezvous, and begin to exchange if this island is a member."""
        exchange.participants, exchange.mean = self._arrive(exchange), None
        if exchange.participants is None or not exchange.participants.members:
            return
        number, members = exchange.participants.number, exchange.participants.members
        self._transport.forget(number - 1)
        if self._config.index in members:
            addresses = [members[index][rank()] for index in sorted(members)]
            self._transport.keep(addresses)
            total = sum(exchange.participants.weights.values())
            weighted = exchange.changes * (exchange.weight * len(members) / total if total > 0 else 1.0)
            # One thread has the sockets at a time: this one again, once it has the result.
            exchange.mean = self._sender.submit(
                self._transport.mean, number, weighted, addresses, lambda: self._member.is_aborted(number)
            )

    def _arrive(self, exchange: _Exchange) -> Participants | None:
        """Come to a rendezvous; None: the connection of some rank has ended."""
        on_all_ranks(self._member.connect)
        self._transport.begin(self._member.nonce)
        arrival = Arrival(
            step=exchange.step,
            outer_step=self._outer.step,
            digest=digest_of(gather_json(self._outer.digest())),
            weight=exchange.weight,
            rests=exchange.rests,
            read=None if self._data_share is None else self._data_share.read(),
        )
        answer = on_rank_zero(lambda: self._member.arrive(arrival))
        return None if answer is None else Participants.from_json(answer)

    def _settle(self, exchange: _Exchange, participants: Participants) -> bool:
        """Take the mean if all islands have it; False: the rendezvous is aborted."""
        assert exchange.mean is not None
        mean: torch.Tensor | None = None
        own_bad: list[tuple[int, str]] = []
        number = participants.number
        try:
            mean = exchange.mean.result()
        except AbortedError:
            logger.debug("rendezvous %d is aborted", number)
        except BadPartError as error:
            own_bad = [(participants.island_of(error.address, rank()), str(error))]
        of_ranks = gather_json([mean is not None, own_bad])
        is_ok = all(has_mean for has_mean, _ in of_ranks)
        bad = {index: why for _, bad_of_rank in of_ranks for index, why in bad_of_rank}
        exchange.bad = bad or exchange.bad
        for index, why in bad.items():
            logger.warning("what island %d has sent cannot be used: %s", index, why)
        read = gather_json(self._member.finish(number, is_ok=is_ok, bad=bad) if rank() == 0 else None)[0]
        if read is None or mean is None:
            return False
        self._outer.take(mean, exchange.step, exchange.fragment)
        if self._data_share is not None:
            self._data_share.deal({int(index): value for index, value in read.items()}, participants.there)
        return True

    def _hand_over(self, participants: Participants, state: Callable[[], Mapping[str, object]]) -> None:
        """Send all that this island has to those that are given its state."""
        for source, addresses in participants.sources.values():
            if source != self._config.index:
                continue
            parts = write_state(self._list_pieces(), state())
            self._transport.send(addresses[rank()], participants.number, _STATE, *parts)

    def _receive(self, exchange: _Exchange, participants: Participants) -> dict[str, object] | None:
        """Take the state of another island into all pieces; None: the rendezvous is aborted, or that does not fit."""
        source, _ = participants.sources[self._config.index]
        address, number = participants.members[source][rank()], participants.number
        problem: str | None = _ABORTED
        header, contents, pieces = Message(), list[bytes](), self._list_pieces()
        try:
            received = self._transport.receive(address, number, _STATE, lambda: self._member.is_aborted(number))
            header, contents = read_message(received[0] if received else b"", _MOST_HEADER_BYTES), received[1:]
            problem = find_mismatch(header, contents, pieces)
        except AbortedError:
            logger.debug("rendezvous %d is aborted", number)
        except NotAMessageError as error:
            problem = f"its state is {error}"
        problem = first_problem(problem)
        if problem == _ABORTED:
            return None
        if problem is not None:
            exchange.bad = {source: problem}
            if rank() == 0:
                logger.warning("the state of island %d is not taken: %s", source, problem)
                self._member.tell_done(number, is_ok=False)
            return None
        take_state(pieces, contents)
        self._outer.after_load()
        if rank() == 0:
            self._member.tell_done(number, is_ok=True)
        return dict(header.mapping("state"))
