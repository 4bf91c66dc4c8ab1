"""Compare by name what two runs left behind, and say whether they trained the same.

Of a tensor the difference is  max |ours - reference| / max |reference|  over its elements, where the divisor is at
least a hundredth of the largest element of all tensors of its kind: a gradient that is zero but for rounding (that of
a key's bias, say) is judged on the scale of the model's gradients. A loss is a tensor of one element.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from hfdist.checkpoint.folder import step_name
from hfdist.checkpoint.piece import MASTER
from hfdist.checkpoint.save_plan import ADAPTER_STEM, MODEL_STEM, OPTIMIZER_STEM, shorten
from hfdist.config.train import Precision
from hfdist.trainer.checkpointing.checkpointer import CHECKPOINTS
from hfdist.trainer.reporting.callbacks import METRICS, read_metrics

FLOOR = 1e-2
"""Least divisor of a difference, as a share of the largest element of all tensors that are compared with it."""

NORM_ERROR = 3e-10
"""Of a norm on a CPU, for each element of the largest tensor. torch adds up squares in float32 there, and DeepSpeed in
float64: the norms of half a million elements differed by up to 8e-5, of ten million by 4e-4."""

Named = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Largest relative differences that rounding explains."""

    loss: float
    grad_norm: float
    gradient: float
    weight: float
    resumed: float
    """Of losses and weights after a resume: the same arithmetic once more."""

    def on_cpu(self, num_elements: int) -> Bounds:
        """For norms on a CPU, and gradients that are clipped by them, of tensors of up to so many elements."""
        error = NORM_ERROR * num_elements
        return replace(self, grad_norm=max(self.grad_norm, error), gradient=max(self.gradient, error))


