"""The lines of `make bench`: each finds what it imports, and one that this machine cannot run says so."""

import importlib
import subprocess
import sys
from importlib.util import find_spec

import pytest

from benchmarks.__main__ import LINES
from benchmarks.table import read_measures
from tests.e2e.test_command_line import ROOT

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("name", LINES.values())
def test_a_line_finds_what_it_imports(name):
    """`make bench` runs them all, once in a long while; a rename in hfdist must show before."""
    is_package = find_spec(name).submodule_search_locations is not None
    module = importlib.import_module(f"{name}.__main__" if is_package else name)
    assert callable(module.main)


def test_a_line_that_this_machine_cannot_run_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    measures = tmp_path / "measures.json"
    subprocess.run([sys.executable, "-m", "benchmarks.gpu", "--measures", str(measures)], cwd=ROOT, check=True)
    assert read_measures(measures) == "no CUDA device is at hand"
