"""What small runs of a layout and of one process have left, compared by name.

Of a tensor the difference is  max |ours - reference| / max |reference|  over its elements, where the divisor is at
least a hundredth of the largest element of all tensors of its kind: a gradient that is zero but for rounding (that of a
key's bias, say) is judged on the scale of the model's gradients. A loss is a tensor of one element.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

from hfdist.checkpoint.folder import STEP_NAME, step_name
from hfdist.checkpoint.piece import MASTER
from hfdist.checkpoint.save_plan import ADAPTER_STEM, MODEL_STEM, OPTIMIZER_STEM
from hfdist.records import Event, RunFolder, read_lines
from hfdist.units import list_first
from hfdist.verify.certificate import Bounds, Certificate, Row

FLOOR = 1e-2
"""Least divisor of a difference, as a share of the largest element of all tensors that are compared with it."""

_MOST_ROUNDED = 0.5
"""Share of float32 weights that may be numbers of a 16-bit type: those of norms are ones, until steps are large."""

Named = Mapping[str, torch.Tensor]


def certify(
    layout: str, *, ours: Path, resumed: Path, reference: Path, bounds: Bounds, half: torch.dtype | None = None
) -> Certificate:
    """Compare run folders that hold a checkpoint of every step.

    `ours` is the run in the layout, `resumed` its second part once more from a checkpoint, `reference` the run on one
    process. `half` is the type of the arithmetic where the optimizer must step float32 weights beside it.
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
    if half is not None:
        rows.append(_share_of_rounded(_weights(ours, last), half))
    unlike = [line for run in (ours, resumed, reference) for line in _unlike_steps(run)]
    return Certificate(layout, tuple(rows), unlike=tuple(unlike))


def _share_of_rounded(weights: Named, half: torch.dtype) -> Row:
    """Find how many weights are numbers of a 16-bit type: nearly all, where the optimizer steps no float32 weights.

    This is of one run alone: both could have lost them.
    """
    is_rounded = {name: tensor.float() == tensor.to(half).float() for name, tensor in weights.items()}
    share = sum(int(same.sum()) for same in is_rounded.values()) / max(1, sum(map(torch.numel, weights.values())))
    worst = max(is_rounded, key=lambda name: int(is_rounded[name].sum()), default="there is nothing to compare")
    return Row(f"share of {str(half).removeprefix('torch.')} weights", share, worst, _MOST_ROUNDED)


def _unlike_steps(run_dir: Path) -> list[str]:
    """Say which steps of a run were skipped or done again: what is compared there has not been trained in one go."""
    said = {
        Event.skip.value: "{name}: step {step} was skipped",
        Event.rollback.value: "{name}: the ranks went back from step {step} to step {to_step}",
    }
    lines = [line for line in read_lines(RunFolder(run_dir).events) if line.get("event") in said]
    return [said[line["event"]].format(name=run_dir.name, **line) for line in lines]


def compare_runs(ours: Path, reference: Path, bounds: Bounds) -> tuple[Row, ...]:
    """Compare loss and gradient norm of every step, the gradients of the first, and the weights after the last.

    Gradients are left out where the optimizer keeps none of them, as plain SGD does.
    """
    first, last = step_name(1), _last_step(reference)
    weights, gradients = _weights(reference, last), _gradients(reference, first)
    if not torch.cuda.is_available():
        bounds = bounds.on_cpu(max((tensor.numel() for tensor in weights.values()), default=0))
    of_step_1 = [compare("gradients of step 1", _gradients(ours, first), gradients, bounds.gradient)]
    return (
        compare("loss", _metric(ours, "loss"), _metric(reference, "loss"), bounds.loss),
        compare("gradient norm", _metric(ours, "grad_norm"), _metric(reference, "grad_norm"), bounds.grad_norm),
        *(of_step_1 if gradients else ()),
        compare("weights at the end", _weights(ours, last), weights, bounds.weight),
    )


def _last_step(run_dir: Path) -> str:
    # Without those that are unfinished.
    return max(path.name for path in RunFolder(run_dir).checkpoints.iterdir() if STEP_NAME.fullmatch(path.name))


def compare(what: str, ours: Named, reference: Named, bound: float) -> Row:
    """Find the largest relative difference. A name that only one has, or another shape, is an infinite one."""
    unpaired = sorted(
        name
        for name in ours.keys() | reference.keys()
        if name not in ours or name not in reference or ours[name].shape != reference[name].shape
    )
    if unpaired or not reference:
        names = f"only in one, or of another shape: {list_first(unpaired)}"
        return Row(what, math.inf, names if unpaired else "there is nothing to compare", bound)
    floor = FLOOR * max(_largest(tensor) for tensor in reference.values())
    differences = {name: _difference(ours[name], tensor, floor) for name, tensor in reference.items()}
    # What is not a number is worse than any number.
    worst = max(differences, key=lambda name: (math.isnan(differences[name]), differences[name]))
    return Row(what, differences[worst], worst, bound)


def _difference(ours: torch.Tensor, reference: torch.Tensor, floor: float) -> float:
    divisor = max(_largest(reference), floor)
    return _largest(ours.double() - reference.double()) / divisor if divisor > 0 else math.nan


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.double().abs().max()) if tensor.numel() > 0 else 0.0


def _metric(run_dir: Path, key: str) -> Named:
    lines = [line for line in read_lines(RunFolder(run_dir).metrics) if key in line]
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
    for path in sorted((RunFolder(run_dir).checkpoints / step).glob(pattern)):
        tensors |= load_file(path)
    return tensors
