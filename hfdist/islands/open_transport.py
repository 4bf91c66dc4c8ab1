"""The connections that a rank opens to other islands: at a port of its own, of the address that the server sees."""

from __future__ import annotations

from hfdist.config.islands import IslandsConfig
from hfdist.errors import ConfigError
from hfdist.islands.transport import Transport
from hfdist.launch.address import find_route
from hfdist.topology import read_launcher

_MOST_PORT_SECONDS = 30.0
"""How long a rank tries to get its port."""


def open_transport(config: IslandsConfig, host: str, most_bytes: int) -> Transport:
    """Open the connections of this rank, which hears others at its own port; ConfigError: it stays taken."""
    port = 0 if config.port is None else config.port + read_launcher().local_rank
    seconds = config.timeout_seconds
    times = {"silent_seconds": seconds, "wait_seconds": min(_MOST_PORT_SECONDS, seconds)}
    try:
        return Transport(host, config.codec, port=port, most_bytes=most_bytes, **times)
    except (OSError, OverflowError) as error:
        what, found = "this rank cannot hear other islands", f"{host}, port {port}: {error}"
        hint = "islands.port=null, which takes free ports, or another first port: each rank of a machine has its own"
        raise ConfigError(what, where="islands.port", found=found, allowed="free ports", hint=hint) from error


def find_own_host(address: str, wait_seconds: float) -> str:
    """Give the own address, from which the server is reached; ConfigError: there is no way to it."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return find_route(host, wait_seconds=wait_seconds)[1]
    except OSError as error:
        what, allowed = "there is no way to the server of the islands", "HOST:PORT of `hfdist serve`"
        raise ConfigError(what, where="islands.address", found=f"{address}: {error}", allowed=allowed) from error