BOUNDS = {
    Precision.fp32: Bounds(loss=1e-5, grad_norm=1e-5, gradient=1e-5, weight=1e-5, resumed=1e-5),
    # A bfloat16 number is good to 2**-8 and a float16 one to 2**-11, and layouts differ in what they round: under ZeRO
    # the weights and the gradients too. About ten times what small models show.
    Precision.bf16: Bounds(loss=2e-3, grad_norm=2e-2, gradient=1e-1, weight=5e-2, resumed=1e-4),
    Precision.fp16: Bounds(loss=5e-4, grad_norm=5e-3, gradient=3e-2, weight=1e-2, resumed=1e-4),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One comparison: the largest relative difference and where it is."""

    what: str
    difference: float
    worst: str
    bound: float

    @property
    def passed(self) -> bool:
        """Within the bound. A difference that is not a number is not."""
        return self.difference <= self.bound


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """All comparisons of a layout with one process."""

    layout: str
    """One line for people."""
    rows: tuple[Row, ...]

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
        return "\n".join([f"layout: {self.layout}", *(f"  {line}" for line in table), verdict])


def certify(layout: str, *, ours: Path, resumed: Path, reference: Path, bounds: Bounds) -> Certificate:
    """Compare run folders that hold a checkpoint of every step.

    Args:
        layout: one line for people.
        ours: the run in the layout.
        resumed: its second part once more, from one of its checkpoints.
        reference: the same on one process.
        bounds: what rounding may do.
    """
    last = _last_step(reference)
    resumed_losses = _metric(resumed, "loss")
    repeated = {step: loss for step, loss in _metric(ours, "loss").items() if step in resumed_losses}
    rows = [
        *compare_runs(ours, reference, bounds),
        compare("loss after resuming", resumed_losses, repeated, bounds.resumed),
        compare("weights after resuming", _weights(resumed, last), _weights(ours, last), bounds.resumed),
    ]
    held_out = _metric(reference, "eval_loss")
    if held_out:
        rows.append(compare("held-out loss", _metric(ours, "eval_loss"), held_out, bounds.loss))
    return Certificate(layout=layout, rows=tuple(rows))


def compare_runs(ours: Path, reference: Path, bounds: Bounds) -> tuple[Row, ...]:
    """Compare loss and gradient norm of every step, the gradients of the first, and the weights after the last.

    Gradients are left out where the optimizer keeps none of them, as plain SGD does.
    """
    first, last = step_name(1), _last_step(reference)
    weights = _weights(reference, last)
    if not torch.cuda.is_available():
        bounds = bounds.on_cpu(max((tensor.numel() for tensor in weights.values()), default=0))
    gradients = _gradients(reference, first)
    of_step_1 = [compare("gradients of step 1", _gradients(ours, first), gradients, bounds.gradient)]
    return (
        compare("loss", _metric(ours, "loss"), _metric(reference, "loss"), bounds.loss),
        compare("gradient norm", _metric(ours, "grad_norm"), _metric(reference, "grad_norm"), bounds.grad_norm),
        *(of_step_1 if gradients else ()),
        compare("weights at the end", _weights(ours, last), weights, bounds.weight),
    )


def _last_step(run_dir: Path) -> str:
    return max(path.name for path in (run_dir / CHECKPOINTS).iterdir())


def compare(what: str, ours: Named, reference: Named, bound: float) -> Row:
    """Find the largest relative difference. A name that only one has, or another shape, is an infinite one."""
    unpaired = sorted(
        name
        for name in ours.keys() | reference.keys()
        if name not in ours or name not in reference or ours[name].shape != reference[name].shape
    )
    if unpaired or not reference:
        worst = f"only in one, or of another shape: {shorten(unpaired)}" if unpaired else "there is nothing to compare"
        return Row(what=what, difference=math.inf, worst=worst, bound=bound)
    floor = FLOOR * max(_largest(tensor) for tensor in reference.values())
    differences = {name: _difference(ours[name], tensor, floor) for name, tensor in reference.items()}
    # What is not a number is worse than any number.
    worst = max(differences, key=lambda name: (math.isnan(differences[name]), differences[name]))
    return Row(what=what, difference=differences[worst], worst=worst, bound=bound)


def _difference(ours: torch.Tensor, reference: torch.Tensor, floor: float) -> float:
    divisor = max(_largest(reference), floor)
    return _largest(ours.double() - reference.double()) / divisor if divisor > 0 else math.nan


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.double().abs().max()) if tensor.numel() > 0 else 0.0


def _metric(run_dir: Path, key: str) -> Named:
    lines = [line for line in read_metrics(run_dir / METRICS) if key in line]
    # A value that was not finite is null there.
    return {f"step {line['step']}": torch.tensor(math.nan if line[key] is None else line[key]) for line in lines}


def _weights(run_dir: Path, step: str) -> Named:
    """Weights by name; where an optimizer steps a float32 copy, that one."""
    saved = _saved(run_dir, step, f"{MODEL_STEM}*.safetensors") | _saved(run_dir, step, f"{ADAPTER_STEM}*.safetensors")
    return saved | _optimizer_state(run_dir, step, MASTER)


def _gradients(run_dir: Path, step: str) -> Named:
    """Gradients after clipping, by parameter: an average of them starts from zero, so that after the first step it is
    the gradient times a constant, such as Adam's 1 - beta1. The constant cancels in a relative difference.
    """
    return _optimizer_state(run_dir, step, "exp_avg") | _optimizer_state(run_dir, step, "momentum_buffer")


def _optimizer_state(run_dir: Path, step: str, key: str) -> dict[str, torch.Tensor]:
    saved = _saved(run_dir, step, f"{OPTIMIZER_STEM}-*.safetensors")
    return {name.removesuffix(f"/{key}"): tensor for name, tensor in saved.items() if name.endswith(f"/{key}")}


def _saved(run_dir: Path, step: str, pattern: str) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted((run_dir / CHECKPOINTS / step).glob(pattern)):
        tensors |= load_file(path)
    return tensors
