"""The states of a rank's random number generators in a checkpoint: those of torch, of its GPU, numpy and Python.

Each rank has a safetensors file of its own: the words of each generator are a tensor, and single numbers are JSON.
"""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from hfdist.checkpoint.manifest import DamagedError, inside, read_manifest
from hfdist.collectives import on_all_ranks, on_rank_zero, rank, world_size

logger = logging.getLogger(__name__)

_NUMPY_WORDS = 624
"""Number of words in the state of numpy's Mersenne twister."""

RANDOM_STEM = "training_state/rng-"
"""Begin of the names of these files."""


def random_file(of_rank: int) -> str:
    """Give the name of a rank's file within a checkpoint."""
    return f"{RANDOM_STEM}{of_rank:05d}.safetensors"


class RandomState:
    """The states of this rank's generators at the moment when it is made; it can be written later."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        self._numpy = np.random.get_state(legacy=True)
        self._python = random.getstate()

    def to_bytes(self) -> bytes:
        """Give the content of this rank's file."""
        _, numpy_words, numpy_position, has_gauss, cached_gauss = self._numpy
        version, python_words, python_gauss = self._python
        tensors = {
            "torch": self._torch,
            "numpy": torch.from_numpy(np.asarray(numpy_words, dtype=np.int64)),
            "python": torch.tensor(python_words, dtype=torch.int64),
        }
        if self._cuda is not None:
            tensors["cuda"] = self._cuda
        rest = {"numpy": [numpy_position, has_gauss, cached_gauss], "python": [version, python_gauss]}
        return save(tensors, metadata={"rest": json.dumps(rest)})


def restore_random_state(checkpoint: Path) -> bool:
    """Set this rank's generators to the states in a checkpoint. A collective.

    If another number of processes has saved it, all generators stay as they are: the states of ranks that come or go
    have no meaning.

    Returns:
        Whether the generators were set.

    Raises:
        CheckpointError: a file is damaged; on all ranks alike.
    """

    def compare_files() -> list[int | bool]:
        names = {name for name in read_manifest(checkpoint).files if name.startswith(RANDOM_STEM)}
        return [len(names), names == {random_file(index) for index in range(world_size())}]

    # Rank 0 alone compares: of thousands of ranks, the names are many to send.
    num_processes, is_of_as_many = on_rank_zero(compare_files)
    if not is_of_as_many:
        logger.info("random generators start afresh: %s was saved by %d processes", checkpoint, num_processes)
        return False
    on_all_ranks(lambda: _restore(inside(checkpoint, random_file(rank()))))
    return True


def _restore(path: Path) -> None:
    """Set this process's generators to the states in a file; DamagedError: it does not have them."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
            rest = json.loads(file.metadata()["rest"])
        position, has_gauss, cached_gauss = rest["numpy"]
        if not 0 <= position <= _NUMPY_WORDS or len(tensors["numpy"]) != _NUMPY_WORDS:
            # numpy takes any position, and would read outside of its memory.
            raise ValueError(f"numpy's position is {position}")
        version, python_gauss = rest["python"]
        torch.set_rng_state(tensors["torch"])
        words = tensors["numpy"].numpy().astype(np.uint32)
        np.random.set_state(("MT19937", words, position, has_gauss, cached_gauss))
        random.setstate((version, tuple(tensors["python"].tolist()), python_gauss))
        if "cuda" in tensors and torch.cuda.is_available():
            torch.cuda.set_rng_state(tensors["cuda"])
    except (SafetensorError, KeyError, ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise DamagedError("rng", "a file of random state is damaged", where=path, found=error) from error
