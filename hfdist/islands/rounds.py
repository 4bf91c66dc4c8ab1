"""A round's end: the ranks of an island meet those of the others, exchange, and begin the next round alike."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable
from typing import Any

import torch

from hfdist.checkpoint.piece import Piece
from hfdist.collectives import gather_json, on_all_ranks, rank
from hfdist.config.islands import IslandsConfig
from hfdist.errors import ConfigError, NumericsError, PeerError
from hfdist.islands.link import Link, VoidError
from hfdist.islands.member import Meeting, Member
from hfdist.islands.outer import OuterOptimizer, is_finite
from hfdist.islands.server import SECRET, Arrival, random_text
from hfdist.jobs.address import find_route

logger = logging.getLogger(__name__)

_STATE = "state"


class Rounds:
    """An island's part in the rounds. All its ranks call its methods together.

    Args:
        config: `islands.*`.
        job: what must be the same on all islands, by key.
        outer: of this rank.
        list_pieces: gives all that a rank of an island has, outer state included, anew each time.
    """

    def __init__(
        self,
        config: IslandsConfig,
        job: dict[str, Any],
        outer: OuterOptimizer,
        list_pieces: Callable[[], list[Piece]],
    ) -> None:
        self._config, self._outer, self._list_pieces = config, outer, list_pieces
        assert config.address is not None
        self._link = Link(_own_host(config.address, config.timeout_seconds), config.codec)
        addresses = gather_json(self._link.address)
        hello = {"island": config.index, "rank": rank(), "start": gather_json(random_text())[0]}
        hello["secret"] = os.environ.get(SECRET, "")
        if rank() == 0:
            hello |= {"job": job, "addresses": addresses}
        self._member = Member(config.address, hello, config.timeout_seconds)
        self._figures: dict[str, float] = {}

    def meet(self, step: int, state: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """Meet the other islands behind a step, or before the first one.

        Args:
            step: behind which it is.
            state: gives what an island needs besides tensors to go on as this one, as JSON.

        Returns:
            The state of the island whose tensors this one has got; None: it goes on with its own.

        Raises:
            NumericsError: the weights of this island are not finite.
            PeerError: the server does not answer.
            ConfigError: the server refuses this island.
        """
        begin, sent = time.monotonic(), self._link.sent_bytes
        is_start = step == self._outer.step
        changes = torch.empty(0) if is_start else self._outer.changes()
        if not all(gather_json(is_finite(changes))):
            what = "the weights of this island are not finite, so that it leaves the others"
            raise NumericsError(what, where=f"step {step}", hint="the same command goes on from its last checkpoint")
        while True:
            meeting = self._arrive(step)
            if meeting is None:
                continue
            if not is_start and self._config.index in meeting.members:
                if self._exchange(meeting, changes, step):
                    self._hand_over(meeting, state)
                    found = None
                    break
            elif self._config.index in meeting.donors:
                found = self._receive(meeting)
                if found is not None:
                    break
            else:
                # Others begin at the same weights.
                found = None
                break
        self._link.forget(meeting.number)
        if meeting.members:
            self._figures = {
                "islands/members": len(meeting.members),
                "islands/sent_bytes": self._link.sent_bytes - sent,
                "islands/seconds": time.monotonic() - begin,
            }
        return found

    def figures(self) -> dict[str, float]:
        """Give what a training line says of the last round's end since the last line, of this rank."""
        figures, self._figures = self._figures, {}
        return figures

    def leave(self) -> None:
        """Take part no more."""
        if rank() == 0:
            self._member.leave()
        self.close()

    def close(self) -> None:
        """End all connections."""
        self._member.close()
        self._link.close()

    def _arrive(self, step: int) -> Meeting | None:
        """Come to a meeting; None: the connection of some rank has ended."""
        on_all_ranks(self._member.connect)
        self._link.begin(self._member.nonce)
        arrival = Arrival(step=step, outer_step=self._outer.step, digest=_joined_digest(self._outer))
        found: Meeting | None = self._member.arrive(arrival) if rank() == 0 else None
        told = gather_json(None if found is None else vars(found))[0]
        if told is None:
            return None
        members = {int(index): addresses for index, addresses in told["members"].items()}
        donors = {int(index): tuple(donor) for index, donor in told["donors"].items()}
        return Meeting(number=told["number"], members=members, donors=donors)

    def _exchange(self, meeting: Meeting, changes: torch.Tensor, step: int) -> bool:
        """Exchange changes, and take their mean if all islands have it; False: the meeting is void."""
        addresses = [meeting.members[index][rank()] for index in sorted(meeting.members)]
        self._link.keep(addresses)
        mean: torch.Tensor | None = None
        try:
            mean = self._link.mean(meeting.number, changes, addresses, lambda: self._member.is_void(meeting.number))
        except VoidError:
            logger.debug("meeting %d is void", meeting.number)
        is_ok = all(gather_json(mean is not None))
        counts = gather_json(rank() == 0 and self._member.finish(meeting.number, is_ok=is_ok))[0]
        if not counts or mean is None:
            return False
        self._outer.take(mean, step)
        return True

    def _hand_over(self, meeting: Meeting, state: Callable[[], dict[str, Any]]) -> None:
        """Send all that this island has to those that are given its state."""
        for donor, addresses in meeting.donors.values():
            if donor != self._config.index:
                continue
            pieces = self._list_pieces()
            header = {"state": state(), "pieces": [_describe(piece) for piece in pieces]}
            contents = [_bytes_of(piece) for piece in pieces]
            self._link.send(addresses[rank()], meeting.number, _STATE, json.dumps(header).encode(), *contents)

    def _receive(self, meeting: Meeting) -> dict[str, Any] | None:
        """Take the state of another island into all pieces; None: the meeting is void."""
        donor, _ = meeting.donors[self._config.index]
        address, number = meeting.members[donor][rank()], meeting.number
        found: list[bytes] | None = None
        try:
            found = self._link.receive(address, number, _STATE, lambda: self._member.is_void(number))
        except VoidError:
            logger.debug("meeting %d is void", number)
        if not all(gather_json(found is not None)):
            return None
        assert found is not None
        header, *contents = json.loads(found[0]), *found[1:]
        pieces = self._list_pieces()
        fits = header["pieces"] == [_describe(piece) for piece in pieces] and len(contents) == len(pieces)
        if not all(gather_json(fits)):
            what, hint = "the state of an island does not fit this one", "the same overrides for all islands"
            raise PeerError(what, where="islands.index", found=donor, hint=hint)
        for piece, content in zip(pieces, contents, strict=True):
            _fill(piece, content)
        if rank() == 0:
            self._member.tell_done(number)
        state: dict[str, Any] = header["state"]
        return state


def _own_host(address: str, wait_seconds: float) -> str:
    """Give the own address, from which the server is reached."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return find_route(host, wait_seconds=wait_seconds)[1]
    except OSError as error:
        what, allowed = "there is no way to the server of the islands", "HOST:PORT of `hfdist serve`"
        raise ConfigError(what, where="islands.address", found=f"{address}: {error}", allowed=allowed) from error


def _joined_digest(outer: OuterOptimizer) -> str:
    """Of all ranks of this island. A collective."""
    return hashlib.blake2b("".join(gather_json(outer.digest())).encode(), digest_size=16).hexdigest()


def _describe(piece: Piece) -> list[Any]:
    return [piece.name, piece.key, list(piece.shape), piece.start, piece.view.numel(), str(piece.view.dtype)]


def _bytes_of(piece: Piece) -> bytes:
    return piece.view.detach().reshape(-1).cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _fill(piece: Piece, content: bytes) -> None:
    view = piece.view.detach()
    values = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(view.dtype) if content else view.new_empty(0)
    view.copy_(values.view(view.shape))
    if piece.set_number is not None:
        piece.set_number(values.item())
