"""Variables of accelerate that contradict the config: accelerate would follow them without a word, or half."""

from __future__ import annotations

from collections.abc import Mapping

from hfdist.config.run import RunConfig
from hfdist.config.strategy import Sharding
from hfdist.config.train import Compile, Precision
from hfdist.errors import ConfigError

_TRUE = ("1", "true", "yes", "on", "t", "y")
_OTHER_LAYOUTS = {
    "ACCELERATE_USE_FSDP": "strategy=zero3",
    "ACCELERATE_USE_MEGATRON_LM": "strategy=pipeline",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "strategy=pipeline",
    "ACCELERATE_USE_SAGEMAKER": None,
}


def check_environment(config: RunConfig, environment: Mapping[str, str]) -> None:
    """Check what `accelerate launch` or a shell has set against the config. Its defaults contradict nothing.

    Raises:
        ConfigError: names the first variable that does.
    """
    sharding, train = config.strategy.sharding, config.train

    def refuse(name: str, key: str, value: object, hint: str | None) -> None:
        unset = f"unset {name}, or leave it out of the launcher's config file"
        raise ConfigError(
            "a variable of accelerate contradicts the config",
            where=f"{name} (environment)",
            found=f"{name}={environment[name]}, with {key}={value}",
            hint=unset if hint is None else f"{hint}, or {unset}",
        )

    def is_true(name: str) -> bool:
        return environment.get(name, "").lower() in _TRUE

    for name, hint in _OTHER_LAYOUTS.items():
        if is_true(name):
            refuse(name, "strategy.sharding", sharding.value, hint)
    if is_true("ACCELERATE_USE_CPU") and sharding is not Sharding.none:
        # With it, accelerate prepares no DeepSpeed engine.
        refuse("ACCELERATE_USE_CPU", "strategy.sharding", sharding.value, None)
    if is_true("ACCELERATE_USE_DEEPSPEED") and sharding is Sharding.none:
        refuse("ACCELERATE_USE_DEEPSPEED", "strategy.sharding", "none", None)
    stage = environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE")
    if stage is not None and f"zero{stage}" != sharding.value:
        hint = f"strategy=zero{stage}" if f"zero{stage}" in Sharding.__members__ else None
        refuse("ACCELERATE_DEEPSPEED_ZERO_STAGE", "strategy.sharding", sharding.value, hint)
    if environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none").lower() != "none":
        refuse("ACCELERATE_DEEPSPEED_CONFIG_FILE", "strategy.deepspeed", config.strategy.deepspeed, None)
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if precision not in ("no", train.precision.value):
        hint = f"train.precision={precision}" if precision in Precision.__members__ else None
        refuse("ACCELERATE_MIXED_PRECISION", "train.precision", train.precision.value, hint)
    if environment.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no" and train.compile is not Compile.model:
        refuse("ACCELERATE_DYNAMO_BACKEND", "train.compile", train.compile.value, "train.compile=model")
