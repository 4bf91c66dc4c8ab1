"""Through which interface, and with which address, this machine reaches another one of its job.

python -m hfdist.launch.address PEER [INTERFACE]    prints `eth0 10.0.0.2`

Without it gloo and NCCL take the address of the machine's own name, which many systems set to 127.0.1.1: then machines
do not find each other. The route to another machine tells what works. It waits until the peer's name is known.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import platform
import socket
import sys
import time
from pathlib import Path

import psutil

LOOPBACK = "127.0.0.1"
WAIT_SECONDS = 300.0
"""Seconds to wait for a name that is not known yet: Kubernetes knows one once its pod has an address."""
_POLL_SECONDS = 2.0
_REST_SECONDS = 0.1
_ANY_PORT = 9
"""A port for finding a route. Nothing is sent to it: connecting a UDP socket only chooses a route."""
_INTERNET = (socket.AF_INET, socket.AF_INET6)


def find_route(peer: str, *, wait_seconds: float = WAIT_SECONDS) -> tuple[str, str]:
    """Give the interface and the own address of the route to `peer`, a name or an address.

    Raises:
        OSError: the name stays unknown, or there is no route.
    """
    family, target = _resolve(peer, wait_seconds)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        address = probe.getsockname()[0]
    for interface, found in psutil.net_if_addrs().items():
        if any(one.family == family and one.address.partition("%")[0] == address for one in found):
            # An alias such as eth0:1 is no interface to gloo.
            return interface.partition(":")[0], address
    raise OSError(f"no interface has the address {address}, from which {peer} is reached")


def own_address(rank: int) -> tuple[str, str]:
    """Give the address at which other ranks reach this one, and the one at which it listens; "": all addresses.

    It is the address from which this process reaches MASTER_ADDR, which may be on another machine than rank 0 under
    torchrun. Where MASTER_ADDR leads to this machine's loopback, the others know this machine by that name. Where the
    route is not known, it is that of rank 0 alone.
    """
    master = os.environ.get("MASTER_ADDR", "localhost")
    try:
        _, own = find_route(master, wait_seconds=0.0)
    except OSError:
        return master if rank == 0 else platform.node(), ""
    return (master, "") if is_loopback(own) else (own, own)


def address_of(interface: str) -> str:
    """Give the address of an interface, an IPv4 one where it has one.

    Raises:
        OSError: there is no such interface, or it has no address.
    """
    own = [one for one in psutil.net_if_addrs().get(interface, []) if one.family in _INTERNET]
    if not own:
        raise OSError(f"no interface {interface} with an address; there are: {', '.join(psutil.net_if_addrs())}")
    return min(own, key=lambda one: _INTERNET.index(one.family)).address.partition("%")[0]


def own_interfaces() -> dict[str, str]:
    """Give the interfaces that are up, but the loopback, with an address each; that of the default route first."""
    states = psutil.net_if_stats()
    found = {
        # An alias such as eth0:1 is no interface to gloo.
        name.partition(":")[0]: str(one.address)
        for name, addresses in psutil.net_if_addrs().items()
        for one in addresses
        if one.family == socket.AF_INET and name in states and states[name].isup and not is_loopback(one.address)
    }
    try:
        routes = [line.split() for line in Path("/proc/net/route").read_text().splitlines()[1:]]
    except OSError:
        routes = []
    default = [route[0] for route in routes if route[1] == "00000000"]
    return dict(sorted(found.items(), key=lambda item: item[0] not in default))


def listen(host: str, port: int, *, wait_seconds: float = 0.0) -> socket.socket:
    """Listen at an address of this machine, or at all of them where `host` is empty; port 0: a free one.

    A port that is taken is tried for so long: an outgoing connection may have it, or a process of the start before,
    which is ending.

    Raises:
        OSError: it is taken, or no address of this machine.
        OverflowError: no port has this number.
    """
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            return _listen(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= deadline:
                raise
            time.sleep(_REST_SECONDS)


def _listen(host: str, port: int) -> socket.socket:
    if host:
        return socket.create_server((host, port), family=_look_up(host, port, socket.SOCK_STREAM)[0])
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=is_dual)


def is_loopback(address: str) -> bool:
    """Whether an address leads back to this machine."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _look_up(host: str, port: int, kind: socket.SocketKind) -> tuple[socket.AddressFamily, tuple[object, ...]]:
    """Find the first address of a host, and its family, for sockets of a kind."""
    try:
        family, *_, target = socket.getaddrinfo(host, port, type=kind)[0]
    except UnicodeError as error:
        # Python raises it for a name such as `a..b`.
        raise OSError(f"no host can have the name {host}") from error
    return family, target


def _resolve(peer: str, wait_seconds: float) -> tuple[socket.AddressFamily, tuple[object, ...]]:
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            return _look_up(peer, _ANY_PORT, socket.SOCK_DGRAM)
        except socket.gaierror:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_POLL_SECONDS)


def main() -> None:
    """Print the interface and the address; exit code 1: there is none."""
    peer, *asked = sys.argv[1:] or [""]
    if not peer or len(asked) > 1:
        sys.exit(__doc__)
    try:
        interface, address = (asked[0], address_of(asked[0])) if asked and asked[0] else find_route(peer)
    except OSError as error:
        sys.exit(f"hfdist.launch.address: {peer}: {error}")
    sys.stdout.write(f"{interface} {address}\n")


if __name__ == "__main__":
    main()
