"""The command line of `hfdist serve`: the server that islands meet at, until Ctrl-C or SIGTERM ends it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time

from hfdist.config.cli.arguments import as_command, read_arguments, read_number
from hfdist.config.cli.process_end import print_at_once
from hfdist.config.composition.overrides import COMMAND_LINE
from hfdist.errors import ConfigError
from hfdist.islands.server import IslandServer
from hfdist.launch.address import LOOPBACK, listen
from hfdist.messages.door import SECRET
from hfdist.processes.stop_signals import heard_signals

_HELP = f"""\
Serve islands: launches of their own, on machines of their own, that train one model together and speak once in many
steps. It says who takes part in each exchange; weights travel between the islands themselves, and never come here. With
islands=parameter_server it is the parameter server: it has weights and optimizer, and islands push their gradients.

hfdist serve port=29600
hfdist pretrain islands=diloco islands.count=2 islands.index=0 islands.address=HOST:29600 run.name=island-0 ...
hfdist pretrain islands=diloco islands.count=2 islands.index=1 islands.address=HOST:29600 run.name=island-1 ...

port=N              to listen at; default: 29600
host=ADDRESS        to listen at; default: all of this machine with a secret, and 127.0.0.1 without one
least=N             islands with which the first round begins; default: islands.count
silent_seconds=N    after which an island is lost that says nothing; default: 10

Islands on other machines need a secret: the same {SECRET} in the environment of the
server and of all islands. It never travels. Without one, anybody may join who reaches the server.

Exit codes: 0 it was told to end, 2 a wrong argument.
"""
_KEYS = {"port": "N", "host": "ADDRESS", "least": "N", "silent_seconds": "N"}


def _serve(arguments: list[str]) -> None:
    """Listen, say where, and serve until a signal ends the process; ConfigError: it cannot listen there."""
    values = read_arguments(arguments, _KEYS)
    port = read_number(values, "port", "29600")
    least = read_number(values, "least", "1") if "least" in values else None
    silent = read_number(values, "silent_seconds", "10")
    secret = os.environ.get(SECRET, "")
    host = values.get("host", "" if secret else LOOPBACK)
    try:
        listener = listen(host, port)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            "the server cannot listen there",
            where=f"host, port ({COMMAND_LINE})",
            found=f"{host or 'all addresses'}, {port}: {error}",
            hint="port=29600",
        ) from error
    server = IslandServer(listener, secret=secret, least=least, silent_seconds=silent, say=_say)
    for number in heard_signals():
        # At once, whatever its threads are at: it has nothing to save.
        signal.signal(number, lambda *_: os._exit(0))
    name = reached_at(host)
    _say(f"islands.address={name}:{listener.getsockname()[1]}")
    if not secret:
        _say(f"there is no {SECRET}: anybody may join who reaches {name}")
    asyncio.run(server.serve())


def reached_at(host: str) -> str:
    """Give the name or address at which islands reach a server that listens at `host`."""
    return socket.gethostname() if host in ("", "0.0.0.0", "::") else host


def _say(line: str) -> None:
    print_at_once(f"{time.strftime('%H:%M:%S')} {line}")


main = as_command(_HELP, _serve)
