"""The environment `openenv`: a client of a server that speaks OpenEnv's protocol, JSON messages over a WebSocket.

    {"type": "reset", "data": {"seed": N}}   ->  {"type": "observation", "data": {"observation", "reward", "done"}}
    {"type": "step", "data": ACTION}         ->  the same, or {"type": "error", "data": {"message", "code"}}

An episode has a connection of its own. The text of a turn is the action if it is a JSON object, else {"message": TEXT}.
"""

from __future__ import annotations

import json
import math
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from hfdist.environments.environment import Environment, Row, Step
from hfdist.messages.message import MOST_BYTES, Message, NotAMessageError, read_message

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

_MOST_SEED = 2**31
"""Seeds lie below it: those of numpy and gym have 32 bits."""


class OpenEnv(Environment):
    """One session of a server.

    Args:
        url: such as ws://127.0.0.1:8000/ws.
        seconds: the longest wait for an answer.
    """

    def __init__(self, url: str, seconds: float) -> None:
        self._url, self._seconds = url, seconds
        self._connection = ExitStack()
        self._socket: ClientConnection | None = None

    def knock(self) -> None:
        """Connect, and leave; what is raised where the server cannot be reached is raised."""
        self._connect()
        self.close()

    def _connect(self) -> None:
        # Imported here: it is an extra. No proxies of the environment: the config alone says who is spoken to.
        from websockets.sync.client import connect

        connection = connect(self._url, proxy=None, open_timeout=self._seconds, close_timeout=1, max_size=MOST_BYTES)
        self._socket = self._connection.enter_context(connection)

    def reset(self, row: Row) -> str | None:
        """Connect and begin; give the first observation."""
        self._connect()
        return self._ask("reset", {"seed": row.seed % _MOST_SEED}).observation

    def step(self, text: str) -> Step:
        """Send the turn as an action."""
        try:
            action = json.loads(text)
        except (ValueError, RecursionError):
            action = None
        return self._ask("step", action if isinstance(action, dict) else {"message": text})

    def close(self) -> None:
        """End the session."""
        if self._socket is not None:
            # The session may end because its connection has failed.
            with suppress(Exception), self._connection:
                self._socket.send(json.dumps({"type": "close"}))

    def _ask(self, kind: str, data: dict[str, object]) -> Step:
        """Send a message and read the answer.

        Any error ends the episode: an answer that comes late would be taken for the next one.
        """
        assert self._socket is not None  # `reset` has connected
        self._socket.send(json.dumps({"type": kind, "data": data}))
        answer = self._socket.recv(timeout=self._seconds)
        message = read_message(answer if isinstance(answer, bytes) else answer.encode(), MOST_BYTES)
        given = message.mapping("data")
        if message.text("type") == "error":
            raise NotAMessageError(f"the server refuses: {given.get('code')}: {given.get('message')}")
        if message.text("type") != "observation":
            raise NotAMessageError(f"{message.text('type')} in place of an observation")
        return _step(given)


def _step(given: Message) -> Step:
    observed, reward, done = given.get("observation"), given.get("reward"), given.get("done", False)
    if type(done) is not bool or not (reward is None or (type(reward) in (int, float) and math.isfinite(reward))):
        raise NotAMessageError("an observation has a finite reward, and done is true or false")
    text = observed if isinstance(observed, str) else json.dumps(observed, ensure_ascii=False)
    return Step(text, float(reward or 0.0), done)
