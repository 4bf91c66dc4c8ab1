"""What a process gives up for good before it runs code of others: system calls, files, capabilities, memory and time.

It is a seccomp filter, since that needs no privilege and no program beside Python, and containers allow it. Network
namespaces (`unshare`, bwrap) need user namespaces, which Docker, Kubernetes and hardened kernels forbid.

The filter is a list of the system calls that Python needs to compute and to read files. The kernel denies all others:

* sockets of every kind, and io_uring
* new processes, threads and programs
* opening a file for writing; making, renaming and removing files
* signals to other processes, their memory, and shared memory that would outlive the process

Beside it: no capabilities, even for root; limits on CPU seconds, address space, file size and open files; no core dump.
Where the kernel has Landlock (since 5.13, where it is switched on), only Python's standard library and the system's
shared libraries can be read. Without Landlock a program can read each file that this user can read, but send it
nowhere.

Not kept out: bugs of the kernel and of the processor, and how long a program takes. Linux on x86_64 and aarch64 only.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import stat
import struct
import sys
from collections.abc import Iterator

_LIBC = ctypes.CDLL(None, use_errno=True)

# By name: its number on x86_64, and on aarch64 (-: it has none).
_ALLOWED = """
read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, close 3 57, lseek 8 62, dup 32 23, dup2 33 -,
dup3 292 24, pipe 22 -, pipe2 293 59, stat 4 -, lstat 6 -, fstat 5 80, newfstatat 262 79, statx 332 291, access 21 -,
faccessat 269 48, readlink 89 -, readlinkat 267 78, getcwd 79 17, getdents64 217 61, fadvise64 221 223,
mmap 9 222, munmap 11 215, mprotect 10 226, mremap 25 216, madvise 28 233, brk 12 214, futex 202 98, membarrier 324 283,
rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, sigaltstack 131 132, restart_syscall 219 128,
clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115, nanosleep 35 101, gettimeofday 96 169, time 201 -,
times 100 153, getrusage 98 165, setitimer 38 103, getitimer 36 102, alarm 37 -, select 23 -, pselect6 270 72, poll 7 -,
ppoll 271 73, getpid 39 172, gettid 186 178, getppid 110 173, getuid 102 174, geteuid 107 175, getgid 104 176,
getegid 108 177, getpgrp 111 -, uname 63 160, sysinfo 99 179, getrandom 318 278, sched_yield 24 124,
sched_getaffinity 204 123, rseq 334 293, set_robust_list 273 99, arch_prctl 158 -, exit 60 93, exit_group 231 94
"""
# open and openat: their numbers, and which argument holds the flags.
_OPENING: tuple[tuple[int, int | None, int], ...] = ((2, None, 1), (257, 56, 2))
_FCNTL = (72, 25)
# F_SETOWN is not among them: with it a pipe sends any signal to any process of the user.
_FCNTL_COMMANDS = (0, 1, 2, 3, 4, 1030)  # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC
_FIRST_RECENT = 424
"""Calls from here on have one number on all machines. None is allowed, and C libraries do without them."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Kinds of machines by name: the column of its numbers of calls, and the kernel's constant for it (AUDIT_ARCH)."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_PASS, _EACCES, _ENOSYS, _KILL = 0x7FFF0000, 0x0005000D, 0x00050026, 0x80000000
_NUMBER_AT, _MACHINE_AT, _ARGUMENTS_AT = 0, 4, 16

_SET_PARENT_DEATH_SIGNAL, _SET_DUMPABLE, _SET_SECCOMP, _SET_NO_NEW_PRIVILEGES = 1, 4, 22, 38
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_EXECUTE, _READ_FILE, _READ_FOLDER, _ALL_OF_FILES = 1 << 0, 1 << 2, 1 << 3, (1 << 13) - 1
_IN_FOLDER = _EXECUTE | _READ_FILE | _READ_FOLDER


class RefusedError(Exception):
    """The kernel does not let the process give up what it must."""


