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
    from hfdist.strategies.from_python import make_strategy
    from hfdist.trainer.trainer import DistributedTrainerMixin, Trainer
    from hfdist.watch.callback import Watch

# PEFT imports bitsandbytes where it is installed, which warns on some CPUs that an optional package is missing.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

_HOMES = {
    "DistributedTrainerMixin": "hfdist.trainer.trainer",
    "Generation": "hfdist.rewards.generation",
    "MuonWithAdamW": "hfdist.optim.muon",
    "Trainer": "hfdist.trainer.trainer",
    "Watch": "hfdist.watch.callback",
    "make_strategy": "hfdist.strategies.from_python",
}
"""The module of each public name."""
_OTHERS = {
    "load_rewards": "hfdist.rewards.load_rewards",
    "TrainingArguments": "transformers.TrainingArguments",
    "TrainerMixin": "hfdist.DistributedTrainerMixin",
}
"""Names that are looked for here, and where they are."""
_OF_TRL = ("SFTTrainer", "DPOTrainer", "KTOTrainer", "RewardTrainer", "GRPOTrainer", "RLOOTrainer")
# Type checkers read a list of literals only.
__all__ = [
    "DistributedTrainerMixin", "Generation", "MuonWithAdamW", "Trainer", "Watch", "__version__", "make_strategy",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Load a public name at its first use; AttributeError or ImportError: there is none, and which is meant."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _OF_TRL:
        hint = f"class Mine(hfdist.DistributedTrainerMixin, trl.{name}): ... is one (docs/trl.md)"
        # `from hfdist import SFTTrainer` is what people write, and Python shows no text of an AttributeError there.
        raise ImportError(f"module {__name__!r} has no {name!r}; {hint}")
    # Imported here, as only a mistake needs it.
    from hfdist.errors import nearest

    other = None if name.startswith("_") else _OTHERS.get(name) or nearest(name, _HOMES, "hfdist.{}")
    hint = "" if other is None else f"; did you mean {other}?"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
