"""The certificate of a proof: each comparison of a layout with one process, and the largest difference it may show."""

from __future__ import annotations

from typing import NamedTuple

from hfdist.config.train import Precision

_NORM_ERROR = 3e-10
"""Relative error of a norm on a CPU, for each element of the largest tensor. torch adds up squares in float32 there,
and DeepSpeed in float64: the norms of half a million elements differed by up to 8e-5, of ten million by 4e-4."""


class Bounds(NamedTuple):
    """The largest relative differences that rounding explains, one for each quantity that is compared."""

    loss: float
    grad_norm: float
    """Bound for the norms of gradients."""
    gradient: float
    """Bound for the elements of gradients."""
    weight: float
    """Bound for the elements of weights."""
    resumed: float
    """Bound for losses and weights after a resume, which does the same arithmetic once more."""

    def on_cpu(self, num_elements: int) -> Bounds:
        """Give the bounds on a CPU: wider for norms, whose error grows with size, and for gradients that they clip.

        Args:
            num_elements: number of elements of the model's largest tensor.
        """
        error = _NORM_ERROR * num_elements
        return self._replace(grad_norm=max(self.grad_norm, error), gradient=max(self.gradient, error))


BOUNDS = {
    Precision.fp32: Bounds(loss=1e-5, grad_norm=1e-5, gradient=1e-5, weight=1e-5, resumed=1e-5),
    # A bfloat16 number is good to 2**-8 and a float16 one to 2**-11, and layouts differ in what they round: under ZeRO
    # the weights and the gradients too. About ten times what small models show.
    Precision.bf16: Bounds(loss=2e-3, grad_norm=2e-2, gradient=1e-1, weight=5e-2, resumed=1e-4),
    Precision.fp16: Bounds(loss=5e-4, grad_norm=5e-3, gradient=3e-2, weight=1e-2, resumed=1e-4),
    # All layouts round the same numbers to float8, so that the bounds of bfloat16 are enough.
    Precision.fp8: Bounds(loss=2e-3, grad_norm=2e-2, gradient=1e-1, weight=5e-2, resumed=1e-4),
}


class Row(NamedTuple):
    """One comparison: the largest relative difference and where it is."""

    what: str
    """Name of the quantity that is compared, such as `weights at the end`."""
    difference: float
    """The largest relative difference."""
    worst: str
    """Name of the tensor or the step with that difference."""
    bound: float
    """The largest difference that passes."""

    @property
    def passed(self) -> bool:
        """Whether the difference is within the bound; one that is not a number is not."""
        return self.difference <= self.bound


class Certificate(NamedTuple):
    """All comparisons of a layout with one process."""

    layout: str
    """The layout in words, one line."""
    rows: tuple[Row, ...]
    """The comparisons."""
    kernels: str = ""
    """What computed attention and the loss, and how matrices were shared, in words, one line."""
    unlike: tuple[str, ...] = ()
    """Steps that a run has skipped or done again, a line each."""

    @property
    def passed(self) -> bool:
        """Whether every comparison is within its bound."""
        return all(row.passed for row in self.rows)

    def __str__(self) -> str:
        """Give a table of the comparisons, with the verdict as the last line."""
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
