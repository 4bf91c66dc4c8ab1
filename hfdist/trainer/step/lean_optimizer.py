"""accelerate's optimizer without its look, twice a step, for a package on the disk: a twentieth of a small step."""

from __future__ import annotations

from collections.abc import Callable

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, is_lomo_available

_PLAIN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
"""Kinds of distribution for which accelerate's optimizer does nothing but step."""


class LeanOptimizer(AcceleratedOptimizer):
    """An optimizer of accelerate's for trainings without XLA, LOMO and a loss scale: it steps at once."""

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Step at the end of a global batch."""
        if self.gradient_state.sync_gradients:
            self.optimizer.step(closure)


def prepare_optimizer(accelerator: Accelerator, optimizer: object, device_placement: bool | None = None) -> object:
    """Prepare an optimizer as accelerate does; where that would only step, give a `LeanOptimizer`."""
    prepared = Accelerator.prepare_optimizer(accelerator, optimizer, device_placement)
    is_plain = accelerator.distributed_type in _PLAIN and accelerator.scaler is None and not is_lomo_available()
    if is_plain and prepared is not optimizer and type(prepared) is AcceleratedOptimizer:
        # The class of the object is changed: accelerate keeps the object itself, and a schedule wraps its `step` later.
        prepared.__class__ = LeanOptimizer
    return prepared
