"""Fits the factors by which real steps take longer than the limits of a device, to steps that were timed.

    step = compute x ideal + memory x ideal + kernels x ideal + link x ideal

where each ideal is what the peak, the bandwidth, the start of operations or the links alone would take in that step, as
far as nothing hides it. The factors are found in logarithms, so that a step of a millisecond counts like one of a
minute, and outliers count less. What the steps do not tell apart stays near its default.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np

from hfdist.config.hardware import Hardware
from hfdist.records.lines import Line, append_line, read_lines

COMPONENTS = ("compute", "memory", "kernels", "link")
_VERSION = 1
"""Version of the way in which ideal seconds are counted: steps that were planned in another way are not comparable."""
_PRIOR = {"compute": 0.5, "memory": 0.7, "kernels": 0.7, "link": 0.7}
"""Standard deviations of the logarithms of the factors about their defaults, where no step says more."""
_NOISE = 0.05
"""Standard deviation of the logarithm of a measured step."""
_OUTLIER = 1.5
"""Residuals of more standard deviations than this count less (Huber)."""
_ROUNDS = 50
"""Most steps of the fit."""
_LEAST_SPREAD = 1.05
"""The least spread: a step repeats within 5 % at best, however well a few timed ones agree."""


@dataclass(frozen=True, kw_only=True)
class Factors:
    """Factors by which the ideal seconds of each component are multiplied."""

    compute: float
    memory: float
    kernels: float
    link: float
    spread: float
    """Range of a step: from its seconds divided by this, to its seconds multiplied by this."""
    num_steps: int = 0
    """Number of timed steps from which these factors come; 0: none, they are defaults."""

    def times(self, name: str, factor: float) -> Factors:
        """Give a copy in which the factor of the component `name` is `factor` times as large."""
        return replace(self, **{name: factor * getattr(self, name)})

    def apply(self, ideal: Mapping[str, float]) -> float:
        """Give the seconds of a step from its ideal seconds by component."""
        return sum(getattr(self, name) * ideal.get(name, 0.0) for name in COMPONENTS)


# Not measured by hfdist. Streaming kernels reach about 75 % of a data sheet's bandwidth, and NCCL about 80 % of a
# link's; the share of the peak is the device's own. Five published runs lie within 21 %.
_OF_GPUS = Factors(compute=1.0, memory=1.35, kernels=1.0, link=1.25, spread=1.4)
# Speeds of a CPU are measured on it, and so are near what steps reach.
_OF_CPUS = Factors(compute=1.15, memory=1.0, kernels=1.0, link=1.0, spread=1.4)


def default_factors(hardware: Hardware) -> Factors:
    """Give the factors of a machine on which no step was timed."""
    return _OF_CPUS if hardware.is_cpu else replace(_OF_GPUS, compute=1 / hardware.reached)


@dataclass(frozen=True, kw_only=True)
class TimedStep:
    """One line of the file of past steps: the planned parts of a step, and its measured time."""

    hardware: str
    layout: str
    ideal: dict[str, float]
    """Seconds by component, without factors: `StepParts.ideal`."""
    step_seconds: float
    """The median step of the run."""
    cpu_seconds: float | None = None
    """CPU seconds of one rank, over all its threads."""
    version: int = _VERSION


def write_step(step: TimedStep, path: Path) -> None:
    """Add a line to a file; ranks of several runs may do so at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    append_line(path, asdict(step))


def read_steps(path: Path, hardware: str) -> list[TimedStep]:
    """Give the steps of one hardware, the oldest first. Lines of other versions, or damaged ones, are left out."""
    steps = [step for line in read_lines(path) if (step := _parse(line)) is not None]
    return [step for step in steps if step.hardware == hardware]


def _parse(values: Line) -> TimedStep | None:
    """Read one line; None: it is damaged, or of another version."""
    # Lines of the first version have no number, and the field has a default.
    if values.get("version") != _VERSION:
        return None
    try:
        known = {field.name: values[field.name] for field in fields(TimedStep) if field.name in values}
        step = TimedStep(**known)
        ideal = sum(step.ideal.get(name, 0.0) for name in COMPONENTS)
        is_right = 0 < step.step_seconds < math.inf and 0 < ideal < math.inf
    except (TypeError, AttributeError):
        return None
    return step if is_right else None


def calibrate(steps: Iterable[TimedStep], hardware: Hardware) -> Factors:
    """Fit factors to steps that were timed on this hardware; none: the defaults.

    Least squares of logarithms about the defaults, by Gauss-Newton steps with Huber's weights.
    """
    start, timed = default_factors(hardware), list(steps)
    if not timed:
        return start
    ideal = np.array([[step.ideal.get(name, 0.0) for name in COMPONENTS] for step in timed])
    measured = np.log([step.step_seconds for step in timed])
    default = np.log([getattr(start, name) for name in COMPONENTS])
    prior = np.array([_PRIOR[name] for name in COMPONENTS])
    logs = default.copy()
    for _ in range(_ROUNDS):
        seconds = ideal * np.exp(logs)
        totals = seconds.sum(1)
        residuals = (measured - np.log(totals)) / _NOISE
        weights = np.sqrt(np.minimum(1.0, _OUTLIER / np.maximum(np.abs(residuals), 1e-9)))
        slopes = seconds / totals[:, None] / _NOISE
        rows = np.vstack([slopes * weights[:, None], np.diag(1 / prior)])
        wanted = np.concatenate([residuals * weights, (default - logs) / prior])
        change = np.linalg.lstsq(rows, wanted, rcond=None)[0]
        logs = logs + np.clip(change, -1.0, 1.0)
        if np.abs(change).max() < 1e-6:
            break
    errors = measured - np.log((ideal * np.exp(logs)).sum(1))
    return Factors(
        **dict(zip(COMPONENTS, np.exp(logs).tolist(), strict=True)),
        spread=_spread(errors.tolist(), start.spread),
        num_steps=len(timed),
    )


def _spread(errors: Sequence[float], default: float) -> float:
    """Give the spread of a step: two standard deviations of the errors (logarithms).

    Few steps say little about it, so the default adds to the mean square: as much as one error in so many steps.
    """
    # The default is two standard deviations, too.
    of_default = (math.log(default) / 2) ** 2 / len(errors)
    squares = [*(error**2 for error in errors), of_default]
    deviation = math.sqrt(sum(squares) / len(squares))
    return max(_LEAST_SPREAD, math.exp(2 * deviation))
