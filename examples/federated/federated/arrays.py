"""The weights of a model folder as Flower sends them: arrays in the order of their names."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

WEIGHTS = "model.safetensors"


def read_arrays(folder: Path) -> list[np.ndarray]:
    """Give the weights of a model folder."""
    tensors = load_file(folder / WEIGHTS)
    return [tensors[name].astype(np.float32) for name in sorted(tensors)]


def write_model(template: Path, folder: Path, arrays: list[np.ndarray]) -> None:
    """Write a model folder like another one, with these weights."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(template, folder, ignore=shutil.ignore_patterns(WEIGHTS))
    before = load_file(template / WEIGHTS)
    found = {name: array.reshape(before[name].shape) for name, array in zip(sorted(before), arrays, strict=True)}
    weights = {name: array.astype(before[name].dtype) for name, array in found.items()}
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
