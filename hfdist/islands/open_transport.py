"""How a rank opens its `Transport` to other islands: at which address they reach it, and at which port."""

from __future__ import annotations

from hfdist.config.islands import IslandsConfig
from hfdist.errors import ConfigError
from hfdist.islands.transport import Transport
from hfdist.launch.address import find_route
from hfdist.topology import read_launcher

_MOST_PORT_SECONDS = 30.0
"""The most seconds for which a rank tries to get its port: one of a run that has just ended may still hold it."""


def open_transport(config: IslandsConfig, host: str, most_bytes: int) -> Transport:
    """Open the connections of this rank at a port of its own.

    Args:
        config: `islands.*`.
        host: the address of this machine at which other islands reach it.
        most_bytes: the most bytes of one message of another rank.

    Raises:
        ConfigError: the port stays taken.
    """
    port = 0 if config.port is None else config.port + read_launcher().local_rank
    try:
        return Transport(
            host,
            config.codec,
            port=port,
            most_bytes=most_bytes,
            silent_seconds=config.timeout_seconds,
            wait_seconds=min(_MOST_PORT_SECONDS, config.timeout_seconds),
        )
    except (OSError, OverflowError) as error:
        what, found = "this rank cannot hear other islands", f"{host}, port {port}: {error}"
        hint = "islands.port=null, which takes free ports, or another first port: each rank of a machine has its own"
        raise ConfigError(what, where="islands.port", found=found, allowed="free ports", hint=hint) from error


def find_own_host(address: str, wait_seconds: float) -> str:
    """Give the address of this machine on its way to the server, where other islands should reach it, too.

    Args:
        address: HOST:PORT of the server.
        wait_seconds: seconds for which a way is tried.

    Raises:
        ConfigError: there is no way to the server.
    """
    host = address.rpartition(":")[0].strip("[]")
    try:
        _, own_host = find_route(host, wait_seconds=wait_seconds)
        return own_host
    except OSError as error:
        what, allowed = "there is no way to the server of the islands", "HOST:PORT of `hfdist serve`"
        raise ConfigError(what, where="islands.address", found=f"{address}: {error}", allowed=allowed) from error
