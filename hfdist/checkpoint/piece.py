"""`Piece`: the elements of one named tensor that one rank holds. Engines list pieces, and checkpoints save them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

WEIGHT = "weight"
"""The key of a parameter's value; other keys are those of the optimizer's state, such as `exp_avg`."""

MASTER = "master"
"""The key of a float32 copy that the optimizer updates where the weights themselves are bfloat16 or float16."""

STEP = "step"
"""The key of the optimizer's step count: a tensor of shape (), kept in JSON."""

NUMBER = "#"
"""Begin of the keys of all other single numbers of the optimizer; they are kept in JSON, too."""

TRAINED = f"{NUMBER}trained"
"""The key of a number that is always 1, for a trained parameter of which the optimizer keeps no other number."""

OPTIONAL = "+"
"""Begin of the keys of tensors that a run can do without: they are read if the checkpoint has them in this shape."""


def is_number(key: str) -> bool:
    """Whether a key is that of a single number of a parameter, which each rank that holds a part of it has, too."""
    return key == STEP or key.startswith(NUMBER)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Elements of a named tensor that this rank holds: one run of them, or equal runs at equal distances.

    Rows of a matrix are one run. A part of its columns is one run in each row:

        shape [4, 6], start=8, run=2, pitch=6:   . . . . . .
                                                 . . x x . .
                                                 . . x x . .
                                                 . . x x . .      with a view of 6 elements

    `view` is live: saving reads it, loading writes into it.
    """

    name: str
    """The parameter's name in the Hugging Face model."""
    key: str
    """What the tensor is of the parameter: `WEIGHT`, `MASTER`, `STEP` or another key of the optimizer's state."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    start: int
    """Index of the first element in the flattened whole tensor."""
    view: torch.Tensor
    """This rank's elements, in order; any shape that flattens without a copy."""
    run: int = 0
    """Elements of each run; 0: all are one run."""
    pitch: int = 0
    """Elements from the start of a run to that of the next: the length of a row, of which the tensor has whole ones."""
    set_number: Callable[[float], None] | None = None
    """Sets a number that is no tensor where the optimizer uses it; `view` is a copy of it. None: `view` is live."""

    @property
    def stop(self) -> int:
        """Index after the last element in the flattened whole tensor."""
        if not self.run:
            return self.start + self.view.numel()
        num_runs = self.view.numel() // self.run
        return self.start + (num_runs - 1) * self.pitch + self.run

    @property
    def total(self) -> int:
        """Number of elements of the whole tensor."""
        return math.prod(self.shape)

    def of_whole(self, whole: torch.Tensor) -> torch.Tensor:
        """Give this piece's elements of a whole tensor, in the shape of the view."""
        rows = view_rows(whole.reshape(-1)[self.start : self.stop], self.run, self.pitch)
        return rows.reshape(self.view.shape)


def view_rows(elements: torch.Tensor, run: int, pitch: int) -> torch.Tensor:
    """View runs of elements as rows of a matrix.

    Args:
        elements: a 1-D tensor from the first element of the first run to the last element of the last one.
        run: elements of each run; 0: all are one run.
        pitch: elements from the start of a run to that of the next.
    """
    if not run:
        return elements[None]
    return elements.unfold(0, run, pitch)
