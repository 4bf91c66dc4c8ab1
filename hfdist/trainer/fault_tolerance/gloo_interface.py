"""Under which address gloo lets other machines find this rank. A wrong one would keep all ranks waiting at the start.

gloo takes the address of the machine's own name, which many systems set to 127.0.1.1. Then the other machines find
nobody there, or themselves: some ranks fail with `connectFullMesh ... Connection refused`, and the others wait for them
until the end of `ddp_timeout`. NCCL chooses an interface by itself; hfdist uses gloo beside it.
"""

from __future__ import annotations

import ipaddress
import os
import socket

import psutil

from hfdist.errors import ConfigError
from hfdist.topology import read_launcher

VARIABLE = "GLOO_SOCKET_IFNAME"
_LOOPBACK = "127.0.0.1"


def check_gloo_interface() -> None:
    """Find, before there is a process group, that other machines could not connect to this rank.

    Raises:
        ConfigError: the variable names an interface that is not there; or it is not set, the launcher has started ranks
            on several machines, and the name of this machine leads to its loopback.
    """
    named = [name for name in os.environ.get(VARIABLE, "").split(",") if name]
    where, here = f"{VARIABLE} (environment)", socket.gethostname()
    usable = _interfaces()
    missing = [name for name in named if name not in psutil.net_if_addrs()]
    if missing:
        what = "this machine has no such network interface"
        found = f"{', '.join(missing)}, on {here}"
        raise ConfigError(what, where=where, found=found, allowed=", ".join(usable) or None)
    if named or not read_launcher().has_other_machines:
        return
    address = address_of_own_name()
    if ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        what = "ranks on other machines could not connect to this one: gloo takes the address of the machine's own name"
        found = f"not set, and the name {here} leads to {address}"
        hint = f"export {VARIABLE}={usable[0]}" if usable else f"the interface between the machines in {VARIABLE}"
        raise ConfigError(what, where=where, found=found, allowed=", ".join(usable) or None, hint=hint)


def address_of_own_name() -> str:
    """Give the first address of the host name to which a socket can be bound, as gloo does; else loopback, as torch."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return _LOOPBACK
    for family, kind, _, _, address in found:
        try:
            with socket.socket(family, kind) as probe:
                probe.bind(address)
                return str(address[0])
        except OSError:
            continue
    return _LOOPBACK


def _interfaces() -> list[str]:
    """Those with an address that other machines may reach, such as eth0."""
    return [
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(one.family == socket.AF_INET and not ipaddress.ip_address(one.address).is_loopback for one in addresses)
    ]
