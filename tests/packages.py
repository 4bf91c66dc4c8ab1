"""Packages with metrics, laid out as pip installs them."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from hfdist.trainer.evaluation.metrics import GROUP


def install_metrics(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, source: str, **functions: str) -> None:
    """Put a package of one module into `folder`, and the folder on Python's path.

    Args:
        folder: may hold other packages.
        monkeypatch: takes the path back.
        name: of the package.
        source: of its module.
        functions: what the module calls each metric that it offers.
    """
    about = folder / f"{name}-1.0.dist-info"
    about.mkdir(parents=True)
    (folder / f"{name}.py").write_text(source)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{metric} = {name}:{function}" for metric, function in functions.items()]
    (about / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines]) + "\n")
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()
