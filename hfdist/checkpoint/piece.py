"""A piece: what one rank holds of one named tensor. The common language of engines and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

WEIGHT = "weight"
"""The key of a parameter's value; other keys are the optimizer's, such as `exp_avg`."""

MASTER = "master"
"""The key of a float32 copy that the optimizer updates where the weights themselves are bfloat16 or float16."""

STEP = "step"
"""The key of the optimizer's step count: a tensor of shape (), kept in JSON."""

NUMBER = "#"
"""What the keys of all other numbers of the optimizer begin with; they are kept in JSON, too."""

TRAINED = f"{NUMBER}trained"
"""The key of a number that is always 1, of parameters for which the optimizer keeps no other."""

OPTIONAL = "+"
"""What the keys begin with of what a run can do without: it is read where this run has it in the same shape."""


def is_number(key: str) -> bool:
    """Whether a key is that of one number of a parameter, which all who hold a part of it have."""
    return key == STEP or key.startswith(NUMBER)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A run of a named tensor, or equal runs at equal distances, as this rank holds it.

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
    """`WEIGHT`, `MASTER`, `STEP`, another number's, or another key of the optimizer's state."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    start: int
    """First element, counted in the flattened whole tensor."""
    view: torch.Tensor
    """This rank's elements, in order; any shape that flattens without a copy."""
    run: int = 0
    """Elements of each run; 0: all are one run."""
    pitch: int = 0
    """Elements from the start of a run to that of the next; divides the whole tensor, and each row holds one run."""
    set_number: Callable[[float], None] | None = None
    """How to set a number that is no tensor where it is used; `view` is a copy of it."""

    @property
    def stop(self) -> int:
        """One past the last element."""
        if not self.run:
            return self.start + self.view.numel()
        return self.start + (self.view.numel() // self.run - 1) * self.pitch + self.run

    @property
    def total(self) -> int:
        """Number of elements of the whole tensor."""
        return math.prod(self.shape)

    def of_whole(self, whole: torch.Tensor) -> torch.Tensor:
        """Give this piece's elements of a whole tensor, in the shape of the view."""
        rows = view_rows(whole.reshape(-1)[self.start : self.stop], self.run, self.pitch)
        return rows.reshape(self.view.shape)


def view_rows(elements: torch.Tensor, run: int, pitch: int) -> torch.Tensor:
    """View runs of `run` elements every `pitch` as rows; the first begins with the 1-D tensor, the last ends it."""
    if not run:
        return elements[None]
    return elements.unfold(0, run, pitch)
