"""Runs code that reads somebody else's file in a forked process with limits of time and memory.

In a fork nothing is imported again, so that it costs some tens of milliseconds. Call it before there are threads or a
process group.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import resource
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

import hfdist.errors
from hfdist.errors import ConfigError, HfdistError, first_line, named_line
from hfdist.failures import signal_name
from hfdist.secrets import mask_secrets

_READ_BYTES = 1 << 16
_LONGEST_PART = 2_000
"""Characters of a part of an error; more help nobody."""
_DAMAGED = "the file asks for what no model needs, or is damaged: copy or download it again, or take another one"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the fork may use."""

    cpu_seconds: int = 12
    memory_bytes: int = 4 * 2**30
    """Bytes of addresses, beside those that this process has."""
    wall_seconds: float = 900.0
    """Most seconds, for what waits and computes nothing; long, since machines are busy."""


def do_apart(do: Callable[[], object], *, where: str, found: object, limits: Limits | None = None) -> None:
    """Call `do` in a fork of this process, and raise here what it raises there; its value is lost.

    Args:
        do: reads a file of unknown origin, or writes what it has made of it to the disk.
        where: the config key that names the file, for messages.
        found: the file, for messages.
        limits: what the fork may use; None: the defaults.

    Raises:
        ConfigError: it takes more than the limits, or a library raises.
        HfdistError, OSError: what `do` raises.
    """
    limits = limits or Limits()
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Python warns of a fork beside threads; this one takes none of their locks.
        warnings.simplefilter("ignore")
        pid = os.fork()
    if pid == 0:
        _be_child(do, writer, limits)
    os.close(writer)
    try:
        answer = _read(reader, limits.wall_seconds)
    finally:
        os.close(reader)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    if answer:
        _raise(json.loads(answer), where, found, limits)
    else:
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        what = f"reading it ended a process by {signal_name(number) if number else 'itself'}"
        if number == signal.SIGXCPU:
            what = f"reading it takes more than {limits.cpu_seconds} CPU seconds"
        elif number == signal.SIGKILL:
            # The parent kills it after its time, and the kernel kills it when memory runs out.
            what = f"reading it takes more than {limits.wall_seconds:.0f} s, or more memory than there is"
        raise ConfigError(what, where=where, found=found, hint=_DAMAGED)


def _read(file: int, seconds: float) -> bytes:
    """Read to the end of a pipe, for so many seconds at most."""
    content, end = b"", time.monotonic() + seconds
    pipe = select.poll()
    pipe.register(file, select.POLLIN)
    while pipe.poll(max(0.0, 1000 * (end - time.monotonic()))):
        part = os.read(file, _READ_BYTES)
        if not part:
            return content
        content += part
    return b""


def _raise(answer: dict[str, str | None], where: str, found: object, limits: Limits) -> None:
    kind = answer.pop("kind", None)
    if kind == "OSError":
        raise OSError(int(answer["number"] or 0), answer["what"])
    if kind == "MemoryError":
        what = f"reading it takes more than {limits.memory_bytes / 2**30:.3g} GiB of memory"
        raise ConfigError(what, where=where, found=found, hint=_DAMAGED)
    if kind == "Exception":
        raise ConfigError(f"it cannot be read: {answer['what']}", where=where, found=found, hint=_DAMAGED)
    if kind is not None:
        error: type[HfdistError] = getattr(hfdist.errors, kind)
        raise error(str(answer.pop("what")), **answer)


def _be_child(do: Callable[[], object], writer: int, limits: Limits) -> NoReturn:
    answer: dict[str, str | None] = {"kind": "Exception", "what": "the process ended"}
    try:
        confine(limits)
        do()
        answer = {}
    except MemoryError:
        answer = {"kind": "MemoryError"}
    except HfdistError as error:
        kinds = [kind.__name__ for kind in type(error).__mro__ if hasattr(hfdist.errors, kind.__name__)]
        # Masked first: half of a secret has no secret's shape.
        said = {part: text and mask_secrets(text)[:_LONGEST_PART] for part, text in error.texts().items()}
        answer = {"kind": kinds[0], **said}
    except OSError as error:
        answer = {"kind": "OSError", "number": str(error.errno or 0), "what": error.strerror or first_line(error)}
    except BaseException as error:  # a library's own, as of Rust's panics, too
        answer = {"kind": "Exception", "what": mask_secrets(named_line(error))[:500]}
    finally:
        with suppress(BaseException):
            os.write(writer, json.dumps(answer).encode())
        # The exit functions and buffers that it would run and flush belong to its parent.
        os._exit(0)


def confine(limits: Limits) -> None:
    """Let a fork use no more than the limits, and say nothing. `limits.wall_seconds` are up to its parent."""
    faulthandler.disable()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    # The parent says what is to be said.
    silent = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(silent, stream)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if "torch" in sys.modules:
        # Threads of the parent are not here, and OpenMP would wait for them.
        sys.modules["torch"].set_num_threads(1)
    for kind, most in (
        (resource.RLIMIT_CPU, limits.cpu_seconds),
        (resource.RLIMIT_AS, _address_space() + limits.memory_bytes),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        bounded = min(most, math.inf if hard == resource.RLIM_INFINITY else hard)
        resource.setrlimit(kind, (int(bounded), hard))


def _address_space() -> int:
    """Bytes that this process has; on systems without /proc a number that limits little."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 2**40
