"""Checks of what this machine gives the processes of a run: memory, files, processes, threads, a name. No torch."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
from pathlib import Path

import psutil

from hfdist.cgroup import least_limit
from hfdist.host_memory import cgroup_memory
from hfdist.launch.address import is_loopback, own_interfaces
from hfdist.tools.doctor.finding import Finding
from hfdist.units import count, size

_MIB, _GIB = 1 << 20, 1 << 30
_SHM = "/dev/shm"
# With less than the first value a run is likely to fail, which is an error; with less than the second it may.
_LEAST_SHM, _ENOUGH_SHM = 64 * _MIB, 1 * _GIB
_LEAST_FILES, _ENOUGH_FILES = 1024, 4096
_LEAST_PROCESSES, _ENOUGH_PROCESSES = 512, 4096
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables that name the network interface of gloo and of NCCL."""


def check_machine(num_hosts: int) -> list[Finding]:
    """Check the limits of this machine, which is one of `num_hosts`."""
    return [
        _check_memory(),
        _check_shared_memory(),
        _check_open_files(),
        _check_processes(),
        _check_locked_memory(),
        check_name(num_hosts),
    ]


def _check_memory() -> Finding:
    ram, free = psutil.virtual_memory().total, psutil.virtual_memory().available
    group = cgroup_memory()
    usable = ram
    if group is None or group.limit_bytes >= ram:
        text = f"{ram / _GIB:.1f} GiB, {free / _GIB:.1f} GiB free"
    else:
        usable, free = group.limit_bytes, min(free, group.free_bytes)
        text = f"a cgroup gives {usable / _GIB:.1f} GiB of {ram / _GIB:.1f} GiB, {free / _GIB:.1f} GiB free"
    is_low = free < 0.1 * usable
    return Finding.of("memory", text, warning=is_low, hint="end what uses it, or ask the scheduler for more memory")


def _check_shared_memory() -> Finding:
    check = "shared memory"
    try:
        usage = shutil.disk_usage(_SHM)
    except OSError as error:
        hint = f"mount -t tmpfs tmpfs {_SHM}, or data.workers=0"
        return Finding.of(check, f"{_SHM}: {error.strerror}", error=True, hint=hint)
    text = f"{_SHM} has {size(usage.total)}, {size(usage.free)} free; data workers and NCCL put tensors there"
    is_small, is_tight = usage.free < _LEAST_SHM, usage.free < _ENOUGH_SHM
    hint = f"mount -o remount,size=8G {_SHM}; of a container: --shm-size=8g; or data.workers=0"
    return Finding.of(check, text, error=is_small, warning=is_tight, hint=hint)


def _check_open_files() -> Finding:
    # Each run raises the soft limit to the hard one.
    _, hard = (_limit(value) for value in resource.getrlimit(resource.RLIMIT_NOFILE))
    hint = "nofile in /etc/security/limits.conf, LimitNOFILE of the service; of a container: --ulimit nofile=65536"
    text = f"a process may open {hard}" if hard < 1 << 30 else "a process may open any number"
    return Finding.of("open files", text, error=hard < _LEAST_FILES, warning=hard < _ENOUGH_FILES, hint=hint)


def _check_processes() -> Finding:
    soft, _ = (_limit(value) for value in resource.getrlimit(resource.RLIMIT_NPROC))
    own_limit = least_limit("pids", "pids.max")
    least = min(soft, own_limit if own_limit is not None else soft)
    who = "a cgroup" if own_limit is not None and own_limit < soft else "the user"
    text = f"{who} may have {least} processes and threads" if least < 1 << 30 else "any number"
    hint = "ulimit -u 65536; of a container: --pids-limit=-1"
    is_few, is_tight = least < _LEAST_PROCESSES, least < _ENOUGH_PROCESSES
    return Finding.of("processes", text, error=is_few, warning=is_tight, hint=hint)


def _check_locked_memory() -> Finding:
    soft, _ = (_limit(value) for value in resource.getrlimit(resource.RLIMIT_MEMLOCK))
    adapters = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    text = "any amount" if soft >= 1 << 40 else f"{size(soft)} a process"
    text += f"; {', '.join(adapters)} needs it" if adapters else "; not needed: there is no RDMA adapter"
    hint = "ulimit -l unlimited; of a container: --ulimit memlock=-1"
    return Finding.of("locked memory", text, warning=bool(adapters) and soft < 1 << 40, hint=hint)


def check_name(num_hosts: int) -> Finding:
    """Check whether other machines reach this one by the address of its name, which gloo tells them."""
    name, check = platform.node(), "host name"
    interfaces = own_interfaces()
    known = ", ".join(f"{one} {address}" for one, address in interfaces.items()) or "none but the loopback"
    # Gloo takes an empty variable for none.
    chosen = [one for one in os.environ.get(_INTERFACES[0], "").split(",") if one]
    if chosen:
        wrong = [one for one in chosen if one not in psutil.net_if_addrs()]
        text = f"{_INTERFACES[0]}={','.join(chosen)}; interfaces: {known}"
        hint = f"export {_INTERFACES[0]}={next(iter(interfaces), 'lo')}"
        return Finding.of(check, text, error=bool(wrong), hint=hint)
    best = next(iter(interfaces), None)
    hint = "export " + " ".join(f"{variable}={best}" for variable in _INTERFACES)
    if best is None:
        hint = "a network interface with an address"
    try:
        addresses = sorted({str(found[4][0]) for found in socket.getaddrinfo(name, None)})
        text, looped = f"{name} is {', '.join(addresses[:3])}", all(map(is_loopback, addresses))
    except (OSError, UnicodeError):  # a part of the name with more than 63 characters is a UnicodeError
        text, looped = f"{name} has no address, so that gloo takes the loopback", True
    if looped:
        text += ", which other machines cannot reach"
    if looped and best is not None and num_hosts == 1:
        text += f"; a run on several machines connects by {best}, or by what leads to the first of them"
    error = looped and num_hosts > 1
    return Finding.of(check, f"{text}; interfaces: {known}", error=error, warning=looped and best is None, hint=hint)


def check_threads(threads: int, cores: int, ranks: int) -> Finding:
    """Check whether the ranks of a machine have more threads than cores."""
    text = f"{count(ranks, 'rank')} x {threads} threads on {cores} cores"
    hint = f"export OMP_NUM_THREADS={max(1, cores // ranks)}"
    # With one thread in each rank there is nothing to lower.
    return Finding.of("threads", text, warning=threads > 1 and threads * ranks > cores, hint=hint)


def _limit(value: int) -> int:
    """Give a limit of this process as a number that can be compared: no limit is a very large one."""
    return 1 << 62 if value == resource.RLIM_INFINITY else value
