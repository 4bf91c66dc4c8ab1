"""What no single field can say: ranges, contradictions, and combinations that cannot work."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from enum import Enum
from typing import Any

from hfdist.config.data import SourceKind
from hfdist.config.limits import LIMIT
from hfdist.config.model import Dtype, Init
from hfdist.config.optimizer import Schedule
from hfdist.config.run import RunConfig
from hfdist.config.strategy import Offload, Sharding
from hfdist.config.train import Precision
from hfdist.errors import ConfigError


def check_config(config: RunConfig) -> None:
    """Check ranges and contradictions.

    Raises:
        ConfigError: the first one found.
    """
    _check_limits(config, "")
    for check in (_check_run, _check_model, _check_data, _check_strategy, _check_optimizer, _check_train):
        check(config)


def _check_limits(section: Any, prefix: str) -> None:
    for field in dataclasses.fields(section):
        key, value = f"{prefix}{field.name}", getattr(section, field.name)
        limit = field.metadata.get(LIMIT)
        if limit is not None and value is not None and not limit.accepts(value):
            raise ConfigError("out of range", where=key, found=value, allowed=limit.allowed)
        for path, inner in _sections(key, value):
            _check_limits(inner, f"{path}.")


def _sections(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(value):
        yield key, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            if name == "_target_":
                raise ConfigError("a config cannot name code to run", where=f"{key}.{name}", found=inner)
            yield from _sections(f"{key}.{name}", inner)


def _check_run(config: RunConfig) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", config.run.name):
        raise ConfigError(
            "a run's name is the name of its folder",
            where="run.name",
            found=config.run.name,
            allowed="letters, digits, '.', '_' and '-'",
        )


def _check_model(config: RunConfig) -> None:
    model = config.model
    if model.name is None and model.init is Init.pretrained:
        raise _contradiction(
            "pretrained weights need a place", "model.init", model.init, "model.name=<Hub id or folder>"
        )
    if model.name is None and model.type is None:
        raise _contradiction(
            "no model is named", "model.type", None, "model=small, or model.type=llama, or model.name=<Hub id>"
        )
    if model.name is not None and model.type is not None:
        raise _contradiction(
            "model.name already says the architecture", "model.type", model.type, "model.type=null or model.name=null"
        )
    if model.dtype is Dtype.float16:
        raise _contradiction(
            "float16 weights lose small updates", "model.dtype", model.dtype, "model.dtype=auto train.precision=fp16"
        )
    if model.init is Init.pretrained and model.tokenizer.name is None:
        raise _contradiction(
            "a pretrained model understands only its own tokens",
            "model.tokenizer.name",
            None,
            "model.tokenizer.name=${model.name}",
        )


def _check_data(config: RunConfig) -> None:
    if not config.data.sources:
        raise _contradiction("there is nothing to read", "data.sources", {}, "data=stdlib, or data=files with a path")
    for name, source in config.data.sources.items():
        key = f"data.sources.{name}.path"
        if source.kind is SourceKind.stdlib and source.path is not None:
            raise _contradiction("the standard library needs no path", key, source.path, f"{key}=null")
        if source.kind is not SourceKind.stdlib and source.path is None:
            raise _contradiction("the source needs a path", key, None, f"{key}=<glob, folder or dataset>")
    if config.data.eval_fraction == 0 and config.train.eval_every is not None:
        raise _contradiction(
            "there is no held-out set to evaluate",
            "train.eval_every",
            config.train.eval_every,
            "data.eval_fraction=0.02, or train.eval_every=null",
        )


def _check_strategy(config: RunConfig) -> None:
    strategy = config.strategy
    for axis in ("pipeline", "context", "tensor", "expert"):
        if getattr(strategy, axis) > 1:
            raise ConfigError(
                "this layout is not built yet",
                where=f"strategy.{axis}",
                found=getattr(strategy, axis),
                allowed="1: data parallel, with sharding none, zero1, zero2 or zero3",
            )
    if strategy.data is not None and strategy.data < strategy.min_data:
        raise _contradiction(
            "fewer data ranks than strategy.min_data", "strategy.data", strategy.data, "strategy.min_data=1"
        )
    if strategy.sharding is Sharding.none and strategy.offload is not Offload.none:
        raise _contradiction(
            "only ZeRO can offload the optimizer", "strategy.offload", strategy.offload, "strategy=zero3_offload"
        )
    if strategy.sharding is Sharding.none and strategy.deepspeed:
        raise _contradiction(
            "DeepSpeed is not used without sharding", "strategy.deepspeed", strategy.deepspeed, "strategy=zero1"
        )


def _check_optimizer(config: RunConfig) -> None:
    optimizer = config.optimizer
    if optimizer.warmup_steps and optimizer.warmup_tokens:
        raise _contradiction(
            "the warm-up is given twice",
            "optimizer.warmup_tokens",
            optimizer.warmup_tokens,
            "optimizer.warmup_steps=0 or optimizer.warmup_tokens=null",
        )
    tokens = optimizer.warmup_tokens or 0
    step = config.train.global_batch_size * config.data.sequence_length
    warmup = optimizer.warmup_steps or -(-tokens // step)
    if warmup >= config.train.max_steps:
        raise ConfigError(
            "the warm-up is as long as the run: the learning rate never reaches its peak",
            where="optimizer.warmup_tokens" if tokens else "optimizer.warmup_steps",
            found=f"{warmup} steps",
            allowed=f"less than train.max_steps={config.train.max_steps}",
        )
    has_floor = optimizer.schedule in (Schedule.cosine, Schedule.wsd)
    if optimizer.min_lr_ratio is not None and not has_floor:
        raise _contradiction(
            f"the {optimizer.schedule.value} schedule has no lowest rate",
            "optimizer.min_lr_ratio",
            optimizer.min_lr_ratio,
            "optimizer.min_lr_ratio=null, or optimizer.schedule=cosine",
        )


def _check_train(config: RunConfig) -> None:
    if config.train.micro_batch_size > config.train.global_batch_size:
        raise ConfigError(
            "a micro batch is larger than the global batch",
            where="train.micro_batch_size",
            found=config.train.micro_batch_size,
            allowed=f"<= train.global_batch_size={config.train.global_batch_size}",
        )
    if config.model.dtype is Dtype.bfloat16 and config.train.precision is Precision.fp16:
        raise _contradiction(
            "bfloat16 weights do not go with fp16 arithmetic", "train.precision", "fp16", "train.precision=bf16"
        )


def _contradiction(what: str, where: str, found: object, hint: str) -> ConfigError:
    shown = found.name if isinstance(found, Enum) else "null" if found is None else found
    return ConfigError(what, where=where, found=shown, hint=hint)
