"""The connections that a rank opens to other islands: at a port of its own, of the address that the server sees."""

from __future__ import annotations

import errno
import time

from hfdist.config.islands import IslandsConfig
from hfdist.errors import ConfigError
from hfdist.islands.transport import Transport
from hfdist.launch.address import find_route
from hfdist.topology import read_launcher

_MOST_PORT_SECONDS = 30.0
"""How long a rank tries to get its port."""
_REST_SECONDS = 0.1


def open_transport(config: IslandsConfig, host: str, most_bytes: int) -> Transport:
    """Open the connections of this rank, which hears others at its own port; ConfigError: it stays taken."""
    port = 0 if config.port is None else config.port + read_launcher().local_rank
    silent_seconds = config.timeout_seconds
    deadline = time.monotonic() + min(_MOST_PORT_SECONDS, silent_seconds)
    while True:
        try:
            return Transport(host, config.codec, port=port, most_bytes=most_bytes, silent_seconds=silent_seconds)
        except (OSError, OverflowError) as error:
            # An outgoing connection may have it, or a process of the start before, which is ending.
            is_taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            if is_taken and time.monotonic() < deadline:
                time.sleep(_REST_SECONDS)
                continue
            raise _not_heard(host, port, error) from error


def _not_heard(host: str, port: int, error: Exception) -> ConfigError:
    what, found = "this rank cannot hear other islands", f"{host}, port {port}: {error}"
    hint = "islands.port=null, which takes free ports, or another first port: each rank of a machine has its own"
    return ConfigError(what, where="islands.port", found=found, allowed="free ports", hint=hint)


def find_own_host(address: str, wait_seconds: float) -> str:
    """Give the own address, from which the server is reached; ConfigError: there is no way to it."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return find_route(host, wait_seconds=wait_seconds)[1]
    except OSError as error:
        what, allowed = "there is no way to the server of the islands", "HOST:PORT of `hfdist serve`"
        raise ConfigError(what, where="islands.address", found=f"{address}: {error}", allowed=allowed) from error
