"""Variables of accelerate that contradict the config."""

from __future__ import annotations

from collections.abc import Mapping

from hfdist.config.run import RunConfig
from hfdist.config.strategy import Sharding
from hfdist.config.train import Compile, Precision
from hfdist.errors import ConfigError

_OTHER_LAYOUTS = {
    "ACCELERATE_USE_FSDP": "strategy=fsdp2",
    "ACCELERATE_USE_MEGATRON_LM": "strategy=pipeline",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "strategy=pipeline",
    "ACCELERATE_USE_SAGEMAKER": None,
}
"""Variables that ask for a layout of accelerate's, and the override of one like it."""


def check_environment(config: RunConfig, environment: Mapping[str, str]) -> None:
    """Refuse variables of accelerate that contradict the config.

    Accelerate would follow them, in full or in part, and say nothing.
    """
    sharding, train = config.strategy.sharding, config.train

    def refuse(name: str, key: str, value: object, instead: str | None = None, *, is_same: bool = True) -> None:
        """Raise a ConfigError; `is_same`: whether the override `instead` makes the config what the variable says."""
        hint = f"unset {name}, or leave it out of the launcher's config file"
        if instead is not None and is_same:
            hint = f"{instead}, or {hint}"
        elif instead is not None:
            hint = f"unset {name}, and give {instead} for that layout; a launcher's config file sets it, too"
        what, found = "a variable of accelerate contradicts the config", f"{environment[name]}, with {key}={value}"
        raise ConfigError(what, where=f"{name} (environment)", found=f"{name}={found}", hint=hint)

    def is_true(name: str) -> bool:
        return environment.get(name, "").lower() in ("1", "true", "yes", "on", "t", "y")

    for name, layout in _OTHER_LAYOUTS.items():
        if is_true(name):
            refuse(name, "strategy.sharding", sharding.value, layout, is_same=False)
    if is_true("ACCELERATE_USE_CPU") and sharding.is_deepspeed:
        # With it, accelerate prepares no DeepSpeed engine.
        refuse("ACCELERATE_USE_CPU", "strategy.sharding", sharding.value)
    if is_true("ACCELERATE_USE_DEEPSPEED") and not sharding.is_deepspeed:
        refuse("ACCELERATE_USE_DEEPSPEED", "strategy.sharding", sharding.value)
    stage = environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE")
    if stage is not None and f"zero{stage}" != sharding.value:
        instead = f"strategy=zero{stage}" if f"zero{stage}" in Sharding.__members__ else None
        refuse("ACCELERATE_DEEPSPEED_ZERO_STAGE", "strategy.sharding", sharding.value, instead)
    if environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none").lower() != "none":
        refuse("ACCELERATE_DEEPSPEED_CONFIG_FILE", "strategy.deepspeed", config.strategy.deepspeed)
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if precision not in ("no", train.precision.value, "bf16" if train.precision.is_bf16 else "no"):
        instead = f"train.precision={precision}" if precision in Precision.__members__ else None
        refuse("ACCELERATE_MIXED_PRECISION", "train.precision", train.precision.value, instead)
    if environment.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no" and train.compile is not Compile.model:
        refuse("ACCELERATE_DYNAMO_BACKEND", "train.compile", train.compile.value, "train.compile=model")
