"""Code of the user's draws random numbers, and the training goes on as if it had drawn none."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def keeping_generators() -> Iterator[None]:
    """Run the block; then set the generators of Python, numpy and torch (CPU and this rank's GPU) to what they were."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
