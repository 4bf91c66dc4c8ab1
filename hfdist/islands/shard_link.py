"""The server's end of a connection to a shard of a parameter server, a process on the same or another machine.

    server                       shard
    do: a command         ->
                          <-     done: the answer
                          <-     a report                 what a rank has brought to the shard

Answers come in the order of the commands, and reports at any time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping

from hfdist.islands.membership import Connection
from hfdist.messages.door import read_line
from hfdist.messages.message import Message, read_message


class ShardLink:
    """The connection to one shard.

    Args:
        connection: the open connection.
        address: HOST:PORT at which the shard hears ranks.
    """

    def __init__(self, connection: Connection, address: str) -> None:
        self.connection, self.address = connection, address
        self.report: Callable[[Message], None] = lambda message: None
        """Takes each report of the shard: what a rank has brought to it."""
        self._answers: deque[asyncio.Future[Message]] = deque()
        """Answers that have not come yet, in the order of their commands."""
        self._has_ended = False

    async def ask(self, command: Mapping[str, object]) -> Message:
        """Send a command, and give the answer once it has come; ConnectionResetError: the shard has ended."""
        if self._has_ended:
            raise ConnectionResetError
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._answers.append(answer)
        self.connection.send({"do": command})
        return await answer

    async def hear(self, reader: asyncio.StreamReader) -> None:
        """Read what the shard sends until its connection ends.

        Raises:
            EOFError: the connection has ended.
            OSError: the connection has failed.
            NotAMessageError: no shard would send this.
        """
        try:
            while True:
                message = read_message(await read_line(reader))
                self.connection.hear()
                if "done" in message and self._answers:
                    self._answers.popleft().set_result(message.mapping("done"))
                elif "beat" not in message:
                    self.report(message)
        finally:
            self._has_ended = True
            for answer in self._answers:
                answer.set_exception(ConnectionResetError())
