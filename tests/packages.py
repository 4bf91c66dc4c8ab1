"""Packages with entry points, laid out as pip installs them."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest


def install_package(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, source: str, group: str, **entries: str
) -> None:
    """Put a package of one module into `folder`, and the folder on Python's path.

    Args:
        folder: may hold other packages.
        monkeypatch: takes the path back.
        name: of the package.
        source: of its module.
        group: of its entry points.
        entries: what the module calls each thing that it offers there.
    """
    about = folder / f"{name}-1.0.dist-info"
    about.mkdir(parents=True)
    (folder / f"{name}.py").write_text(source)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{entry} = {name}:{what}" for entry, what in entries.items()]
    (about / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]) + "\n")
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()
