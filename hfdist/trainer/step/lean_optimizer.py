"""accelerate's optimizer without its look, twice a step, for a package on the disk: a twentieth of a small step."""

from __future__ import annotations

from collections.abc import Callable

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, is_lomo_available

_PLAIN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
"""Where accelerate's optimizer has nothing else to do."""


class LeanOptimizer(AcceleratedOptimizer):
    """Steps at once, where neither XLA, nor LOMO, nor a loss scale has to do with it."""

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Step at the end of a global batch."""
        if self.gradient_state.sync_gradients:
            self.optimizer.step(closure)


def prepare_optimizer(accelerator: Accelerator, optimizer: object, device_placement: bool | None = None) -> object:
    """`Accelerator.prepare_optimizer`, with a `LeanOptimizer` where nothing is unusual."""
    prepared = Accelerator.prepare_optimizer(accelerator, optimizer, device_placement)
    is_plain = accelerator.distributed_type in _PLAIN and accelerator.scaler is None and not is_lomo_available()
    if is_plain and prepared is not optimizer and type(prepared) is AcceleratedOptimizer:
        # A schedule wraps a method of it later.
        prepared.__class__ = LeanOptimizer
    return prepared
