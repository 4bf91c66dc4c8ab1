"""Checks `strategy.*`, and what a layout asks of a training."""

from __future__ import annotations

from collections.abc import Mapping

from hfdist.config.checks.conflict import conflict, shown
from hfdist.config.run import RunConfig
from hfdist.config.strategy import Compression, ContextMethod, Offload, Schedule, Sharding, StrategyConfig
from hfdist.config.train import Compile, Precision, TrainConfig
from hfdist.topology import PARTS


def check_layout(strategy: StrategyConfig, train: TrainConfig) -> None:
    """Check the degrees, what is sharded, and the pipeline; ConfigError: the first contradiction that is found."""
    config = RunConfig(strategy=strategy, train=train)
    if strategy.data is not None and strategy.data < strategy.min_data:
        what, hint = "there are fewer data ranks than strategy.min_data", f"strategy.min_data={strategy.data}"
        raise conflict(config, "strategy.data strategy.min_data", what, hint=hint)
    _check_sharding(config)
    _check_context(config)
    if strategy.compression is not Compression.none:
        _check_compression(config)
    for axis, what in PARTS.items():
        if getattr(strategy, axis) > 1:
            _check_shared(config, axis, what)
    if strategy.sequence:
        _check_sequence(config)
    _check_pipeline(config)


def _check_sequence(config: RunConfig) -> None:
    """Check what does not go with tensor ranks that share tokens."""
    strategy, keep = config.strategy, "strategy.sequence=false"
    if strategy.tensor == 1:
        what, hint = "tensor ranks share the tokens, and there are none", f"strategy.tensor=2, or {keep}"
        raise conflict(config, "strategy.sequence strategy.tensor", what, allowed="false", hint=hint)
    for axis in ("context", "expert"):
        if getattr(strategy, axis) > 1:
            what = f"tensor ranks share no tokens beside {axis} ranks in this version"
            hint = f"strategy.{axis}=1, or {keep}"
            raise conflict(config, f"strategy.{axis} strategy.sequence", what, allowed="1", hint=hint)
    if config.train.compile is Compile.blocks:
        what = "blocks whose tokens ranks share are not compiled in this version"
        hint = f"train.compile=none, or {keep}"
        raise conflict(config, "train.compile strategy.sequence", what, allowed="auto, none", hint=hint)


def _check_sharding(config: RunConfig) -> None:
    """Check what goes with what is sharded, and with what shards it."""
    strategy = config.strategy
    if strategy.sharding is Sharding.none and strategy.offload is not Offload.none:
        what = "ZeRO and FSDP2 do the offloading, and this layout has none of them"
        hint = "strategy=zero3_offload, or strategy.offload=none"
        raise conflict(config, "strategy.offload strategy.sharding", what, allowed="none", hint=hint)
    is_offloaded_fsdp = strategy.sharding is Sharding.fsdp2 and strategy.offload is Offload.cpu
    if is_offloaded_fsdp and config.train.precision is Precision.fp16:
        what = "the loss scale lies on the device, and offloaded gradients do not"
        hint = "train.precision=bf16, or strategy=zero3_offload"
        raise conflict(config, "train.precision strategy.offload", what, allowed="fp32, bf16", hint=hint)
    if strategy.deepspeed and not strategy.sharding.is_deepspeed:
        what = "these keys are DeepSpeed's, and without ZeRO DeepSpeed is not used"
        section = strategy.deepspeed.get("zero_optimization")
        stage = section.get("stage") if isinstance(section, Mapping) else None
        hint = f"strategy=zero{stage if stage in (1, 2, 3) else 1}, or leave strategy.deepspeed empty"
        raise conflict(config, "strategy.deepspeed", what, hint=hint)
    for key, default in (("replicate", 1), ("reshard", None), ("prefetch", 0)):
        if getattr(strategy, key) != default and strategy.sharding is not Sharding.fsdp2:
            what, keys = "this key belongs to FSDP2", f"strategy.{key} strategy.sharding"
            allowed = "null" if default is None else str(default)
            raise conflict(config, keys, what, allowed=allowed, hint="strategy=fsdp2")
    if strategy.sharding in (Sharding.zero2, Sharding.zero3) and strategy.pipeline > 1:
        what = (
            f"{strategy.sharding.value} and a pipeline exclude each other: ZeRO-2 and 3 shard the gradients after each "
            "micro batch, a pipeline needs those of all micro batches until it is flushed"
        )
        keys, hint = "strategy.sharding strategy.pipeline", "strategy.sharding=zero1, or strategy.sharding=fsdp2"
        raise conflict(config, keys, what, allowed="none, zero1, fsdp2", hint=hint)


