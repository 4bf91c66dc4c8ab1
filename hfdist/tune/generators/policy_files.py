"""The policy's weights as files on a disk: ranks write each version, and generators or servers read it there.

A version is the number of steps that have trained it. A rollback says how often the run has gone back to an earlier
step, after which the same version has other weights.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from hfdist.checkpoint import export_model
from hfdist.collectives import on_rank_zero
from hfdist.models.names.hub_names import find_hub_names
from hfdist.strategies.engine import Engine
from hfdist.tune.generators.versions import version_files, version_folder

_REMOVED = ".removed"
"""Suffix of a folder that is being removed."""


class PolicyFiles:
    """The folder of all versions of the policy.

    Args:
        folder: the folder; it need not be there yet.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, rollback: int, version: int) -> Path:
        """Give the folder of a version."""
        return version_folder(self.folder, rollback, version)

    def write(self, rollback: int, version: int, model: PreTrainedModel, engine: Engine, *, is_whole: bool) -> None:
        """Write a version; each rank writes the weights that it holds. A collective.

        Args:
            rollback: how often the run has gone back.
            version: number of steps that have trained the weights.
            model: the model that is trained.
            engine: the engine that holds its weights.
            is_whole: True: a Hub folder of all weights, which any program opens. False: the trained weights alone, by
                the names of this model's parameters.
        """
        folder = self.path(rollback, version)
        on_rank_zero(lambda: folder.mkdir(parents=True, exist_ok=True))
        if is_whole:
            names = find_hub_names(engine.model)
            export_model(folder, engine.pieces(), model.config.save_pretrained, names=names)
            return
        parameters = model.named_parameters(remove_duplicate=False)
        trained = {name for name, parameter in parameters if parameter.requires_grad}
        pieces = (piece for piece in engine.pieces() if piece.name in trained)
        export_model(folder, pieces, lambda unfinished: None)

    def files(self, rollback: int, version: int) -> list[Path]:
        """List the files of a version; FileNotFoundError: a newer version has taken its place."""
        return version_files(self.folder, rollback, version)

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
        if not self.folder.is_dir():
            return
        kept = {self.path(rollback, version) for version in versions}
        for path in self.folder.iterdir():
            if path not in kept:
                # Renamed first: a slow reader must not find a part of the files, and take them for all.
                gone = path.with_suffix(_REMOVED)
                with contextlib.suppress(OSError):  # an earlier removal may have left this name
                    path.rename(gone)
                shutil.rmtree(gone, ignore_errors=True)
