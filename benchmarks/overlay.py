"""Peers that hfdist does not need: pinned, in folders of their own that only the peer's process sees.

A folder lies before the environment's own packages, so that pins that clash with hfdist's do not meet them, and torch
and the like are not installed twice.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from filelock import FileLock

from benchmarks.table import last_said

_ROOT = Path(__file__).resolve().parents[1]
_PINS = Path(__file__).parent / "peers"
_FOLDER = _ROOT / ".peers"


class UnavailableError(RuntimeError):
    """A peer cannot run here; the message is the reason that the table shows."""


def pinned(name: str, *packages: str) -> list[str]:
    """`PACKAGE VERSION` of each of these, as `benchmarks/peers/NAME.txt` pins it."""
    lines = (_PINS / f"{name}.txt").read_text().splitlines()
    versions = dict(line.split("==") for line in lines)
    return [f"{package} {versions[package]}" for package in packages]


@cache
def peer_environment(name: str) -> dict[str, str]:
    """Environment variables with which a Python process sees the packages of `benchmarks/peers/NAME.txt`.

    The file lists every package with its version, dependencies too, as pip installs nothing else.

    Raises:
        UnavailableError: pip could not install them.
    """
    pins = _PINS / f"{name}.txt"
    folder = _FOLDER / name
    installed = folder / "installed.txt"
    _FOLDER.mkdir(exist_ok=True)
    # Contenders that are prepared side by side ask at the same time.
    with FileLock(_FOLDER / f"{name}.lock"):
        if not installed.is_file() or installed.read_text() != pins.read_text():
            _install(pins, folder)
            installed.write_text(pins.read_text())
    paths = [str(folder), str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _install(pins: Path, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(folder)]
    ended = subprocess.run([*command, "-r", str(pins)], capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        said = last_said(ended.stderr) or f"exit status {ended.returncode}"
        raise UnavailableError(f"pip could not install {pins.name}: {said}")
