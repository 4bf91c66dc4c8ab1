"""Starts a sandbox, waits no longer than its limit, and counts the tests that pass."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from hfdist.errors import ConfigError, DataError

WITHOUT_LANDLOCK = "code_without_landlock"
"""Name of the reward `code` for kernels that do not keep programs from reading files; only used if it is named."""

_LONGEST_START = 300
"""Most bytes of the first line, which says whether the sandbox has begun."""


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """Limits of a program and its tests; each of the two has these CPU seconds and this memory."""

    cpu_seconds: int = 4
    wall_seconds: float = 12.0
    """Seconds from the start of the processes; more than twice the CPU seconds, since machines are busy."""
    memory_bytes: int = 2**29


def count_passed(
    program: str, reference: str, num_tests: int, limits: SandboxLimits, *, without_landlock: bool = False
) -> int:
    """Run a program's tests in a sandbox of their own, and count those that pass.

    Args:
        program: Python code of unknown origin.
        reference: Python code whose top-level `assert` statements are the tests.
        num_tests: number of tests.
        limits: limits of the sandbox; tests that have not ended within them do not pass.
        without_landlock: whether the program may run where the kernel does not keep it from reading this user's files.

    Raises:
        ConfigError: this machine cannot confine a program.
        DataError: a test calls the program with an argument that is no plain data.
    """
    task = json.dumps({"program": program, "reference": reference}).encode()
    arguments = [str(limits.cpu_seconds), str(limits.memory_bytes), str(int(without_landlock))]
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", str(Path(__file__).parent), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={},
        cwd="/",
        start_new_session=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            # The sandbox reads the task before it runs any of it. It may end before, and then says why.
            with contextlib.suppress(BrokenPipeError), process.stdin:
                process.stdin.write(task)
            said = _read(process.stdout.fileno(), _LONGEST_START + num_tests, limits.wall_seconds)
        finally:
            # The pid is not given to another process before this one is waited for.
            os.killpg(process.pid, signal.SIGKILL)
    first, newline, verdicts = said.partition(b"\n")
    if not newline or first != b"ready":
        raise _refused(first.decode(errors="replace"), limits)
    if b"?" in verdicts:
        what = "a test gives the program an argument that is no plain data"
        allowed = "numbers, texts, bytes, None, and lists, tuples, sets and dicts of them"
        raise DataError(what, where="reward code", found=reference, allowed=allowed)
    return verdicts[:num_tests].count(b"+")


def _read(file: int, most_bytes: int, seconds: float) -> bytes:
    """Read a pipe to its end, but at most `most_bytes`, and at most for `seconds`."""
    said, end = b"", time.monotonic() + seconds
    pipe = select.poll()  # select.select takes no file above 1023
    pipe.register(file, select.POLLIN)
    while len(said) < most_bytes:
        ready = pipe.poll(max(0.0, 1000 * (end - time.monotonic())))
        part = os.read(file, most_bytes - len(said)) if ready else b""
        if not part:
            break
        said += part
    return said


def _refused(first: str, limits: SandboxLimits) -> ConfigError:
    what = "the reward `code` cannot confine a program on this machine"
    found = first.removeprefix("refused ") or f"no start within {limits.wall_seconds} s and {limits.memory_bytes} bytes"
    allowed = "Linux on x86_64 or aarch64 with CONFIG_SECCOMP_FILTER and CONFIG_SECURITY_LANDLOCK"
    hint = "a machine or a container that allows them; the reward `arithmetic` runs no program"
    if "no Landlock" in found:
        hint += f"; the reward `{WITHOUT_LANDLOCK}` runs programs that can read this user's files"
    return ConfigError(what, where="reward code", found=found, allowed=allowed, hint=hint)