def limit(cpu_seconds: int, memory_bytes: int) -> bool:
    """Limit this process, and those that it forks later; give whether Landlock holds.

    Raises:
        RefusedError: this machine cannot.
    """
    if sys.platform != "linux" or platform.machine() not in _MACHINES:
        raise RefusedError(f"{sys.platform} on {platform.machine()} has no filter of system calls")
    for kind, most in (
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
    _control(_SET_NO_NEW_PRIVILEGES, 1)
    # The kernel shows memory and files of such a process to none without capabilities.
    _control(_SET_DUMPABLE, 0)
    header, none = struct.pack("II", 0x20080522, 0), struct.pack("6I", *[0] * 6)
    if _LIBC.capset(header, none) != 0:
        raise RefusedError(f"capset: {os.strerror(ctypes.get_errno())}")
    return _read_only_libraries()


def end_with_parent(parent: int) -> None:
    """Have the kernel end this process when its parent `parent` ends."""
    _control(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def filter_system_calls() -> None:
    """Let the kernel deny all system calls but those that Python needs to compute; RefusedError: it does not."""
    code = b"".join(struct.pack("HBBI", *step) for step in _filter())
    buffer = ctypes.create_string_buffer(code)
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    _control(_SET_SECCOMP, 2, program)
    # The numbers are another machine's if this works.
    if _LIBC.socket(2, 1, 0) != -1:
        raise RefusedError("the filter of system calls does not hold")


def _filter() -> list[tuple[int, int, int, int]]:
    """Give the steps of the filter: operation, steps to skip if it is true and if it is false, and a value."""
    column, machine = _MACHINES[platform.machine()]
    steps = [
        (_LOAD, 0, 0, _MACHINE_AT), (_EQUAL, 1, 0, machine), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER_AT),
        (_AT_LEAST, 0, 1, _FIRST_RECENT), (_RETURN, 0, 0, _ENOSYS),
    ]  # fmt: skip
    for line in _ALLOWED.split(","):
        number = line.split()[1 + column]
        if number != "-":
            steps += [(_EQUAL, 0, 1, int(number)), (_RETURN, 0, 0, _PASS)]
    for *numbers, argument in _OPENING:
        if (opening := numbers[column]) is not None:
            steps += [
                (_EQUAL, 0, 4, opening), (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument),
                (_ANY_BIT, 1, 0, _WRITES), (_RETURN, 0, 0, _PASS), (_RETURN, 0, 0, _EACCES),
            ]  # fmt: skip
    commands = [step for c in _FCNTL_COMMANDS for step in ((_EQUAL, 0, 1, c), (_RETURN, 0, 0, _PASS))]
    steps += [(_EQUAL, 0, 1 + len(commands), _FCNTL[column]), (_LOAD, 0, 0, _ARGUMENTS_AT + 8), *commands]
    return [*steps, (_RETURN, 0, 0, _EACCES)]


def _read_only_libraries() -> bool:
    """Let this process read what Python's imports read, and no other file; False: the kernel has no Landlock."""
    rights = struct.pack("Q", _ALL_OF_FILES)
    rules = _LIBC.syscall(_CREATE_RULESET, rights, len(rights), 0)
    if rules < 0:
        return False
    for path, rights_below in _readable():
        try:
            file = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        is_folder = stat.S_ISDIR(os.fstat(file).st_mode)
        allowed = rights_below if is_folder else _READ_FILE
        done = _LIBC.syscall(_ADD_RULE, rules, 1, struct.pack("=Qi", allowed, file), 0)
        os.close(file)
        if done != 0:
            raise RefusedError(f"Landlock: {path}: {os.strerror(ctypes.get_errno())}")
    if _LIBC.syscall(_RESTRICT_SELF, rules, 0) != 0:
        raise RefusedError(f"Landlock: {os.strerror(ctypes.get_errno())}")
    os.close(rules)
    return True


def _readable() -> Iterator[tuple[str, int]]:
    """Give readable files and folders, with the rights below each folder.

    A right holds for all that is below. So folders that also hold installed packages are given child by child.
    """
    versioned = f"python{sys.version_info.major}.{sys.version_info.minor}"
    standard = {os.path.dirname(os.__file__), os.path.join(sys.base_exec_prefix, sys.platlibdir, versioned)}
    python = (os.path.join(sys.base_prefix, name) for name in ("lib", "lib64"))
    for folder in (*python, "/lib", "/lib64", "/usr/lib", "/usr/lib64"):
        # Debian has its packages in /usr/lib/python3.
        yield from ((path, _IN_FOLDER) for path in _children(folder) if not os.path.basename(path).startswith("python"))
    for folder in standard:
        # Python lists it to import from it; names of packages can be seen there.
        yield folder, _READ_FOLDER
        yield from ((path, _IN_FOLDER) for path in _children(folder))
    for path in ("/usr/share/zoneinfo", "/etc/ld.so.cache", "/etc/localtime", "/dev/null", "/dev/urandom"):
        yield path, _IN_FOLDER


def _children(folder: str) -> list[str]:
    """List a folder without installed packages; empty where there is no such folder."""
    try:
        names = sorted(set(os.listdir(folder)) - {"site-packages", "dist-packages"})
    except OSError:
        return []
    return [os.path.join(folder, name) for name in names]


def _control(option: int, value: int, pointer: bytes | None = None) -> None:
    if _LIBC.prctl(option, ctypes.c_ulong(value), pointer, ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        raise RefusedError(f"prctl {option}: {os.strerror(ctypes.get_errno())}")
