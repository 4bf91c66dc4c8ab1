"""The reward `code`: the share of the reference's tests that the program in a text passes."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

from hfdist.errors import DataError
from hfdist.host_cores import usable_cores
from hfdist.rewards.generation import Generation
from hfdist.rewards.sandbox.start import WITHOUT_LANDLOCK, SandboxLimits, count_passed
from hfdist.topology import read_launcher

_BLOCK = re.compile(r"^[ \t]*```(?:python|py|python3)[ \t]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)


def code(
    generations: Sequence[Generation], *, limits: SandboxLimits | None = None, without_landlock: bool = False
) -> list[float]:
    """Give the share of each reference's tests that pass, from 0.0 to 1.0.

    The program is the last block of Python in the text, or the whole text. Tests are the top-level `assert` statements
    of the reference; its other statements prepare them. They run in a sandbox (`hfdist/rewards/sandbox/`).

    Args:
        generations: programs and their tests; several run at a time, by this process's share of the machine's CPUs.
        limits: limits of each program; None: 4 CPU seconds, 12 seconds, 512 MiB.
        without_landlock: whether programs may run where the kernel does not keep them from reading this user's files.

    Raises:
        ConfigError: this machine cannot confine a program.
        DataError: a reference is no Python, has no test, or calls a program with an argument that is no plain data.
    """
    counts = [_count_tests(one.reference) for one in generations]

    def share(one: Generation, num_tests: int) -> float:
        program = find_program(one.text)
        passed = count_passed(
            program, one.reference, num_tests, limits or SandboxLimits(), without_landlock=without_landlock
        )
        return passed / num_tests

    with ThreadPoolExecutor(max(1, usable_cores() // read_launcher().local_world_size)) as pool:
        return list(pool.map(share, generations, counts))


def code_without_landlock(generations: Sequence[Generation]) -> list[float]:
    """Do what `code` does, also where the kernel has no Landlock: programs can read this user's files there."""
    return code(generations, without_landlock=True)


SANDBOXED = MappingProxyType({"code": code, WITHOUT_LANDLOCK: code_without_landlock})
"""Rewards that need a machine which can confine a program, by name."""


def find_program(text: str) -> str:
    """Give the last fenced block of Python; a text without one is a program itself."""
    blocks: list[str] = _BLOCK.findall(text)
    # A block within an item of a list is indented as a whole.
    return textwrap.dedent(blocks[-1]) if blocks else text


def _count_tests(reference: str) -> int:
    allowed = "Python with an `assert` that is in no function and no block"
    try:
        tree = ast.parse(reference)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        what = f"a reference is no Python: {error}"
        raise DataError(what, where="reward code", found=reference, allowed=allowed) from error
    num_tests = sum(isinstance(statement, ast.Assert) for statement in tree.body)
    if num_tests == 0:
        raise DataError("a reference has no test", where="reward code", found=reference, allowed=allowed)
    return num_tests
