"""Through which interface gloo connects the ranks of several machines.

By default gloo gives the others the address of the machine's own name, which many systems set to 127.0.1.1. Then other
machines find nobody there, or themselves: some ranks fail with `connectFullMesh ... Connection refused`, and the others
wait for them until the end of `ddp_timeout`. NCCL leaves out loopback by itself; hfdist uses gloo beside it.
"""

from __future__ import annotations

import logging
import os
import socket

import psutil

from hfdist.errors import ConfigError
from hfdist.launch.address import LOOPBACK, find_route, is_loopback, own_interfaces
from hfdist.topology import read_launcher

logger = logging.getLogger(__name__)

VARIABLE = "GLOO_SOCKET_IFNAME"
_ANYWHERE = "192.0.2.1"
"""An address of a block that nobody has, and so its route is the default one."""


def choose_gloo_interface() -> None:
    """Set the variable, before there is a process group, where gloo would tell other machines a loopback address.

    That is the interface which leads to the machine of rank 0. On that machine itself, where its own name may lead
    nowhere else, it is that of the default route, or else the first one. It does no harm where all ranks are on one
    machine in truth.

    Raises:
        ConfigError: the variable names an interface that this machine does not have.
    """
    named = [name for name in os.environ.get(VARIABLE, "").split(",") if name]
    interfaces = list(own_interfaces())
    missing = [name for name in named if name not in psutil.net_if_addrs()]
    if missing:
        what, where = "this machine has no such network interface", f"{VARIABLE} (environment)"
        found = f"{', '.join(missing)}, on {socket.gethostname()}"
        raise ConfigError(what, where=where, found=found, allowed=", ".join(interfaces) or None)
    if named or not interfaces or not read_launcher().has_other_machines:
        return
    address = address_of_own_name()
    if is_loopback(address):
        routes = (_interface_to(peer) for peer in (os.environ.get("MASTER_ADDR"), _ANYWHERE) if peer)
        os.environ[VARIABLE] = chosen = next((name for name in routes if name in interfaces), interfaces[0])
        logger.info("gloo connects by %s, as the name of this machine leads to %s: see %s", chosen, address, VARIABLE)


def address_of_own_name() -> str:
    """Give the first address of the host name to which a socket can be bound, as gloo does; else loopback, as torch."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # a part of the name with more than 63 characters is a UnicodeError
        return LOOPBACK
    for family, kind, _, _, address in found:
        try:
            with socket.socket(family, kind) as probe:
                probe.bind(address)
                return str(address[0])
        except OSError:
            continue
    return LOOPBACK


def _interface_to(peer: str) -> str | None:
    try:
        return find_route(peer, wait_seconds=0)[0]
    except OSError:
        return None
