"""Bytes that a rank has really sent, by its sockets: beside what hfdist/sent_bytes.py counts at the collectives."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

_TCP_INFO_BYTES, _NOT_SENT, _BYTES_SENT = 256, 144, 200
"""Size of the kernel's `struct tcp_info`, and where `tcpi_notsent_bytes` and `tcpi_bytes_sent` are in it.

`tcpi_bytes_retrans` follows the latter.
"""


def socket_bytes() -> int:
    """What this process has written to all its open TCP sockets, by the kernel's count: no headers, each byte once."""
    return sum(map(_sent_bytes, list(_sockets())))


def _sockets() -> Iterator[int]:
    for entry in list(Path("/proc/self/fd").iterdir()):
        try:
            if os.readlink(entry).startswith("socket:"):
                yield int(entry.name)
        except FileNotFoundError:
            continue


def _sent_bytes(descriptor: int) -> int:
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        if copy.family not in (socket.AF_INET, socket.AF_INET6) or copy.type != socket.SOCK_STREAM:
            return 0
        info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        sent, sent_again = struct.unpack_from("<QQ", info, _BYTES_SENT)
        (waiting,) = struct.unpack_from("<I", info, _NOT_SENT)
        # A busy machine acknowledges late, and the kernel then sends again, even on the loopback: no rank asked for it.
        # A collective is over for a rank once the kernel has its bytes: a peer that reads late leaves some unsent.
        return int(sent - sent_again + waiting)
