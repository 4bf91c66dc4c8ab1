"""Ranks inherit what this process has imported, and read a small part of the standard library: both save seconds."""

import shutil
import sysconfig
from pathlib import Path

import pytest

from tests.imports import import_all


@pytest.fixture(scope="session", autouse=True)
def imported():
    import_all()


@pytest.fixture(scope="session")
def few_modules(tmp_path_factory):
    """The modules of the standard library that are no packages, and one that is."""
    folder, library = tmp_path_factory.mktemp("library"), Path(sysconfig.get_path("stdlib"))
    for path in [*library.glob("*.py"), *library.glob("json/*.py")]:
        (folder / path.relative_to(library)).parent.mkdir(exist_ok=True)
        shutil.copy(path, folder / path.relative_to(library))
    return folder


@pytest.fixture(scope="module", autouse=True)
def short_library(few_modules):
    """Until the module's tests are done: those of tests/e2e start processes that read it whole."""
    whole = sysconfig.get_path
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            sysconfig, "get_path", lambda name, *m, **n: str(few_modules) if name == "stdlib" else whole(name, *m, **n)
        )
        yield
