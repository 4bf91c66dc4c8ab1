"""Checks `train.*`: precision, and what is computed again or compiled."""

from __future__ import annotations

from hfdist.config.checks.conflict import conflict
from hfdist.config.model import Attention, Dtype
from hfdist.config.run import RunConfig
from hfdist.config.strategy import ContextMethod, Sharding
from hfdist.config.train import Compile, Precision, Recompute
from hfdist.errors import ConfigError
from hfdist.topology import PARTS


def check_train(config: RunConfig) -> None:
    """Raise a ConfigError on what does not go together in `train`, or with the model and the layout."""
    _check_precision(config)
    _check_documents(config)
    _check_float8(config)
    _check_length(config)


def _check_length(config: RunConfig) -> None:
    train = config.train
    if train.max_steps is None and train.epochs is None:
        what, allowed = "nothing ends the run", "a number of steps, of passes over the data, or both"
        where = "train.max_steps, train.epochs"
        raise ConfigError(what, where=where, found="both null", allowed=allowed, hint="train.epochs=1")
    if train.micro_batch_size > train.global_batch_size:
        what = "a micro batch is larger than the global batch that it is a part of"
        allowed = f"<= {train.global_batch_size} (train.global_batch_size)"
        hint = f"train.micro_batch_size={train.global_batch_size}"
        raise conflict(config, "train.micro_batch_size", what, allowed=allowed, hint=hint)
    if train.recompute is not Recompute.all and not train.gradient_checkpointing:
        what = "nothing is computed again without gradient checkpointing"
        hint = "train.gradient_checkpointing=true, or train.recompute=all"
        raise conflict(config, "train.recompute train.gradient_checkpointing", what, allowed="all", hint=hint)
    if train.recompute is Recompute.cheap and config.strategy.sharding is Sharding.zero3:
        what = "ZeRO-3 gathers and frees parameters inside of a block, whose operations then differ the second time"
        hint = "train.recompute=all, or strategy=fsdp2"
        raise conflict(config, "train.recompute strategy.sharding", what, allowed="all", hint=hint)
    if train.activation_offload and not train.gradient_checkpointing:
        what = "what is offloaded are the inputs of blocks, which gradient checkpointing keeps"
        keys, hint = "train.activation_offload train.gradient_checkpointing", "train.gradient_checkpointing=true"
        raise conflict(config, keys, what, allowed="false", hint=hint)


def _check_precision(config: RunConfig) -> None:
    keys = "model.dtype train.precision"
    if config.model.dtype is Dtype.float16:
        what = "float16 parameters cannot be trained: small updates vanish and gradients underflow"
        hint = "model.dtype=float32 train.precision=fp16 (float16 arithmetic over float32 parameters)"
        raise conflict(config, keys, what, allowed="auto, float32, bfloat16", hint=hint)
    if config.model.dtype is Dtype.bfloat16 and config.train.precision is Precision.fp16:
        what = "fp16 arithmetic needs float32 parameters: it scales their gradients"
        hint = "train.precision=bf16, or model.dtype=float32"
        raise conflict(config, keys, what, allowed="auto, float32", hint=hint)
    # Transformers keeps packed documents apart under FlashAttention only in a batch of one sequence.
    for name in ("micro_batch_size", "eval_micro_batch_size"):
        if config.model.attention is Attention.flash_attention_2 and (getattr(config.train, name) or 1) > 1:
            what = "with FlashAttention, packed documents of a batch of several sequences would see each other"
            allowed, hint = "1 (use longer sequences instead)", f"train.{name}=1, or model.attention=sdpa"
            raise conflict(config, f"train.{name} model.attention", what, allowed=allowed, hint=hint)


def _check_documents(config: RunConfig) -> None:
    """Check what needs a mask, where packed documents are to have none."""
    if config.model.attention is not Attention.varlen:
        return
    if config.train.compile is Compile.model:
        what = "what compiles the whole model compiles masks, too"
        hint = "train.compile=blocks, or model.attention=auto"
        raise conflict(config, "train.compile model.attention", what, allowed="auto, none, blocks", hint=hint)
    if config.strategy.context_method is ContextMethod.gather:
        what = "ranks that gather keys and values have some rows of the mask"
        hint = "strategy.context_method=ulysses, or model.attention=auto"
        raise conflict(config, "strategy.context_method model.attention", what, allowed="auto, ulysses", hint=hint)


def _check_float8(config: RunConfig) -> None:
    """Check what has not been tried in float8."""
    train, strategy = config.train, config.strategy
    if train.precision is not Precision.fp8:
        return
    allowed = "fp32, bf16, fp16"
    if strategy.sharding.is_deepspeed:
        what = "float8 does not go with ZeRO in this version"
        keys, hint = "train.precision strategy.sharding", "strategy=fsdp2, or train.precision=bf16"
        raise conflict(config, keys, what, allowed=allowed, hint=hint)
    for axis in PARTS:
        if getattr(strategy, axis) > 1:
            what = f"{axis} ranks compute no layers in float8 in this version"
            keys = f"train.precision strategy.{axis}"
            raise conflict(config, keys, what, allowed=allowed, hint=f"strategy.{axis}=1, or train.precision=bf16")
    if config.adapter.is_used:
        what = "layers with an adapter are not computed in float8 in this version"
        keys = f"train.precision adapter.{'type' if config.adapter.path is None else 'path'}"
        raise conflict(config, keys, what, allowed=allowed, hint="train.precision=bf16")
