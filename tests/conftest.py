"""One thread a process, no Hub, and a cache that lives as long as the test session."""

import gc
import os

# Before torch is imported anywhere: its thread pool is sized at import.
os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
# What tests start need not compile hfdist anew: half a second of each process.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import shutil
import signal
import sys
import sysconfig
from pathlib import Path

import pytest

# What is imported stays: to look through it again and again is a quarter of the time of all imports.
gc.disable()

import torch  # noqa: E402

from tests.quick_composition import leave_stack, quick_composition  # noqa: E402

pytest_plugins = ("tests.cpu_seconds",)

sys.dont_write_bytecode = False
torch.set_num_threads(1)
# Under nohup what the tests start would ignore a closed terminal, too.
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_finish():
    """Modules and tests stay until the end: no collection need look through those millions of objects."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def quickly_composed(request):
    """Files of config groups are merged once a session, but in modules that say `COMPOSES_WHOLE`."""
    with pytest.MonkeyPatch.context() as patch:
        if not getattr(request.module, "COMPOSES_WHOLE", False):
            leave_stack(patch)
            quick_composition(patch)
        yield


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory):
    """A cache shared by the tests of one session, never the user's."""
    folder = tmp_path_factory.mktemp("hfdist-cache")
    os.environ["HFDIST_CACHE"] = str(folder)
    return folder


@pytest.fixture(scope="session")
def few_modules(tmp_path_factory):
    """The modules of the standard library that are no packages, and one that is."""
    folder, library = tmp_path_factory.mktemp("library"), Path(sysconfig.get_path("stdlib"))
    for path in [*library.glob("*.py"), *library.glob("json/*.py")]:
        (folder / path.relative_to(library)).parent.mkdir(exist_ok=True)
        shutil.copy(path, folder / path.relative_to(library))
    return folder


@pytest.fixture(scope="module")
def short_library(few_modules):
    """Forked runs read a small part of the standard library; fresh processes read it whole."""
    whole = sysconfig.get_path
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            sysconfig, "get_path", lambda name, *m, **n: str(few_modules) if name == "stdlib" else whole(name, *m, **n)
        )
        yield
