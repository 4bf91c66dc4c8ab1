"""hfdist: distributed training of Hugging Face language models, from one config.

What is listed here is loaded at first use, since the config system needs no torch.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from hfdist.version import __version__

if TYPE_CHECKING:
    from hfdist.optim.muon import MuonWithAdamW
    from hfdist.rewards.generation import Generation
    from hfdist.strategies.select import make_strategy
    from hfdist.trainer.trainer import DistributedTrainerMixin, Trainer
    from hfdist.watch.callback import Watch

# PEFT imports it wherever it is installed, and on some CPUs it says that an optional package is missing.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

_HOMES = {
    "DistributedTrainerMixin": "hfdist.trainer.trainer",
    "Generation": "hfdist.rewards.generation",
    "MuonWithAdamW": "hfdist.optim.muon",
    "Trainer": "hfdist.trainer.trainer",
    "Watch": "hfdist.watch.callback",
    "make_strategy": "hfdist.strategies.select",
}
__all__ = [
    "DistributedTrainerMixin", "Generation", "MuonWithAdamW", "Trainer", "Watch", "__version__", "make_strategy",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    # Here: most programs make no mistake.
    from hfdist.errors import nearest

    others = {
        "load_rewards": "hfdist.rewards.load_rewards",
        "TrainingArguments": "transformers.TrainingArguments",
        "TrainerMixin": "hfdist.DistributedTrainerMixin",
    }
    other = others.get(name) or nearest(name, _HOMES, "hfdist.{}")
    hint = "" if other is None or name.startswith("_") else f"; did you mean {other}?"
    if name in ("SFTTrainer", "DPOTrainer", "KTOTrainer", "RewardTrainer", "GRPOTrainer", "RLOOTrainer"):
        hint = f"; class Mine(hfdist.DistributedTrainerMixin, trl.{name}): ... is one (docs/trl.md)"
        # An import would swallow the words of an AttributeError.
        raise ImportError(f"module {__name__!r} has no {name!r}{hint}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
