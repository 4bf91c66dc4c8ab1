"""hfdist: distributed training of Hugging Face language models, from one config.

`Trainer` and `DistributedTrainerMixin` are loaded at first use, so that the config system needs no torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hfdist.trainer.trainer import DistributedTrainerMixin, Trainer

__version__ = "0.1.0"
__all__ = ["DistributedTrainerMixin", "Trainer", "__version__"]


def __getattr__(name: str) -> Any:
    if name in ("DistributedTrainerMixin", "Trainer"):
        from hfdist.trainer import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
