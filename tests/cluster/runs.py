"""The run that is trained on several machines, its steps slow enough to be disturbed, and how two runs compare."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.distributed.runs import SMALL, losses, pretrain, weights
from tests.packages import install_package

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "pretrain.py"

# Twelve lanes and sequences: one and two ranks share them evenly. A rounding is not divided by almost zero (eps).
SETTINGS = (*SMALL, "data.lanes=12", "train.global_batch_size=12", "checkpoint=default", "strategy=ddp",
            "strategy.min_data=1", "optimizer.lr=5e-4", "optimizer.eps=1e-6")  # fmt: skip

_PAUSES = """
import os, time
from torch.optim import AdamW
class Pausing(AdamW):
    def step(self, closure=None):
        # Not for the small tensors on which hfdist tries an optimizer.
        if sum(parameter.numel() for group in self.param_groups for parameter in group["params"]) > 10_000:
            is_alone = os.environ.get("WORLD_SIZE", "1") == "1"
            names = ["PAUSE_ALONE_SECONDS", "PAUSE_SECONDS"] if is_alone else ["PAUSE_SECONDS"]
            time.sleep(float(next((os.environ[name] for name in names if name in os.environ), "0")))
        return super().step(closure)
"""


def install_pausing_optimizer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Give the overrides that choose AdamW with a pause of PAUSE_SECONDS before each step: time without CPU time.

    One process alone pauses for PAUSE_ALONE_SECONDS, where that is given.

    Args:
        folder: for the package; it must be in PYTHONPATH of whoever trains.
        monkeypatch: puts it on the path of this process.
    """
    install_package(folder, monkeypatch, "pausing", _PAUSES, "hfdist.optimizers", pausing="Pausing")
    return ("optimizer.plugin=pausing",)


class Difference(NamedTuple):
    """Between two runs of the same steps."""

    losses: float
    """The largest relative one."""
    weights: float
    """The largest of an element, in parts of the largest element of its parameter."""


def train_alone(folder: Path, *overrides: str) -> Path:
    """Train in one process, undisturbed, and give the run folder."""
    return pretrain(folder, 1, *SETTINGS, *overrides)


def compare(run_dir: Path, other: Path) -> Difference:
    """AssertionError: they have other steps or parameters."""
    ours, theirs = losses(run_dir), losses(other)
    assert len(ours) == len(theirs), (len(ours), len(theirs))
    own, others = weights(run_dir), weights(other)
    assert own.keys() == others.keys()
    return Difference(
        max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True)),
        max(float((own[name] - others[name]).abs().max() / others[name].abs().max()) for name in own),
    )
