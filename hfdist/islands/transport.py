"""What travels between the ranks of islands: the mean of a vector, and whole states, over ZeroMQ.

Each rank speaks to the ranks of the same number in other islands. Of a vector of n islands each adds up one n-th in
float32 and gives the mean to the others, so that all have the same bits, and a rank sends 2 (n - 1) / n of the vector.
Any wait ends as soon as the rendezvous is aborted: a collective of torch would wait for its own time-out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import zmq

from hfdist.config.islands import Codec
from hfdist.islands.codec import decode, encode

_CHUNK_ELEMENTS = 2**24
"""Of a vector, that travel at a time."""
_POLL_MILLISECONDS = 100


class AbortedError(Exception):
    """The rendezvous does not count."""


class Transport:
    """The sockets of one rank.

    Args:
        host: the own address, as other islands reach it.
        codec: how vectors travel.
    """

    def __init__(self, host: str, codec: Codec) -> None:
        self._codec = codec
        self._context = zmq.Context()
        self._inbox = self._socket(zmq.ROUTER)
        in_url = f"[{host}]" if ":" in host else host
        self.address = f"tcp://{in_url}:{self._inbox.bind_to_random_port('tcp://*')}"
        """For other islands."""
        self._peers: dict[str, zmq.Socket[bytes]] = {}
        self._waiting: dict[tuple[int, str, str], list[bytes]] = {}
        """What has come before it was asked for, by rendezvous, kind and sender."""
        self._nonce = ""
        """Of the server: what has another is no message of an island."""
        self.sent_bytes = 0

    def mean(
        self, number: int, vector: torch.Tensor, members: Sequence[str], is_aborted: Callable[[], bool]
    ) -> torch.Tensor:
        """Give the mean of all members' vectors, the same on all.

        Args:
            number: of the rendezvous.
            vector: float32 on the CPU, of shape [n], as long on each member.
            members: the addresses of the ranks that take part, in the same order on all; this one is among them.
            is_aborted: whether to wait no more.

        Raises:
            AbortedError: the rendezvous has been aborted.
        """
        means = [
            self._mean_of_chunk(number, f"{place}", chunk, members, is_aborted)
            for place, chunk in enumerate(vector.split(_CHUNK_ELEMENTS))
        ]
        return torch.cat(means) if means else vector

    def _mean_of_chunk(
        self, number: int, name: str, chunk: torch.Tensor, members: Sequence[str], is_aborted: Callable[[], bool]
    ) -> torch.Tensor:
        own, parts = members.index(self.address), torch.tensor_split(chunk, len(members))
        encoded = [encode(self._codec, part.contiguous()) for part in parts]
        total = torch.zeros_like(parts[own])
        # In the members' order, and each rounded alike, so that it does not matter who adds up.
        for content in self._swap(number, f"part {name}", members, encoded, is_aborted):
            total += self._decode(content, len(total))
        own_mean = encode(self._codec, total / len(members))
        means = self._swap(number, f"mean {name}", members, [own_mean] * len(members), is_aborted)
        return torch.cat([self._decode(mean, len(part)) for mean, part in zip(means, parts, strict=True)])

    def _swap(
        self, number: int, kind: str, members: Sequence[str], contents: list[bytes], is_aborted: Callable[[], bool]
    ) -> list[bytes]:
        """Give each member its content, and take one from each."""
        pairs = list(zip(members, contents, strict=True))
        for address, content in pairs:
            if address != self.address:
                self.send(address, number, kind, content)
        return [
            content if address == self.address else b"".join(self.receive(address, number, kind, is_aborted))
            for address, content in pairs
        ]

    def _decode(self, content: bytes, num_elements: int) -> torch.Tensor:
        try:
            return decode(self._codec, content, num_elements)
        except ValueError as error:
            raise AbortedError from error

    def send(self, address: str, number: int, kind: str, *contents: bytes) -> None:
        """Begin to send; it goes on beside what follows."""
        if address not in self._peers:
            self._peers[address] = self._socket(zmq.DEALER)
            self._peers[address].connect(address)
        header = json.dumps([self._nonce, number, kind, self.address]).encode()
        self._peers[address].send_multipart([header, *contents], copy=False)
        self.sent_bytes += sum(map(len, contents))

    def receive(self, address: str, number: int, kind: str, is_aborted: Callable[[], bool]) -> list[bytes]:
        """Wait for what a member has sent.

        Raises:
            AbortedError: the rendezvous has been aborted.
        """
        while (number, kind, address) not in self._waiting:
            if self._inbox.poll(_POLL_MILLISECONDS):
                self._take(self._inbox.recv_multipart())
            elif is_aborted():
                raise AbortedError
        return self._waiting.pop((number, kind, address))

    def _take(self, frames: list[bytes]) -> None:
        try:
            _, header, *contents = frames
            nonce, number, kind, sender = json.loads(header)
            if nonce == self._nonce:
                self._waiting[int(number), str(kind), str(sender)] = contents
        except (ValueError, TypeError):
            # Of no island.
            return

    def begin(self, nonce: str) -> None:
        """Speak to those who know this server."""
        if nonce != self._nonce:
            self._nonce, self._waiting = nonce, {}

    def keep(self, addresses: Sequence[str]) -> None:
        """Drop what is still under way to ranks that are gone."""
        for address in [one for one in self._peers if one not in addresses]:
            self._peers.pop(address).close(linger=0)

    def forget(self, number: int) -> None:
        """Drop what has come of rendezvous up to this one."""
        self._waiting = {key: contents for key, contents in self._waiting.items() if key[0] > number}

    def close(self) -> None:
        """Close all; what is under way has a moment to arrive."""
        for peer in self._peers.values():
            peer.close()
        self._inbox.close()
        self._context.term()

    def _socket(self, kind: int) -> Any:
        made = self._context.socket(kind)
        made.setsockopt(zmq.IPV6, 1)
        # None is dropped while a peer is slow; and of one that is gone no process waits long.
        made.setsockopt(zmq.SNDHWM, 0)
        made.setsockopt(zmq.RCVHWM, 0)
        made.setsockopt(zmq.LINGER, 5000)
        return made
