"""A DeepSpeed config of somebody's own: its file, and its keys that follow from other keys of hfdist's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from hfdist.config.optimizer import OptimizerName, Schedule
from hfdist.config.paths import expand_user
from hfdist.config.plain_values import flatten
from hfdist.config.run import RunConfig
from hfdist.errors import ConfigError
from hfdist.messages.message import NotAMessageError, read_json

PLACE = "strategy.deepspeed"
AUTO = "auto"
"""Stands in such files for what a trainer derives."""
_MOST_BYTES = 1 << 16

# Two sources of truth would differ one day.
_OWNED = {
    "train_batch_size": "train.global_batch_size",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.global_batch_size and train.micro_batch_size",
    "gradient_clipping": "train.max_grad_norm",
    "zero_optimization.stage": "strategy.sharding",
    "zero_optimization.offload_optimizer.device": "strategy.offload",
    "zero_optimization.cpu_offload": "strategy.offload",
    "bf16.enabled": "train.precision",
    "fp16.enabled": "train.precision",
    "data_types.grad_accum_dtype": "train.precision",
    "optimizer": "optimizer.name",
    "optimizer.params.lr": "optimizer.lr",
    "optimizer.params.betas": "optimizer.beta1 and optimizer.beta2",
    "optimizer.params.eps": "optimizer.eps",
    "optimizer.params.weight_decay": "optimizer.weight_decay",
    "scheduler": "optimizer.schedule",
    "scheduler.params.warmup_max_lr": "optimizer.lr",
    "scheduler.params.warmup_num_steps": "optimizer.warmup_steps",
    "scheduler.params.total_num_steps": "train.max_steps",
}
"""Keys of DeepSpeed's, and the keys of hfdist's that they follow from."""
_KEY = r"(?!(true|false|null)\b)([A-Za-z_]\w*|\d+)(\.([A-Za-z_]\w*|\d+))*"
_ABSENT = "none"
"""What DeepSpeed calls a device that there is none of."""
OPTIMIZER_SECTIONS = ("optimizer", "scheduler")
"""Sections that hfdist has keys of its own for."""
_SCHEDULERS = {Schedule.constant: "WarmupLR", Schedule.linear: "WarmupDecayLR", Schedule.cosine: "WarmupCosineLR"}


def read_deepspeed_file(given: str, where: str) -> dict[str, object]:
    """Read such a file; ConfigError: there is none, or it is no JSON object of a usual size.

    Args:
        given: path of the file.
        where: the key or argument that gave it, for messages.
    """
    allowed = f"a JSON object of at most {_MOST_BYTES} bytes"
    try:
        with expand_user(given).open("rb") as file:
            values = read_json(file.read(_MOST_BYTES + 1), _MOST_BYTES)
    except (OSError, NotAMessageError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        cause = error.__cause__
        if isinstance(cause, json.JSONDecodeError):
            reason = f"no JSON: {cause.msg}, line {cause.lineno}, column {cause.colno}"
        raise ConfigError(f"the file cannot be read: {reason}", where=where, found=given, allowed=allowed) from error
    if not isinstance(values, dict):
        raise ConfigError("the file has no keys", where=where, found=given, allowed=allowed)
    for key, value in flatten(values, ""):
        # What a config could not hold as it is: references to other keys, and what its grammar has quotes for.
        if key and not re.fullmatch(_KEY, key, re.ASCII):
            raise ConfigError("there is no such key", where=where, found=key, allowed="keys of DeepSpeed's config")
        if isinstance(value, str) and (re.search(r"['\\]|\$\{", value) or not value.isprintable()):
            raise ConfigError(
                "this text cannot be taken",
                where=f"{where}: {key}",
                found=value,
                allowed="text without quotes, backslashes and ${",
            )
    return values


def own_keys(values: Mapping[str, object], derived: Mapping[str, object]) -> dict[str, object]:
    """Give the keys that hfdist does not derive; `auto` is left to hfdist.

    Raises:
        ConfigError: a derived key has another value. `check_optimizer_sections` is for those of optimizers.
    """
    values = {key: value for key, value in values.items() if key not in OPTIMIZER_SECTIONS}
    return _without_owned(values, derived, "")


def check_optimizer_sections(values: Mapping[str, object], config: RunConfig | None) -> None:
    """Compare DeepSpeed's optimizer and scheduler with those of a run.

    Args:
        values: the file's.
        config: the run's config; None: its values are not known here, and each derived key is refused.

    Raises:
        ConfigError: a derived key has another value.
    """
    sections = {key: values[key] for key in OPTIMIZER_SECTIONS if key in values}
    _without_owned(sections, {} if config is None else _of_optimizer(config), "")


def _of_optimizer(config: RunConfig) -> dict[str, object]:
    optimizer = config.optimizer
    follows = optimizer.warmup_fraction is not None or optimizer.warmup_tokens is not None
    is_adamw = optimizer.name is OptimizerName.adamw and optimizer.plugin is None
    return {
        "optimizer": {
            "type": "AdamW" if is_adamw else optimizer.plugin or optimizer.name.value,
            "params": {
                "lr": optimizer.lr,
                "betas": [optimizer.beta1, optimizer.beta2],
                "eps": optimizer.eps,
                "weight_decay": optimizer.weight_decay,
                "torch_adam": True,
                "adam_w_mode": True,
            },
        },
        "scheduler": {
            "type": _SCHEDULERS.get(optimizer.schedule, optimizer.schedule.value),
            "params": {
                "warmup_min_lr": 0,
                "warmup_max_lr": optimizer.lr,
                # None: it follows from the length of the run, or from tokens.
                "warmup_num_steps": None if follows else optimizer.warmup_steps,
                "warmup_type": "linear",
                "total_num_steps": config.train.max_steps,
            },
        },
    }


def _without_owned(values: Mapping[str, object], derived: object, prefix: str) -> dict[str, object]:
    """Leave out what hfdist derives, section by section.

    Args:
        values: the values of a section of the file.
        derived: what stands there in hfdist's own config, if anything.
        prefix: the section's path, with a dot at its end; "": the whole file.

    Raises:
        ConfigError: a derived key has another value.
    """
    kept: dict[str, object] = {}
    for key, value in values.items():
        path = f"{prefix}{key}"
        ours = derived.get(key) if isinstance(derived, Mapping) else None
        if isinstance(value, Mapping):
            kept[key] = _without_owned(value, ours, f"{path}.")
        elif value != AUTO:
            owner = _owner(path) or _owner_of_part(path)
            is_no_device = ours is None and key == "device" and value == _ABSENT
            if owner is None:
                kept[key] = value
            elif value != ours and not is_no_device:
                raise ConfigError(
                    "hfdist derives this DeepSpeed key, and the value is another one",
                    where=f"{PLACE}.{path}",
                    found=value,
                    allowed=AUTO if ours is None else f"{AUTO}, {ours}",
                    hint=f"{path.rpartition('.')[2]}: {AUTO}, and set {owner} instead",
                )
    return kept


def _owner(path: str) -> str | None:
    """Give the key of hfdist's for a key of DeepSpeed's, or for the section that it is in."""
    return next((_OWNED[part] for part in _ends(path) if part in _OWNED), None)


def _owner_of_part(path: str) -> str | None:
    """Give the key of hfdist's for the first derived key of a section."""
    return next((own for name, own in _OWNED.items() if name.startswith(f"{path}.")), None)


def _ends(path: str) -> Iterator[str]:
    """Give a path of keys, and then each section that it is in, from the inside out."""
    while path:
        yield path
        path = path.rpartition(".")[0]
