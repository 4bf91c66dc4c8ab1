"""The command line of `hfdist serve`: it runs the server of islands, or a shard, until Ctrl-C or SIGTERM ends it."""

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
"""Seconds for which a shard looks for a way to its server: both may start at the same time."""
_EVERY_ADDRESS = ("", "0.0.0.0", "::")
"""Values of `host` with which a socket listens at all addresses of this machine."""

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
    """Listen, say where, and serve until a signal ends the process; ConfigError: a wrong argument or address."""
    values = read_arguments(arguments, _KEYS)
    main_server = values.get("of")
    if main_server is not None:
        _check_shard(main_server, values)
    secret = os.environ.get(SECRET, "")
    host = values.get("host", "" if secret else LOOPBACK)
    # A shard tells the server its port, so that any free one will do.
    takes_any_port = main_server is not None and "port" not in values
    listener = _listen(host, 0 if takes_any_port else read_number(values, "port", "29600"))
    for number in heard_signals():
        # At once, whatever its threads are at: it has nothing to save.
        signal.signal(number, lambda *_: os._exit(0))
    if main_server is None:
        _serve_islands(listener, host, secret, values)
    else:
        _serve_shard(listener, host, secret, main_server)


def _listen(host: str, port: int) -> socket.socket:
    try:
        return listen(host, port)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            "the server cannot listen there",
            where=f"host, port ({COMMAND_LINE})",
            found=f"{host or 'all addresses'}, {port}: {error}",
            hint="another port, such as port=29601; of host, an address of this machine",
        ) from error


def _serve_islands(listener: socket.socket, host: str, secret: str, values: dict[str, str]) -> None:
    """Run the server that islands connect to."""
    least = read_number(values, "least", "1") if "least" in values else None
    silent_seconds = read_number(values, "silent_seconds", "10")
    server = IslandServer(listener, secret=secret, least=least, silent_seconds=silent_seconds, say=_say)
    name = reached_at(host)
    _say(f"islands.address={name}:{_port_of(listener)}")
    if not secret:
        _say(f"there is no {SECRET}: anybody may join who reaches {name}")
    asyncio.run(server.serve())


def _serve_shard(listener: socket.socket, host: str, secret: str, main_server: str) -> None:
    """Run another shard of the parameter server at the address `main_server`."""
    address = f"{_own_host(main_server, host)}:{_port_of(listener)}"
    _say(f"a shard of the server at {main_server}, reached at {address}")
    # This module loads torch, which takes seconds, and a server of rounds does without.
    shard_process = importlib.import_module("hfdist.islands.shard_process")
    asyncio.run(shard_process.ShardProcess(listener, address, server=main_server, secret=secret, say=_say).serve())


def _port_of(listener: socket.socket) -> int:
    # An IPv6 socket has four values here, of which the port is the second, too.
    return int(listener.getsockname()[1])


def _check_shard(main_server: str, values: dict[str, str]) -> None:
    """Refuse an address that is none, and keys that a shard does not have."""
    found = re.fullmatch(r"(?:[^:]+|\[.+\]):(?P<port>\d{1,5})", main_server)
    if found is None or not 1 <= int(found["port"]) <= 65535:
        what, where = "the server of a shard has no address", f"of ({COMMAND_LINE})"
        raise ConfigError(what, where=where, found=main_server, allowed="HOST:PORT", hint="of=HOST:29600")
    for key in ("least", "silent_seconds"):
        if key in values:
            what = "this is for the server, and not for another shard of it"
            raise ConfigError(what, where=f"{key} ({COMMAND_LINE})", found=values[key], hint=f"without {key}")


def _own_host(main_server: str, host: str) -> str:
    """Give the address at which ranks reach this shard: `host`, or this machine's address on the way to the server."""
    server_host = main_server.rpartition(":")[0].strip("[]")
    try:
        _, own_address = find_route(server_host, wait_seconds=_ROUTE_SECONDS)
    except OSError as error:
        what = "there is no way to the server"
        raise ConfigError(what, where=f"of ({COMMAND_LINE})", found=f"{main_server}: {error}") from error
    if host == LOOPBACK and not is_loopback(own_address):
        raise ConfigError(
            "islands on other machines would not reach this shard",
            where=f"host ({COMMAND_LINE})",
            found=f"{LOOPBACK}, with of={main_server}",
            hint=f"the {SECRET} of the server and all islands in the environment, or host={own_address}",
        )
    if host in _EVERY_ADDRESS:
        host = own_address
    # In an address with a port, IPv6 has brackets.
    return f"[{host}]" if ":" in host else host


def reached_at(host: str) -> str:
    """Give the name or address at which islands reach a server that listens at `host`."""
    return socket.gethostname() if host in _EVERY_ADDRESS else host


def _say(line: str) -> None:
    print_at_once(f"{time.strftime('%H:%M:%S')} {line}")


main = as_command(_HELP, _serve)
