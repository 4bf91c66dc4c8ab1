"""A connection to the broker of a run from another machine, through a gate."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress

from hfdist.messages.door import hear_answer, knock
from hfdist.tune.generators.messages import MOST_BYTES

IDLE_SECONDS, LOST_SECONDS = 10, 30
"""Seconds of silence after which the system asks whether the other machine is there, and until it counts as lost."""
_ASK_SECONDS = 5


class TcpLink:
    """The connection of one generator, of one rank, or of one reader of files.

    Args:
        address: host and port of the gate.
        secret: secret that the gate asks for; "": none.
        hello: message that says who this is.
        timeout_seconds: the longest wait for the connection and for the welcome.

    Raises:
        OSError: nobody answers.
        NotAMessageError: what answers is no gate.
        RefusedError: the gate does not let this one in.
    """

    def __init__(
        self, address: tuple[str, int], secret: str, hello: Mapping[str, object], timeout_seconds: float
    ) -> None:
        # Who listens there is told nothing before it has proven to know the secret.
        self._socket, self._answers = knock(address, secret, {}, hello, timeout_seconds)
        try:
            self.welcome = hear_answer(self._answers)
        except BaseException:
            self.close()
            raise
        # Answers may take any time.
        self._socket.settimeout(None)
        notice_loss(self._socket)

    def send(self, content: bytes) -> None:
        """Send a message; OSError: the connection has ended."""
        self._socket.sendall(content + b"\n")

    def recv(self) -> bytes:
        """Wait for a message; OSError: the connection has ended."""
        line = self._answers.readline(MOST_BYTES)
        if not line.endswith(b"\n"):
            raise ConnectionResetError("the connection was ended")
        return line[:-1]

    def recv_bytes(self, count: int) -> bytes:
        """Wait for what follows a message; OSError: the connection has ended."""
        content = self._answers.read(count)
        if len(content) < count:
            raise ConnectionResetError("the connection was ended")
        return content

    def close(self) -> None:
        """End the connection."""
        with suppress(OSError):  # ended by the other side
            self._socket.shutdown(socket.SHUT_RDWR)
        self._answers.close()
        self._socket.close()


def notice_loss(connection: socket.socket) -> None:
    """Let the system end a connection whose other machine is gone: nothing else tells who only waits."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", IDLE_SECONDS),
        ("TCP_KEEPINTVL", _ASK_SECONDS),
        ("TCP_KEEPCNT", (LOST_SECONDS - IDLE_SECONDS) // _ASK_SECONDS),
        ("TCP_USER_TIMEOUT", 1000 * LOST_SECONDS),
    ):
        # Some systems do not have all of them.
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
