"""Learning rates by what is trained, for runs that say none (`optimizer.lr=null`, the default of fine-tuning)."""

from __future__ import annotations

from hfdist.config.model import Init
from hfdist.config.optimizer import PRETRAINING_RATE
from hfdist.config.run import RunConfig
from hfdist.config.task import TaskName

_ADAPTER_FACTOR = 10
"""The best rates of LoRA are about ten times those of all weights, in supervised and in reinforcement learning
(Schulman et al., LoRA Without Regret, 2025); QLoRA (Dettmers et al., 2023) took 2e-4."""


def default_learning_rate(config: RunConfig) -> float:
    """Give the peak learning rate of a run that says none."""
    rate = config.task.name.traits.learning_rate
    # Rounded to two digits, as 9.999999e-06 is nobody's rate.
    return float(f"{rate * (_ADAPTER_FACTOR if config.adapter.is_used else 1):.1e}")


def explain_learning_rate(config: RunConfig) -> str:
    """Say where the default rate comes from, or that the rate is one for pretraining; empty: it is neither."""
    has_high_rate = config.optimizer.lr == PRETRAINING_RATE and config.model.init is Init.pretrained
    if has_high_rate and config.task.name is TaskName.causal_lm and not config.adapter.is_used:
        return " (a rate for pretraining; a lower one forgets less of what the model knows: Ibrahim et al., 2024)"
    if config.optimizer.lr != default_learning_rate(config):
        return ""
    factor = f"{_ADAPTER_FACTOR} times that of all weights, the default of" if config.adapter.is_used else "as in"
    return f" ({factor} {config.task.name.traits.peer}'s {config.task.name.traits.trainer})"
