"""The comparison of run folders: what a layout and one process have left, tensor by tensor.

The difference of two tensors is  max |ours - reference| / max |reference|  over their elements. The divisor is at least
a hundredth of the largest element of all tensors of the kind: so a gradient that is zero but for rounding (of a key's
bias, say) is judged on the scale of the model's gradients. A loss is a tensor of one element.
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
"""Share of float32 weights that may be numbers of a 16-bit type: weights of norms are ones until steps are large."""

Named = Mapping[str, torch.Tensor]
"""Tensors by name."""


def certify(
    layout: str, *, ours: Path, resumed: Path, reference: Path, bounds: Bounds, half: torch.dtype | None = None
) -> Certificate:
    """Compare run folders that hold a checkpoint of every step.

    Args:
        layout: the layout in words, one line.
        ours: folder of the run in the layout.
        resumed: folder of that run's second part, trained once more from a checkpoint.
        reference: folder of the run on one process.
        bounds: the largest differences that pass.
        half: the 16-bit type of the arithmetic, where the optimizer must step float32 weights; None: there is none.
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
    """Find the share of weights that are numbers of a 16-bit type: near 1 where the optimizer steps no float32 weights.

    This looks at one run alone: a comparison shows nothing where both runs have lost their float32 weights.
    """
    num_rounded = {name: int((weight.float() == weight.to(half).float()).sum()) for name, weight in weights.items()}
    num_weights = sum(weight.numel() for weight in weights.values())
    share = sum(num_rounded.values()) / max(1, num_weights)
    worst = max(num_rounded, key=lambda name: num_rounded[name], default="there is nothing to compare")
    return Row(f"share of {str(half).removeprefix('torch.')} weights", share, worst, _MOST_ROUNDED)


def _unlike_steps(run_dir: Path) -> list[str]:
    """Say which steps of a run were skipped or done again: there the run has not trained as the others have."""
    texts = {
        Event.skip.value: "{name}: step {step} was skipped",
        Event.rollback.value: "{name}: the ranks went back from step {step} to step {to_step}",
    }
    lines = [line for line in read_lines(RunFolder(run_dir).events) if line.get("event") in texts]
    return [texts[line["event"]].format(name=run_dir.name, **line) for line in lines]


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
    """Name the last checkpoint; folders of unfinished ones have other names."""
    return max(path.name for path in RunFolder(run_dir).checkpoints.iterdir() if STEP_NAME.fullmatch(path.name))


def compare(what: str, ours: Named, reference: Named, bound: float) -> Row:
    """Find the largest relative difference of the tensors of two runs.

    Args:
        what: name of the quantity.
        ours: tensors of the run in the layout.
        reference: tensors of the run on one process.
        bound: the largest difference that passes.

    Returns:
        The comparison. The difference is infinite if a tensor is in one run alone or has another shape, or if there are
        none; it is not a number if an element is none.
    """
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
    """Read a metric of each step from the record of the run."""
    lines = [line for line in read_lines(RunFolder(run_dir).metrics) if key in line]
    # JSON has null for a value that was not finite.
    return {f"step {line['step']}": torch.tensor(math.nan if line[key] is None else line[key]) for line in lines}


def _weights(run_dir: Path, step: str) -> Named:
    """Read weights by name: the float32 copy of a weight where the optimizer steps one."""
    saved = _saved(run_dir, step, f"{MODEL_STEM}*.safetensors") | _saved(run_dir, step, f"{ADAPTER_STEM}*.safetensors")
    return saved | _optimizer_state(run_dir, step, MASTER)


def _gradients(run_dir: Path, step: str) -> Named:
    """Read gradients after clipping, each times one constant, by parameter, from the checkpoint of the first step.

    The optimizer's average of gradients starts from zero. So after one step it is the gradient times a constant, such
    as Adam's 1 - beta1, and the constant cancels in a relative difference.
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
