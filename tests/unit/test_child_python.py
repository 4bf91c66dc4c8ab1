"""No process that a command starts imports a module of the folder in which the user works."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hfdist.processes.child_python import module, python

HOUSE = Path(__file__).resolve().parents[2]
# The child itself; and the sandbox, which takes nothing of its surroundings at all (`-I`).
OWN_FLAGS = {"hfdist/processes/child_python.py", "hfdist/rewards/sandbox/start.py"}
SPAWNED = """
import multiprocessing, os
from hfdist.processes.child_python import restore_path, safe_path

def child(before):
    restore_path(before)
    assert "PYTHONSAFEPATH" not in os.environ

if __name__ == "__main__":
    with safe_path() as before:
        process = multiprocessing.get_context("spawn").Process(target=child, args=(before,))
        process.start()
    assert "PYTHONSAFEPATH" not in os.environ
    process.join()
    raise SystemExit(process.exitcode)
"""


@pytest.fixture
def here(tmp_path):
    """A working folder with modules of names that Python and its libraries import."""
    folder = tmp_path / "here"
    folder.mkdir()
    for name in ("pickle", "socket", "yaml", "multiprocessing"):
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise ImportError\n")
    return folder


@pytest.mark.parametrize("command", [module("calendar", "2026"), python("-c", "import pickle, socket, yaml")])
def test_commands_look_elsewhere(here, command):
    subprocess.run(command, cwd=here, check=True, stdout=subprocess.DEVNULL)
    assert not (here.parent / "ran").exists()


def test_so_do_processes_that_multiprocessing_spawns(here):
    program = here.parent / "program.py"
    program.write_text(SPAWNED)
    subprocess.run([sys.executable, str(program)], cwd=here, check=True)
    assert not (here.parent / "ran").exists()


def test_nothing_starts_python_in_another_way():
    for path in sorted([*(HOUSE / "hfdist").rglob("*.py"), *(HOUSE / "recipes").rglob("*.py")]):
        place, text = str(path.relative_to(HOUSE)), path.read_text(encoding="utf-8")
        if place in OWN_FLAGS:
            continue
        assert "sys.executable" not in text, place
        assert "elastic_launch(config" not in text or "with safe_path()" in text, place
        # In the shell of job files.
        assert not re.findall(r"\{(?:python|verdict)\} (?!-P )", text), place
