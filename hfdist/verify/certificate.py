"""The certificate of a proof: comparisons of a layout with one process, and how far each may differ."""

from __future__ import annotations

from typing import NamedTuple

from hfdist.config.train import Precision

_NORM_ERROR = 3e-10
"""Relative error of a norm on a CPU, for each element of the largest tensor. torch adds up squares in float32 there,
and DeepSpeed in float64: the norms of half a million elements differed by up to 8e-5, of ten million by 4e-4."""


class Bounds(NamedTuple):
    """Largest relative differences that rounding explains."""

    loss: float
    grad_norm: float
    gradient: float
    weight: float
    resumed: float
    """Bound for losses and weights after a resume, which does the same arithmetic once more."""

    def on_cpu(self, num_elements: int) -> Bounds:
        """Give the bounds on a CPU: wider for norms of so many elements, and for gradients that they clip."""
        error = _NORM_ERROR * num_elements
        return self._replace(grad_norm=max(self.grad_norm, error), gradient=max(self.gradient, error))


BOUNDS = {
    Precision.fp32: Bounds(loss=1e-5, grad_norm=1e-5, gradient=1e-5, weight=1e-5, resumed=1e-5),
    # A bfloat16 number is good to 2**-8 and a float16 one to 2**-11, and layouts differ in what they round: under ZeRO
    # the weights and the gradients too. About ten times what small models show.
    Precision.bf16: Bounds(loss=2e-3, grad_norm=2e-2, gradient=1e-1, weight=5e-2, resumed=1e-4),
    Precision.fp16: Bounds(loss=5e-4, grad_norm=5e-3, gradient=3e-2, weight=1e-2, resumed=1e-4),
    # What is rounded to float8 does not depend on the layout.
    Precision.fp8: Bounds(loss=2e-3, grad_norm=2e-2, gradient=1e-1, weight=5e-2, resumed=1e-4),
}


class Row(NamedTuple):
    """One comparison: the largest relative difference and where it is."""

    what: str
    difference: float
    worst: str
    bound: float

    @property
    def passed(self) -> bool:
        """Whether the difference is within the bound; one that is not a number is not."""
        return self.difference <= self.bound


class Certificate(NamedTuple):
    """All comparisons of a layout with one process."""

    layout: str
    """One line for people."""
    rows: tuple[Row, ...]
    kernels: str = ""
    """What computed attention and the loss, and how matrices were shared; one line, too."""
    unlike: tuple[str, ...] = ()
    """Steps that a run has skipped or done again, a line each."""

    @property
    def passed(self) -> bool:
        """Every comparison is within its bound."""
        return all(row.passed for row in self.rows)

    def __str__(self) -> str:
        cells = [("largest relative difference", "", "bound", "", "where")]
        cells += [
            (row.what, f"{row.difference:.1e}", f"{row.bound:.0e}", "pass" if row.passed else "FAIL", row.worst)
            for row in self.rows
        ]
        widths = [max(len(line[column]) for line in cells) for column in range(4)]
        table = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, [*widths, 0], strict=True)).rstrip()
            for line in cells
        ]
        verdict = f"CERTIFICATE: {'passed' if self.passed else 'failed'}"
        computed = [f"computed by: {self.kernels}"] if self.kernels else []
        lines = [f"layout: {self.layout}", *computed, *(f"  {line}" for line in table), *self.unlike, verdict]
        return "\n".join(lines)
