"""Two machines on this one: network namespaces with a link between them, and a host name and /etc/hosts for each."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

INTERFACE = "eth0"
"""On each machine, its end of the link."""

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18


class NoMachinesError(Exception):
    """Why this machine cannot have two more."""


@dataclass(frozen=True)
class Machine:
    """One of them: a process that has called `enter` is on it, with all that it starts."""

    name: str
    address: str
    namespace: str
    hosts: Path
    """Its /etc/hosts. Its own name leads to 127.0.1.1 there, as Debian has it, and the other's to its address."""

    def enter(self) -> None:
        """Move this process to the machine. It must have one thread, as after a fork."""
        libc = ctypes.CDLL(None, use_errno=True)
        network = os.open(f"/run/netns/{self.namespace}", os.O_RDONLY)
        own, private = str(self.hosts).encode(), _MS_REC | _MS_PRIVATE
        for failed in (
            libc.setns(network, _CLONE_NEWNET),
            libc.unshare(_CLONE_NEWNS | _CLONE_NEWUTS),
            libc.mount(b"none", b"/", None, private, None) or libc.mount(own, b"/etc/hosts", None, _MS_BIND, None),
            libc.sethostname(self.name.encode(), len(self.name)),
        ):
            if failed:
                raise OSError(ctypes.get_errno(), f"cannot enter {self.name}")
        os.close(network)

    def start(self, command: Sequence[object], log: Path, **environment: str) -> subprocess.Popen[bytes]:
        """Start a command there, in a session of its own; its output goes to the end of `log`."""
        with log.open("ab") as output:
            return subprocess.Popen(
                [str(word) for word in command], stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=log.parent,
                env=os.environ | environment, preexec_fn=self.enter, start_new_session=True,
            )  # fmt: skip

    def run(self, *command: object, timeout_seconds: float = 60, **environment: str) -> str:
        """Run a command there to its end, and give its output.

        Raises:
            AssertionError: it fails; with all that it has said.
        """
        done = subprocess.run(
            [str(word) for word in command], check=False, capture_output=True, text=True, timeout=timeout_seconds,
            env=os.environ | environment, preexec_fn=self.enter,
        )  # fmt: skip
        assert done.returncode == 0, f"{' '.join(map(str, command))}: {done.stdout}{done.stderr}"
        return done.stdout

    def pids(self) -> list[int]:
        """Of all processes there."""
        return [int(word) for word in ip("netns", "pids", self.namespace).split()]

    def kill_all(self) -> None:
        """As a machine that loses its power, until nothing runs there."""
        while pids := self.pids():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def set_link(self, *, up: bool) -> None:
        """Cut the link between the machines, or mend it."""
        ip("-n", self.namespace, "link", "set", INTERFACE, "up" if up else "down")


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Two machines for as long as the context lasts. In the end nothing is left of them, nor of what runs there.

    Raises:
        NoMachinesError: namespaces are not to be had here.
    """
    if os.geteuid() != 0 or shutil.which("ip") is None:
        raise NoMachinesError("network namespaces need root and iproute2")
    with tempfile.TemporaryDirectory(prefix="hfdist-machines-") as folder:
        machines = tuple(
            Machine(f"node{end}", f"10.213.7.{number}", f"hfdist-{folder[-8:]}-{end}", Path(folder, f"hosts-{end}"))
            for number, end in enumerate("ab", start=1)
        )
        try:
            try:
                _connect(*machines)
            except (subprocess.CalledProcessError, OSError) as error:
                why = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
                raise NoMachinesError(f"no network namespaces here: {why}") from error
            yield machines
        finally:
            for machine in machines:
                with suppress(subprocess.CalledProcessError):
                    machine.kill_all()
                    ip("netns", "delete", machine.namespace)


def _connect(first: Machine, second: Machine) -> None:
    for own, other in ((first, second), (second, first)):
        ip("netns", "add", own.namespace)
        own.hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {own.name}\n{other.address} {other.name}\n")
    ends = ("name", INTERFACE, "netns")
    ip("link", "add", *ends, first.namespace, "type", "veth", "peer", *ends, second.namespace)
    for machine in (first, second):
        ip("-n", machine.namespace, "addr", "add", f"{machine.address}/24", "dev", INTERFACE)
        ip("-n", machine.namespace, "link", "set", "lo", "up")
        machine.set_link(up=True)
        machine.run("hostname")


def ip(*words: str) -> str:
    """Call iproute2 and give what it says; CalledProcessError: it fails."""
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20).stdout
