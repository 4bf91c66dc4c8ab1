"""A server's connection to a shard on the same or another machine: it says what to do, and hears what ranks bring."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping

from hfdist.islands.membership import Connection
from hfdist.messages.door import read_line
from hfdist.messages.message import Message, read_message


class ShardLink:
    """The connection to a shard.

    Args:
        connection: to it.
        address: HOST:PORT at which it hears ranks.
    """

    def __init__(self, connection: Connection, address: str) -> None:
        self.connection, self.address = connection, address
        self.report: Callable[[Message], None] = lambda message: None
        """Takes what the shard says without being asked: what a rank has brought."""
        self._asked: deque[asyncio.Future[Message]] = deque()
        """What it has not answered yet, in order."""
        self._has_ended = False

    async def ask(self, command: Mapping[str, object]) -> Message:
        """Say what to do, and wait for the answer; ConnectionResetError: the shard has ended."""
        if self._has_ended:
            raise ConnectionResetError
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        self.connection.send({"do": command})
        return await answer

    async def hear(self, reader: asyncio.StreamReader) -> None:
        """Hear the shard until its connection ends, with an EOFError or OSError, or it says what no shard does."""
        try:
            while True:
                message = read_message(await read_line(reader))
                self.connection.hear()
                if "done" in message and self._asked:
                    self._asked.popleft().set_result(message.mapping("done"))
                elif "beat" not in message:
                    self.report(message)
        finally:
            self._has_ended = True
            for answer in self._asked:
                answer.set_exception(ConnectionResetError())
