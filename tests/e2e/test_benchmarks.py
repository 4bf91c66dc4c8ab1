"""The lines of `make bench`: each finds what it imports, and one that this machine cannot run says so."""

import importlib
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.__main__ import LINES
from benchmarks.table import read_measures
from tests.e2e.forked import run_forked

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("name", LINES.values())
def test_a_line_finds_what_it_imports(name):
    """`make bench` runs them all, once in a long while; a rename in hfdist must show before."""
    is_package = find_spec(name).submodule_search_locations is not None
    module = importlib.import_module(f"{name}.__main__" if is_package else name)
    assert callable(module.main)


def test_a_line_that_this_machine_cannot_run_says_so(tmp_path):
    measures = tmp_path / "measures.json"
    done = run_forked("--measures", measures, cwd=tmp_path, script=Path(gpu.__file__), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert read_measures(measures) == "no CUDA device is at hand"
