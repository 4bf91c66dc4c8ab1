"""The command line of `hfdist serve`: the server that islands meet at, until Ctrl-C or SIGTERM ends it."""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import signal
import socket
import time

from hfdist.config.cli.arguments import as_command, read_arguments, read_number
from hfdist.config.cli.process_end import print_at_once
from hfdist.config.override_text import COMMAND_LINE
from hfdist.errors import ConfigError
from hfdist.islands.server import IslandServer
from hfdist.launch.address import LOOPBACK, find_route, is_loopback, listen
from hfdist.messages.door import SECRET
from hfdist.processes.stop_signals import heard_signals

_ROUTE_SECONDS = 60.0

_HELP = f"""\
Serve islands: launches of their own, on machines of their own, that train one model together and speak once in many
steps. It says who takes part in each exchange; weights travel between the islands themselves, and never come here. With
islands=parameter_server it is the parameter server: it has weights and optimizer, and islands push their gradients.

hfdist serve port=29600
hfdist pretrain islands=diloco islands.count=2 islands.index=0 islands.address=HOST:29600 run.name=island-0 ...
hfdist pretrain islands=diloco islands.count=2 islands.index=1 islands.address=HOST:29600 run.name=island-1 ...

port=N              to listen at; default: 29600, and any free port for a shard
host=ADDRESS        to listen at; default: all of this machine with a secret, and 127.0.0.1 without one
of=HOST:PORT        be another shard of the parameter server there: islands.server_shards counts it
least=N             islands with which the first round begins; default: islands.count
silent_seconds=N    after which an island is lost that says nothing; default: 10

Islands on other machines need a secret: the same {SECRET} in the environment of the
server and of all islands. It never travels. Without one, anybody may join who reaches the server.

Exit codes: 0 it was told to end, 2 a wrong argument, 6 the server of a shard does not answer for a minute.
"""
_KEYS = {"port": "N", "host": "ADDRESS", "of": "HOST:PORT", "least": "N", "silent_seconds": "N"}


def _serve(arguments: list[str]) -> None:
    """Listen, say where, and serve until a signal ends the process; ConfigError: it cannot listen there."""
    values = read_arguments(arguments, _KEYS)
    of = values.get("of")
    # A shard says where it is.
    port = read_number(values, "port", "29600") if of is None or "port" in values else 0
    secret = os.environ.get(SECRET, "")
    host = values.get("host", "" if secret else LOOPBACK)
    if of is not None:
        _check_shard(of, values)
    try:
        listener = listen(host, port)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            "the server cannot listen there",
            where=f"host, port ({COMMAND_LINE})",
            found=f"{host or 'all addresses'}, {port}: {error}",
            hint="another port, such as port=29601; of host, an address of this machine",
        ) from error
    for number in heard_signals():
        # At once, whatever its threads are at: it has nothing to save.
        signal.signal(number, lambda *_: os._exit(0))
    if of is not None:
        address = f"{_host_beside(of, host)}:{listener.getsockname()[1]}"
        _say(f"a shard of the server at {of}, reached at {address}")
        # It loads torch, which a server of rounds does not.
        made = importlib.import_module("hfdist.islands.shard_process").ShardProcess
        asyncio.run(made(listener, address, server=of, secret=secret, say=_say).serve())
        return
    least = read_number(values, "least", "1") if "least" in values else None
    silent = read_number(values, "silent_seconds", "10")
    server = IslandServer(listener, secret=secret, least=least, silent_seconds=silent, say=_say)
    name = reached_at(host)
    _say(f"islands.address={name}:{listener.getsockname()[1]}")
    if not secret:
        _say(f"there is no {SECRET}: anybody may join who reaches {name}")
    asyncio.run(server.serve())


def _check_shard(of: str, values: dict[str, str]) -> None:
    found = re.fullmatch(r"(?:[^:]+|\[.+\]):(\d{1,5})", of)
    if found is None or not 1 <= int(found[1]) <= 65535:
        what = "the server of a shard has no address"
        raise ConfigError(what, where=f"of ({COMMAND_LINE})", found=of, allowed="HOST:PORT", hint="of=HOST:29600")
    for key in ("least", "silent_seconds"):
        if key in values:
            what = "this is for the server, and not for another shard of it"
            raise ConfigError(what, where=f"{key} ({COMMAND_LINE})", found=values[key], hint=f"without {key}")


def _host_beside(server: str, host: str) -> str:
    """Give the address at which ranks reach this shard: the own one on the way to the server, if it listens at all."""
    peer = server.rpartition(":")[0].strip("[]")
    try:
        own = find_route(peer, wait_seconds=_ROUTE_SECONDS)[1]
    except OSError as error:
        what = "there is no way to the server"
        raise ConfigError(what, where=f"of ({COMMAND_LINE})", found=f"{server}: {error}") from error
    if host == LOOPBACK and not is_loopback(own):
        raise ConfigError(
            "islands on other machines would not reach this shard",
            where=f"host ({COMMAND_LINE})",
            found=f"{LOOPBACK}, with of={server}",
            hint=f"the {SECRET} of the server and all islands in the environment, or host={own}",
        )
    if host in ("", "0.0.0.0", "::"):
        host = own
    return f"[{host}]" if ":" in host else host


def reached_at(host: str) -> str:
    """Give the name or address at which islands reach a server that listens at `host`."""
    return socket.gethostname() if host in ("", "0.0.0.0", "::") else host


def _say(line: str) -> None:
    print_at_once(f"{time.strftime('%H:%M:%S')} {line}")


main = as_command(_HELP, _serve)
