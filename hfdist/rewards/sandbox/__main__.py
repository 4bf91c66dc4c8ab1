"""Run tests on a program that cannot see them: `python -I -S -B sandbox CPU_SECONDS MEMORY_BYTES WITHOUT_LANDLOCK`.

Two confined processes: one runs the tests, and has each function that they call done by the other, which runs the
program. So the program has no verdict in reach: no `os._exit`, no patched builtin and no print can pass a test, only
the right values can. It learns the arguments of a call and never what is expected.

WITHOUT_LANDLOCK is 1 or 0: whether a program may run where the kernel does not keep it from reading files.

Standard input is `{"program": ..., "reference": ...}`. Standard output is a line `ready` or `refused REASON`, and then
`+` or `-` for each top-level `assert`, as each ends. `?`: the tests pass what is no plain data to the program.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import symtable
import sys
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

# Python runs this folder by its path, as one that has no package around it.
if TYPE_CHECKING:
    from hfdist.rewards.sandbox.calls import LOAD, LostError, NoPlainDataError, Program, serve
    from hfdist.rewards.sandbox.confinement import RefusedError, end_with_parent, filter_system_calls, limit
else:
    from calls import LOAD, LostError, NoPlainDataError, Program, serve
    from confinement import RefusedError, end_with_parent, filter_system_calls, limit


def be_program(read: int, write: int) -> None:
    """Run the program that comes, and call its functions."""
    module = ModuleType("program")
    # dataclasses look up the module of a class here.
    sys.modules["program"] = module

    def load(source: str) -> None:
        exec(compile(source, "<program>", "exec"), vars(module))

    vars(module)[LOAD] = load
    os.write(write, b"ready\n")
    serve(os.fdopen(read, "rb"), os.fdopen(write, "wb"), vars(module))


def be_tests(read: int, write: int, verdicts: int) -> None:
    """Run the reference's statements, and write a verdict for each top-level `assert`."""
    task = json.load(sys.stdin)
    program = Program(os.fdopen(read, "rb"), os.fdopen(write, "wb"))
    try:
        program.call(LOAD, task["program"])
    except (Exception, LostError):  # whatever the program raises, or its end
        return
    reference: str = task["reference"]
    tree = ast.parse(reference)
    own = {name: partial(program.call, name) for name in names_of_the_program(tree, reference)}
    namespace: dict[str, object] = {"__name__": "tests", **own}
    for statement in tree.body:
        verdict = b"+"
        try:
            exec(compile(ast.Module([statement], []), "<tests>", "exec"), namespace)
        except NoPlainDataError:
            verdict = b"?"
        except BaseException:  # `sys.exit` too
            verdict = b"-"
        if isinstance(statement, ast.Assert) or verdict == b"?":
            os.write(verdicts, verdict)


def names_of_the_program(tree: ast.Module, reference: str) -> set[str]:
    """The names that the tests may take from the program.

    What the tests bind or import themselves is not among them, nor is a builtin, nor a module of the library: a program
    could pass a test by an `abs` or a `math.isclose` of its own.
    """
    top = symtable.symtable(reference, "<tests>", "exec")
    own = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    nodes = list(ast.walk(tree))
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    modules = {node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
    return used - own - set(dir(builtins)) - (modules & sys.stdlib_module_names)


def main() -> None:
    """Confine, fork before the tests are read, and be one of the two."""
    parent, (cpu_seconds, memory_bytes, without_landlock) = os.getppid(), map(int, sys.argv[1:4])
    del sys.path[0]
    null = os.open(os.devnull, os.O_RDWR)
    # Code of others may print.
    verdicts = os.dup(1)
    os.dup2(null, 1)
    os.dup2(null, 2)
    try:
        if not limit(cpu_seconds, memory_bytes) and not without_landlock:
            raise RefusedError("the kernel has no Landlock: a program could read this user's files")
        end_with_parent(parent)
        tests_read, program_write = os.pipe()
        program_read, tests_write = os.pipe()
        tester = os.getpid()
        if os.fork() == 0:
            os.dup2(null, 0)
            for other in (verdicts, tests_read, tests_write, null):
                os.close(other)
            end_with_parent(tester)
            filter_system_calls()
            be_program(program_read, program_write)
            return
        os.close(program_read)
        os.close(program_write)
        filter_system_calls()
    except (RefusedError, OSError) as error:
        os.write(verdicts, f"refused {error}\n".encode())
        return
    if os.read(tests_read, 6) != b"ready\n":
        os.write(verdicts, b"refused the process of the program ended\n")
        return
    os.write(verdicts, b"ready\n")
    be_tests(tests_read, tests_write, verdicts)


if __name__ == "__main__":
    main()
