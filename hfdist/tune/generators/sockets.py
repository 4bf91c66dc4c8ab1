"""Sockets of ZeroMQ between the processes of one machine, in a folder that only this user can enter."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import zmq
import zmq.asyncio

from hfdist.tune.generators.messages import MOST_BYTES

Socket = zmq.Socket[bytes]
"""A socket of ZeroMQ."""
_PREFIX, _NAME = "hfdist-generators-", "broker"


def make_folder() -> Path:
    """Make a folder for `open_broker` among temporary files; in /tmp where the name of its socket would be too long."""
    added = len(f"/{_PREFIX}12345678/{_NAME}")
    is_long = len(os.fsencode(tempfile.gettempdir())) + added > zmq.IPC_PATH_MAX_LEN
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp" if is_long else None))


def open_broker(folder: Path) -> Socket:
    """Open the socket that all others connect to, in a folder that only this user can enter."""
    made: Socket = zmq.Context.instance().socket(zmq.ROUTER)
    made.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
    _keep_all(made)
    made.bind(f"ipc://{folder / _NAME}")
    return made


def connect(folder: Path, name: str) -> Socket:
    """Connect to the broker, which need not be there yet, under a name that no other process has."""
    made: Socket = zmq.Context.instance().socket(zmq.DEALER)
    _join(made, folder, name)
    return made


def connect_in_loop(folder: Path, name: str) -> zmq.asyncio.Socket:
    """Connect to the broker from a loop of asyncio, as `connect` does."""
    made = zmq.asyncio.Context.shadow(zmq.Context.instance()).socket(zmq.DEALER)
    _join(made, folder, name)
    return made


def _join(made: zmq.SyncSocket | zmq.asyncio.Socket, folder: Path, name: str) -> None:
    made.setsockopt(zmq.IDENTITY, name.encode())
    _keep_all(made)
    made.connect(f"ipc://{folder / _NAME}")


def _keep_all(made: zmq.SyncSocket | zmq.asyncio.Socket) -> None:
    # No message is dropped while a peer is slow, and none is waited for when a peer has gone.
    made.setsockopt(zmq.SNDHWM, 0)
    made.setsockopt(zmq.RCVHWM, 0)
    made.setsockopt(zmq.LINGER, 0)