def _check_context(config: RunConfig) -> None:
    """Check ranks that share a sequence."""
    strategy = config.strategy
    if strategy.context > 1 and strategy.sharding.is_deepspeed and strategy.pipeline == 1:
        what = "ZeRO counts each process as a data rank, and ranks that share sequences are one"
        hint = "strategy.sharding=fsdp2, or strategy.context=1"
        raise conflict(config, "strategy.context strategy.sharding", what, allowed="1", hint=hint)
    if strategy.context_method is not ContextMethod.auto and strategy.context == 1:
        what, keys = "no ranks share a sequence", "strategy.context_method strategy.context"
        hint = "strategy.context=2, or strategy.context_method=auto"
        raise conflict(config, keys, what, allowed="auto", hint=hint)


def _check_pipeline(config: RunConfig) -> None:
    """Check the keys of a pipeline, and what it excludes."""
    strategy = config.strategy
    for key in ("strategy.stages_per_rank", "strategy.blocks_per_stage"):
        if strategy.pipeline == 1 and shown(config, key) != "null":
            what, hint = "this key belongs to a pipeline, and there is none", f"strategy.pipeline=2, or {key}=null"
            raise conflict(config, f"{key} strategy.pipeline", what, hint=hint)
        if strategy.schedule is Schedule.auto and shown(config, key) != "null":
            schedule = "1f1b" if (strategy.stages_per_rank or 1) == 1 else "interleaved_1f1b"
            what, hint = "auto chooses the stages with the schedule", f"{key}=null, or strategy.schedule={schedule}"
            raise conflict(config, f"{key} strategy.schedule", what, allowed="null", hint=hint)
    for key, allowed in (("reshard", "null, false"), ("prefetch", "0")):
        if strategy.pipeline > 1 and getattr(strategy, key):
            what = "a pipeline gathers what its stages need at the start of a step, and keeps it to the end"
            keys, hint = f"strategy.{key} strategy.pipeline", f"strategy.{key}={allowed.partition(',')[0]}"
            raise conflict(config, keys, what, allowed=allowed, hint=hint)
    if strategy.pipeline > 1 and strategy.offload is not Offload.none:
        what = "a pipeline cannot offload its optimizer state"
        keys, hint = "strategy.offload strategy.pipeline", "strategy.offload=none"
        raise conflict(config, keys, what, allowed="none", hint=hint)
    if strategy.pipeline > 1 and config.train.compile is Compile.model:
        what = "a pipeline runs the model from block to block, so it cannot be compiled as a whole"
        keys, hint = "train.compile strategy.pipeline", "train.compile=blocks"
        raise conflict(config, keys, what, allowed="none, blocks", hint=hint)


def _check_compression(config: RunConfig) -> None:
    """Check that gradients are only compressed in DDP, which other layouts do without."""
    strategy, what = config.strategy, "DDP compresses gradients, and this layout reduces them by itself"
    if strategy.sharding is not Sharding.none:
        keys, hint = "strategy.compression strategy.sharding", "strategy=ddp, or strategy.compression=none"
        raise conflict(config, keys, what, allowed="none", hint=hint)
    for axis in ("pipeline", *PARTS):
        if getattr(strategy, axis) > 1:
            hint = f"strategy.{axis}=1, or strategy.compression=none"
            raise conflict(config, f"strategy.compression strategy.{axis}", what, allowed="1", hint=hint)


def _check_shared(config: RunConfig, axis: str, shared: str) -> None:
    """Check what does not go with ranks of TENSOR or EXPERT, which share `shared`."""
    strategy, key = config.strategy, f"strategy.{axis}"
    if strategy.sharding.is_deepspeed:
        what = f"ZeRO knows nothing of {shared} that are sharded over {axis} ranks"
        keys, hint = f"strategy.sharding {key}", "strategy.sharding=fsdp2, which shards what each rank has"
        raise conflict(config, keys, what, allowed="none, fsdp2", hint=hint)
    if axis == "expert" and config.train.compile is Compile.blocks:
        what = "blocks whose experts ranks share are not compiled in this version"
        keys, hint = f"train.compile {key}", "train.compile=none"
        raise conflict(config, keys, what, allowed="auto, none", hint=hint)
    if config.train.compile is Compile.model:
        what = f"a model of which {axis} ranks have parts is not compiled as a whole"
        allowed = "auto, none, blocks" if axis == "tensor" else "auto, none"
        keys, hint = f"train.compile {key}", f"train.compile={'blocks' if axis == 'tensor' else 'auto'}"
        raise conflict(config, keys, what, allowed=allowed, hint=hint)
