"""The policy's trained weights as files, which ranks write and generators read in place.

A version has the folder `ROLLBACK-VERSION`. A rollback is a number: how often the run has gone back to an earlier step.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from hfdist.checkpoint import export_model
from hfdist.collectives import on_rank_zero
from hfdist.strategies.engine import Engine

_REMOVED = ".removed"
"""Suffix of a folder that is being removed."""


class PolicyFiles:
    """The folder of all versions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, rollback: int, version: int) -> Path:
        """Give the folder of a version."""
        return self.folder / f"{rollback}-{version}"

    def write(self, rollback: int, version: int, model: nn.Module, engine: Engine) -> None:
        """Write the weights of `model` that are trained, each rank what it holds. A collective; see `export_model`."""
        folder = self.path(rollback, version)
        on_rank_zero(lambda: folder.mkdir(parents=True, exist_ok=True))
        parameters = model.named_parameters(remove_duplicate=False)
        trained = {name for name, parameter in parameters if parameter.requires_grad}
        pieces = (piece for piece in engine.pieces() if piece.name in trained)
        export_model(folder, pieces, lambda unfinished: None)

    def files(self, rollback: int, version: int) -> list[Path]:
        """List the files of a version; FileNotFoundError: a newer version has taken its place."""
        found = sorted(self.path(rollback, version).glob("*.safetensors"))
        if not found:
            raise FileNotFoundError(self.path(rollback, version))
        return found

    @torch.no_grad()
    def read(self, rollback: int, version: int, model: nn.Module) -> None:
        """Put the weights of a version into a whole model.

        Raises:
            FileNotFoundError: a newer version has taken its place.
        """
        files = self.files(rollback, version)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for path in files:
            with safe_open(path, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  # it is no mapping
                    parameters[name].copy_(tensors.get_tensor(name))

    def remove_others(self, rollback: int, versions: Iterable[int]) -> None:
        """Remove all versions but these of a rollback. A `read` of another one fails."""
        kept = {self.path(rollback, version) for version in versions}
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if path not in kept:
                # Renamed first: a slow reader must not find a part of the files, and take them for all.
                gone = path.with_suffix(_REMOVED)
                with contextlib.suppress(OSError):
                    path.rename(gone)
                shutil.rmtree(gone, ignore_errors=True)
