"""Checks single values of a composed config, and values that must fit together, before anything is built."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import shutil
from functools import reduce
from pathlib import Path

from hfdist.config.batch import num_warmup_steps
from hfdist.config.checks.budgets import find_limits
from hfdist.config.checks.data import check_data, check_source
from hfdist.config.checks.deepspeed import check_optimizer_sections
from hfdist.config.checks.task import check_task
from hfdist.config.data import SourceKind
from hfdist.config.islands import IslandMethod, IslandsConfig
from hfdist.config.model import ALL_LINEAR, AdapterConfig, Attention, Dtype, Init
from hfdist.config.optimizer import Schedule
from hfdist.config.run import Export, RunConfig
from hfdist.config.schema import OFF, plain, values_by_key
from hfdist.config.strategy import Compression, ContextMethod, Offload, Sharding, StrategyConfig
from hfdist.config.train import Compile, Precision, Recompute, TrainConfig
from hfdist.errors import ConfigError, nearest
from hfdist.topology import PARTS


def check_config(config: RunConfig) -> None:
    """Check ranges, then contradictions; ConfigError: the first that is found."""
    _check_ranges(config)
    _check_run(config)
    _check_model(config)
    _check_adapter(config)
    check_data(config.data)
    check_task(config)
    check_layout(config.strategy, config.train)
    check_optimizer_sections(config.strategy.deepspeed, config)
    _check_optimizer(config)
    _check_tokens(config)
    _check_precision(config)
    _check_float8(config)
    _check_train(config)
    _check_held_out(config)
    _check_evaluation(config)
    _check_lm_eval(config)
    _check_sample(config)
    _check_alert_command(config)
    _check_checkpoints(config)
    _check_budgets(config)
    _check_islands(config)


def _conflict(
    config: RunConfig, keys: str, what: str, *, allowed: str | None = None, hint: str | None = None
) -> ConfigError:
    """Give an error about the first of `keys`; the values of the other keys are the reason."""
    key, *others = keys.split()
    found = _shown(config, key)
    if others:
        found += ", with " + " and ".join(f"{other}={_shown(config, other)}" for other in others)
    return ConfigError(what, where=key, found=found, allowed=allowed, hint=hint)


def _shown(config: RunConfig, key: str) -> str:
    """Give a value as it is written in an override."""
    value = plain(reduce(getattr, key.split("."), config))
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, (list, dict)):
        return f"[{', '.join(map(str, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _check_ranges(config: RunConfig) -> None:
    for key, value in values_by_key(config, ""):
        if key.limit is not None and value is not None and not key.limit.accepts(value):
            what = "the number is out of range" if "number" in key.allowed else "the value is of another kind"
            raise ConfigError(what, where=key.name, found=value, allowed=key.allowed)


def _check_run(config: RunConfig) -> None:
    if not re.fullmatch(r"\w[\w.=,+-]{0,127}", config.run.name):
        allowed = "up to 128 letters, digits and _ . = , + -; the first a letter, digit or _"
        # Of a path, such as runs/first, the last part is meant.
        last = config.run.name.rstrip("/").rpartition("/")[2]
        plain_name = re.sub(r"[^\w.=,+-]+", "-", last).strip(".=,+-")[:128] or "first"
        what = "the run's name must be a plain folder name"
        hint = f"run.name={plain_name}; the folder, which may be anywhere, is run.dir"
        raise _conflict(config, "run.name", what, allowed=allowed, hint=hint)
    if not config.run.dir.strip() or "\0" in config.run.dir:
        raise _conflict(config, "run.dir", "not a folder", allowed="a path", hint="run.dir=runs/first")
    push_to = config.export.push_to
    if push_to is not None and not re.fullmatch(r"[\w.-]{1,96}/[\w.-]{1,96}", push_to):
        allowed = "OWNER/NAME: letters, digits, - _ ."
        raise _conflict(config, "export.push_to", "this is no repository of the Hub", allowed=allowed)


def _check_model(config: RunConfig) -> None:
    model, both = config.model, "model.name, model.type"
    if model.name is None and model.type is None:
        allowed = "a Hub id or folder in model.name, or an architecture in model.type"
        hint = "model=HuggingFaceTB/SmolLM2-135M, model=FOLDER, or model=small, which begins with random weights"
        raise ConfigError("no model is named", where=both, found="both null", allowed=allowed, hint=hint)
    if model.name is not None and model.type is not None:
        what = "two models are named: the architecture of a model.name is known, so it takes no model.type"
        is_path = "/" in model.name or os.path.exists(model.name) or model.name.endswith(".gguf")
        hint = f"model=hub model.name={model.name}" if is_path else f"model={model.name} model.name=null"
        hint = f"{hint}, or model.name=null for a model that begins with random weights"
        raise ConfigError(what, where=both, found=f"{model.name} and {model.type}", hint=hint)
    if model.gguf_file is not None and (model.name is None or not model.gguf_file.endswith(".gguf")):
        what = "a GGUF file lies in a repository or folder, which model.name gives"
        file = model.gguf_file if model.gguf_file.endswith(".gguf") else "NAME.gguf"
        hint = f"model=OWNER/NAME model.gguf_file={file}, or model=FOLDER/{file} model.gguf_file=null"
        allowed = "NAME.gguf, with a model.name"
        raise _conflict(config, "model.gguf_file model.name", what, allowed=allowed, hint=hint)
    if model.init is not Init.pretrained:
        return
    if model.name is None:
        what = "pretrained weights need the name of a model"
        hint = "model=hub model.name=HuggingFaceTB/SmolLM2-135M, or model.init=random"
        raise _conflict(config, "model.init model.type", what, allowed="random", hint=hint)
    if model.tokenizer.name is None:
        what = "pretrained weights need their own tokenizer: one trained on the corpus gives the tokens other ids"
        raise _conflict(config, "model.tokenizer.name", what, hint=f"model.tokenizer.name={model.name}")


def _check_adapter(config: RunConfig) -> None:
    adapter, default = config.adapter, AdapterConfig()
    if adapter.path is not None or not adapter.is_used:
        what = (
            "a saved adapter has its own value of this key"
            if adapter.is_used
            else "without an adapter this key has no meaning"
        )
        for name in (field.name for field in dataclasses.fields(adapter)):
            kept = ("path", "merge", "quantization") if adapter.is_used else ("path", "merge")
            if name not in kept and getattr(adapter, name) != getattr(default, name):
                allowed, hint = json.dumps(plain(getattr(default, name))), "adapter=lora"
                if adapter.is_used:
                    is_option = name == "type"
                    hint = f"adapter=none adapter.path={adapter.path}" if is_option else f"adapter.{name}={allowed}"
                raise _conflict(config, f"adapter.{name}", what, allowed=allowed, hint=hint)
    if adapter.target_pattern is not None and adapter.targets != [ALL_LINEAR]:
        what, where = "the layers to adapt are given twice", "adapter.targets, adapter.target_pattern"
        found = f"{adapter.targets} and {adapter.target_pattern}"
        raise ConfigError(what, where=where, found=found, hint="adapter.target_pattern=null")
    if ALL_LINEAR in adapter.targets and len(adapter.targets) > 1:
        what = f"{ALL_LINEAR} stands for all layers, so no name goes with it"
        hint = f"adapter.targets=[{ALL_LINEAR}], or names of layers only"
        raise _conflict(config, "adapter.targets", what, hint=hint)
    if not adapter.targets:
        raise _conflict(config, "adapter.targets", "no layer is to be adapted", hint=f"adapter.targets=[{ALL_LINEAR}]")
    if adapter.quantization is not None:
        _check_quantization(config)


def _check_quantization(config: RunConfig) -> None:
    """Check what weights of 4 bits go with."""
    adapter, strategy = config.adapter, config.strategy
    if (adapter.type or "lora").lower() != "lora" or adapter.dora:
        what = "this adapter looks at the weights that it stands beside, and they are in 4 bits"
        keys = "adapter.quantization adapter.type adapter.dora"
        hint = "adapter.type=lora adapter.dora=false, or adapter.quantization=null"
        raise _conflict(config, keys, what, allowed="null, or LoRA without DoRA", hint=hint)
    for axis in PARTS:
        if getattr(strategy, axis) > 1:
            what, hint = f"{axis} ranks have parts of weights, and packed ones are whole", f"strategy.{axis}=1"
            raise _conflict(config, f"adapter.quantization strategy.{axis}", what, allowed="null", hint=hint)
    if config.train.precision is Precision.fp8:
        what, hint = "the same layers cannot be in float8, too", "train.precision=bf16"
        raise _conflict(config, "adapter.quantization train.precision", what, allowed="null", hint=hint)


def check_layout(strategy: StrategyConfig, train: TrainConfig) -> None:
    """Check the degrees, what is sharded, and the pipeline; ConfigError: the first contradiction that is found."""
    config = RunConfig(strategy=strategy, train=train)
    if strategy.data is not None and strategy.data < strategy.min_data:
        what, hint = "there are fewer data ranks than strategy.min_data", f"strategy.min_data={strategy.data}"
        raise _conflict(config, "strategy.data strategy.min_data", what, hint=hint)
    if strategy.sharding is Sharding.none and strategy.offload is not Offload.none:
        what = "ZeRO and FSDP2 do the offloading, and this layout has none of them"
        hint = "strategy=zero3_offload, or strategy.offload=none"
        raise _conflict(config, "strategy.offload strategy.sharding", what, allowed="none", hint=hint)
    is_offloaded_fsdp = strategy.sharding is Sharding.fsdp2 and strategy.offload is Offload.cpu
    if is_offloaded_fsdp and train.precision is Precision.fp16:
        what = "the loss scale lies on the device, and offloaded gradients do not"
        hint = "train.precision=bf16, or strategy=zero3_offload"
        raise _conflict(config, "train.precision strategy.offload", what, allowed="fp32, bf16", hint=hint)
    if strategy.compression is not Compression.none:
        _check_compression(config)
    if strategy.deepspeed and not strategy.sharding.is_deepspeed:
        what = "these keys are DeepSpeed's, and without ZeRO DeepSpeed is not used"
        stage = (strategy.deepspeed.get("zero_optimization") or {}).get("stage")
        hint = f"strategy=zero{stage if stage in (1, 2, 3) else 1}, or leave strategy.deepspeed empty"
        raise _conflict(config, "strategy.deepspeed", what, hint=hint)
    for key, default in (("replicate", 1), ("reshard", None), ("prefetch", 0)):
        if getattr(strategy, key) != default and strategy.sharding is not Sharding.fsdp2:
            what, keys = "this key belongs to FSDP2", f"strategy.{key} strategy.sharding"
            allowed = "null" if default is None else str(default)
            raise _conflict(config, keys, what, allowed=allowed, hint="strategy=fsdp2")
    if strategy.sharding in (Sharding.zero2, Sharding.zero3) and strategy.pipeline > 1:
        what = (
            f"{strategy.sharding.value} and a pipeline exclude each other: ZeRO-2 and 3 shard the gradients after each "
            "micro batch, a pipeline needs those of all micro batches until it is flushed"
        )
        keys, hint = "strategy.sharding strategy.pipeline", "strategy.sharding=zero1, or strategy.sharding=fsdp2"
        raise _conflict(config, keys, what, allowed="none, zero1, fsdp2", hint=hint)
    if strategy.context > 1 and strategy.sharding.is_deepspeed and strategy.pipeline == 1:
        what = "ZeRO counts each process as a data rank, and ranks that share sequences are one"
        hint = "strategy.sharding=fsdp2, or strategy.context=1"
        raise _conflict(config, "strategy.context strategy.sharding", what, allowed="1", hint=hint)
    if strategy.context_method is not ContextMethod.auto and strategy.context == 1:
        what, keys = "no ranks share a sequence", "strategy.context_method strategy.context"
        hint = "strategy.context=2, or strategy.context_method=auto"
        raise _conflict(config, keys, what, allowed="auto", hint=hint)
    for axis, what in PARTS.items():
        if getattr(strategy, axis) > 1:
            _check_shared(config, axis, what)
    _check_pipeline(config)


def _check_pipeline(config: RunConfig) -> None:
    """A pipeline has keys of its own, and excludes others."""
    strategy = config.strategy
    for key in ("strategy.stages_per_rank", "strategy.blocks_per_stage"):
        if strategy.pipeline == 1 and _shown(config, key) != "null":
            what, hint = "this key belongs to a pipeline, and there is none", f"strategy.pipeline=2, or {key}=null"
            raise _conflict(config, f"{key} strategy.pipeline", what, hint=hint)
    for key, allowed in (("reshard", "null, false"), ("prefetch", "0")):
        if strategy.pipeline > 1 and getattr(strategy, key):
            what = "a pipeline gathers what its stages need at the start of a step, and keeps it to the end"
            keys, hint = f"strategy.{key} strategy.pipeline", f"strategy.{key}={allowed.partition(',')[0]}"
            raise _conflict(config, keys, what, allowed=allowed, hint=hint)
    if strategy.pipeline > 1 and strategy.offload is not Offload.none:
        what = "a pipeline cannot offload its optimizer state"
        keys, hint = "strategy.offload strategy.pipeline", "strategy.offload=none"
        raise _conflict(config, keys, what, allowed="none", hint=hint)
    if strategy.pipeline > 1 and config.train.compile is Compile.model:
        what = "a pipeline runs the model from block to block, so it cannot be compiled as a whole"
        keys, hint = "train.compile strategy.pipeline", "train.compile=blocks"
        raise _conflict(config, keys, what, allowed="none, blocks", hint=hint)


def _check_compression(config: RunConfig) -> None:
    """Compressed are the gradients of DDP, which other layouts do without."""
    strategy, what = config.strategy, "DDP compresses gradients, and this layout reduces them by itself"
    if strategy.sharding is not Sharding.none:
        keys, hint = "strategy.compression strategy.sharding", "strategy=ddp, or strategy.compression=none"
        raise _conflict(config, keys, what, allowed="none", hint=hint)
    for axis in ("pipeline", *PARTS):
        if getattr(strategy, axis) > 1:
            hint = f"strategy.{axis}=1, or strategy.compression=none"
            raise _conflict(config, f"strategy.compression strategy.{axis}", what, allowed="1", hint=hint)


def _check_shared(config: RunConfig, axis: str, what: str) -> None:
    """Check what does not go with tensor or expert ranks."""
    strategy, key = config.strategy, f"strategy.{axis}"
    if strategy.sharding.is_deepspeed:
        what = f"ZeRO knows nothing of {what} that are sharded over {axis} ranks"
        keys, hint = f"strategy.sharding {key}", "strategy.sharding=fsdp2, which shards what each rank has"
        raise _conflict(config, keys, what, allowed="none, fsdp2", hint=hint)
    if axis == "expert" and config.train.compile is Compile.blocks:
        what = "blocks whose experts ranks share are not compiled in this version"
        keys, hint = f"train.compile {key}", "train.compile=none"
        raise _conflict(config, keys, what, allowed="auto, none", hint=hint)
    if config.train.compile is Compile.model:
        what = f"a model of which {axis} ranks have parts is not compiled as a whole"
        allowed = "auto, none, blocks" if axis == "tensor" else "auto, none"
        keys, hint = f"train.compile {key}", f"train.compile={'blocks' if axis == 'tensor' else 'auto'}"
        raise _conflict(config, keys, what, allowed=allowed, hint=hint)


def _check_tokens(config: RunConfig) -> None:
    """Tokens mean nothing without the tokenizer that made them."""
    for section in ("sources", "eval_sources"):
        for name, source in getattr(config.data, section).items():
            # A file is refused for what it is, with its path.
            is_folder = source.path is None or not os.path.isfile(source.path)
            if source.kind is SourceKind.tokens and config.model.tokenizer.name is None and is_folder:
                what = "a source of tokens needs the tokenizer that made them"
                found = f"data.{section}.{name}.kind=tokens"
                hint = f"model.tokenizer.name={source.path}/tokenizer"
                raise ConfigError(what, where="model.tokenizer.name", found=f"null, with {found}", hint=hint)


def _check_optimizer(config: RunConfig) -> None:
    optimizer = config.optimizer
    names = ("warmup_steps", "warmup_tokens", "warmup_fraction")
    warmups = {f"optimizer.{name}": getattr(optimizer, name) for name in names if getattr(optimizer, name)}
    if len(warmups) > 1:
        found = ", ".join(map(str, warmups.values()))
        hint = " ".join(f"{key}=null" for key in [*warmups][1:])
        raise ConfigError("the warm-up is given more than once", where=", ".join(warmups), found=found, hint=hint)
    if config.train.max_steps is not None and config.train.epochs is None:
        check_schedule(config, config.train.max_steps)
    if optimizer.name.is_schedule_free and optimizer.schedule is not Schedule.constant:
        what = "a schedule-free optimizer averages weights instead of lowering the rate"
        keys = "optimizer.schedule optimizer.name"
        raise _conflict(config, keys, what, allowed="constant", hint="optimizer.schedule=constant")
    if optimizer.min_lr_ratio is not None and optimizer.schedule in (Schedule.linear, Schedule.constant):
        end = "0" if optimizer.schedule is Schedule.linear else "its peak"
        what = f"the {optimizer.schedule.value} schedule ends at {end}, so a smallest rate has no meaning"
        hint = "optimizer.min_lr_ratio=null, or optimizer.schedule=cosine"
        raise _conflict(config, "optimizer.min_lr_ratio", what, allowed="null", hint=hint)
    _check_changes(config)
    _check_base_width(config)


def _check_base_width(config: RunConfig) -> None:
    if config.optimizer.base_width is None:
        return
    hint = "optimizer.base_width=null"
    if config.adapter.is_used:
        what = "the matrices of an adapter have a width of their own, its rank"
        keys = f"optimizer.base_width adapter.{'type' if config.adapter.path is None else 'path'}"
        raise _conflict(config, keys, what, allowed="null", hint=hint)
    if config.islands.method is IslandMethod.parameter_server:
        what, keys = "the server steps all parameters at one rate", "optimizer.base_width islands.method"
        raise _conflict(config, keys, what, allowed="null", hint=hint)


def _check_changes(config: RunConfig) -> None:
    optimizer = config.optimizer
    steps = [change.step for change in optimizer.changes]
    if steps != sorted(set(steps)):
        what, found = "the changes must stand in the order of their steps", ", ".join(map(str, steps))
        raise ConfigError(what, where="optimizer.changes", found=found, allowed="rising steps")
    if not optimizer.weight_decay and any(change.weight_decay is not None for change in optimizer.changes):
        what, hint = "where nothing decays at first, it is not known what decays later", "optimizer.weight_decay=1e-9"
        raise _conflict(config, "optimizer.weight_decay", what, allowed="above 0, if it changes", hint=hint)
    if optimizer.changes and config.islands.method is IslandMethod.parameter_server:
        what, hint = "the server has the optimizer, whose values stay", "optimizer.changes=[]"
        raise _conflict(config, "optimizer.changes islands.method", what, allowed="none", hint=hint)


def check_schedule(config: RunConfig, max_steps: int) -> None:
    """Check warm-up and decay against the number of steps; ConfigError: they are longer than the run."""
    optimizer = config.optimizer
    tokens_per_step = config.train.global_batch_size * config.data.sequence_length
    warmup_steps = num_warmup_steps(optimizer, tokens_per_step=tokens_per_step, max_steps=max_steps)
    if warmup_steps >= max_steps:
        leaf = "warmup_steps" if optimizer.warmup_tokens is None else "warmup_tokens"
        what = "the warm-up is as long as the whole run, so the learning rate never reaches its peak"
        found, allowed = f"{warmup_steps} steps of {max_steps}", f"fewer than {max_steps} steps"
        hint = f"optimizer.{leaf}={getattr(optimizer, leaf) * (max_steps // 10) // warmup_steps}"
        raise ConfigError(what, where=f"optimizer.{leaf}", found=found, allowed=allowed, hint=hint)
    decay_steps = round(max_steps * optimizer.decay_fraction)
    if optimizer.schedule is Schedule.wsd and warmup_steps + decay_steps > max_steps:
        what = "warm-up and decay are longer than the run"
        found = f"{warmup_steps} + {decay_steps} steps of {max_steps}"
        allowed = f"<= {(max_steps - warmup_steps) / max_steps:g}"
        raise ConfigError(what, where="optimizer.decay_fraction", found=found, allowed=allowed)


def _check_precision(config: RunConfig) -> None:
    keys = "model.dtype train.precision"
    if config.model.dtype is Dtype.float16:
        what = "float16 parameters cannot be trained: small updates vanish and gradients underflow"
        hint = "model.dtype=float32 train.precision=fp16 (float16 arithmetic over float32 parameters)"
        raise _conflict(config, keys, what, allowed="auto, float32, bfloat16", hint=hint)
    if config.model.dtype is Dtype.bfloat16 and config.train.precision is Precision.fp16:
        what = "fp16 arithmetic needs float32 parameters: it scales their gradients"
        hint = "train.precision=bf16, or model.dtype=float32"
        raise _conflict(config, keys, what, allowed="auto, float32", hint=hint)
    # Transformers keeps packed documents apart under FlashAttention only in a batch of one sequence.
    for name in ("micro_batch_size", "eval_micro_batch_size"):
        if config.model.attention is Attention.flash_attention_2 and (getattr(config.train, name) or 1) > 1:
            what = "with FlashAttention, packed documents of a batch of several sequences would see each other"
            allowed, hint = "1 (use longer sequences instead)", f"train.{name}=1, or model.attention=sdpa"
            raise _conflict(config, f"train.{name} model.attention", what, allowed=allowed, hint=hint)


def _check_float8(config: RunConfig) -> None:
    """Check what has not been tried in float8."""
    train, strategy = config.train, config.strategy
    if train.precision is not Precision.fp8:
        return
    allowed = "fp32, bf16, fp16"
    if strategy.sharding.is_deepspeed:
        what = "float8 does not go with ZeRO in this version"
        keys, hint = "train.precision strategy.sharding", "strategy=fsdp2, or train.precision=bf16"
        raise _conflict(config, keys, what, allowed=allowed, hint=hint)
    for axis in PARTS:
        if getattr(strategy, axis) > 1:
            what = f"{axis} ranks compute no layers in float8 in this version"
            keys = f"train.precision strategy.{axis}"
            raise _conflict(config, keys, what, allowed=allowed, hint=f"strategy.{axis}=1, or train.precision=bf16")
    if config.adapter.is_used:
        what = "layers with an adapter are not computed in float8 in this version"
        keys = f"train.precision adapter.{'type' if config.adapter.path is None else 'path'}"
        raise _conflict(config, keys, what, allowed=allowed, hint="train.precision=bf16")


def _check_train(config: RunConfig) -> None:
    train = config.train
    if train.max_steps is None and train.epochs is None:
        where, allowed = "train.max_steps, train.epochs", "a number of steps, of passes over the data, or both"
        what, hint = "nothing ends the run", "train.epochs=1"
        raise ConfigError(what, where=where, found="both null", allowed=allowed, hint=hint)
    if train.micro_batch_size > train.global_batch_size:
        what = "a micro batch is larger than the global batch that it is a part of"
        allowed = f"<= {train.global_batch_size} (train.global_batch_size)"
        hint = f"train.micro_batch_size={train.global_batch_size}"
        raise _conflict(config, "train.micro_batch_size", what, allowed=allowed, hint=hint)
    if train.recompute is not Recompute.all and not train.gradient_checkpointing:
        what = "nothing is computed again without gradient checkpointing"
        hint = "train.gradient_checkpointing=true, or train.recompute=all"
        raise _conflict(config, "train.recompute train.gradient_checkpointing", what, allowed="all", hint=hint)
    if train.recompute is Recompute.cheap and config.strategy.sharding is Sharding.zero3:
        what = "ZeRO-3 gathers and frees parameters inside of a block, whose operations then differ the second time"
        hint = "train.recompute=all, or strategy=fsdp2"
        raise _conflict(config, "train.recompute strategy.sharding", what, allowed="all", hint=hint)
    if train.activation_offload and not train.gradient_checkpointing:
        what = "what is offloaded are the inputs of blocks, which gradient checkpointing keeps"
        keys, hint = "train.activation_offload train.gradient_checkpointing", "train.gradient_checkpointing=true"
        raise _conflict(config, keys, what, allowed="false", hint=hint)


def _check_budgets(config: RunConfig) -> None:
    """A budget stops a run, which must be able to go on; and what it limits must be known."""
    limits, cost = find_limits(config), config.cost
    if limits and config.checkpoint.every is None:
        what, name = (
            "a run whose budget is used up goes on from its checkpoint, and none is written",
            next(iter(limits)),
        )
        keys, hint = f"train.{name} checkpoint.every", f"checkpoint.every=100, or train.{name}=null"
        raise _conflict(config, keys, what, allowed="null", hint=hint)
    if "max_cost" in limits and cost.price_per_hour is None and cost.price_per_kwh is None:
        what = "nothing is known of what the run costs"
        keys, hint = "train.max_cost cost.price_per_hour cost.price_per_kwh", "cost.price_per_hour=2.5 (of one GPU)"
        raise _conflict(config, keys, what, allowed="null without a price", hint=hint)


def _check_held_out(config: RunConfig) -> None:
    data = config.data
    if data.eval_sources and data.eval_fraction > 0:
        what = "held-out documents are given, and a share of the training documents is held out as well"
        keys, allowed = "data.eval_fraction data.eval_sources", "0 where there are data.eval_sources"
        raise _conflict(config, keys, what, allowed=allowed, hint="data.eval_fraction=0")
    for name, source in data.eval_sources.items():
        check_source(f"data.eval_sources.{name}", source)
        for leaf, value in (("weight", source.weight), ("epochs", source.epochs)):
            if value is not None:
                what, key = "held-out documents are all read, once", f"data.eval_sources.{name}.{leaf}"
                raise ConfigError(what, where=key, found=value, allowed="null", hint=f"{key}=null")
    if data.eval_fraction > 0 or data.eval_sources:
        return
    off = {
        "train.eval_every": "null", "evaluate.at_start": "false", "evaluate.prompts": "[]", "evaluate.metrics": "[]",
        "evaluate.patience": "null", "evaluate.export": "last",
    }  # fmt: skip
    wanted = [key for key, nothing in off.items() if _shown(config, key) != nothing]
    if wanted:
        found = f"{_shown(config, wanted[0])}, with data.eval_fraction=0 and no data.eval_sources"
        hint = "data.eval_fraction=0.02, data.eval_sources.val.path=val.jsonl, or "
        hint += " ".join(f"{key}={off[key]}" for key in wanted)
        raise ConfigError("nothing is held out to evaluate on", where=", ".join(wanted), found=found, hint=hint)


def _check_evaluation(config: RunConfig) -> None:
    evaluate, checkpoint, eval_every = config.evaluate, config.checkpoint, config.train.eval_every
    if evaluate.patience is not None and eval_every is None:
        what = "early stopping needs evaluations during the run"
        hint = f"train.eval_every={checkpoint.every or 100}, or evaluate.patience=null"
        raise _conflict(config, "evaluate.patience train.eval_every", what, hint=hint)
    if evaluate.min_delta > 0 and evaluate.patience is None:
        what = "nothing is stopped early, so a smallest improvement has no meaning"
        every = "" if eval_every is not None else f" train.eval_every={checkpoint.every or 100}"
        hint = f"evaluate.patience=3{every}, or evaluate.min_delta=0"
        raise _conflict(config, "evaluate.min_delta evaluate.patience", what, hint=hint)
    if evaluate.export is Export.best and (checkpoint.every is None or not checkpoint.keep_best):
        missing = [] if checkpoint.every is not None else [f"checkpoint.every={eval_every or 100}"]
        missing += [] if checkpoint.keep_best else ["checkpoint.keep_best=true"]
        missing += [] if eval_every is not None else [f"train.eval_every={checkpoint.every or 100}"]
        what = "the best model comes from a checkpoint, and none is kept for it"
        keys = "evaluate.export checkpoint.every checkpoint.keep_best"
        allowed = "last, or best with checkpoint.every and checkpoint.keep_best=true"
        hint = f"{' '.join(missing)}, or evaluate.export=last"
        raise _conflict(config, keys, what, allowed=allowed, hint=hint)
    for index, prompt in enumerate(evaluate.prompts):
        if not prompt.strip():
            raise ConfigError("a prompt is empty", where=f"evaluate.prompts.{index}", found=prompt, allowed="text")


def _check_lm_eval(config: RunConfig) -> None:
    tasks, folder = config.evaluate.lm_eval, config.evaluate.lm_eval_include
    if tasks and config.adapter.is_used and not config.adapter.merge:
        what, hint = "the harness measures a whole model, and none is written", "adapter.merge=true"
        raise _conflict(config, "evaluate.lm_eval adapter.merge", what, hint=hint)
    if folder is not None and not tasks:
        what = "no task is asked for, so a folder of tasks has no meaning"
        hint = "evaluate.lm_eval=[NAME], or evaluate.lm_eval_include=null"
        raise _conflict(config, "evaluate.lm_eval_include", what, hint=hint)
    if folder is not None and not Path(folder).is_dir():
        allowed = "a folder of YAML files"
        raise _conflict(config, "evaluate.lm_eval_include", "there is no such folder", allowed=allowed)


def _check_sample(config: RunConfig) -> None:
    if config.report.sample_prompt is not None and config.report.sample_tokens == 0:
        raise _conflict(
            config, "report.sample_tokens report.sample_prompt", "no token continues it", hint="report.sample_tokens=64"
        )


def _check_alert_command(config: RunConfig) -> None:
    command = config.report.alert_command
    if command is None:
        return
    where = "report.alert_command"
    if not config.report.alerts:
        what, hint = "no alert is looked for, so a command for alerts has no meaning", "report.alerts=true"
        raise _conflict(config, f"{where} report.alerts", what, hint=hint)
    try:
        words = shlex.split(command)
    except ValueError as error:
        what = f"the command cannot be split into words: {error}"
        raise ConfigError(what, where=where, found=command, allowed="words, quoted as in a shell") from error
    if not words or shutil.which(os.path.expanduser(words[0])) is None:
        what, hint = "there is no such program", "chmod +x FILE, if it is a script of yours"
        raise ConfigError(what, where=where, found=words[0] if words else command, allowed="a program", hint=hint)


def _check_replicas(config: RunConfig, every: int | None) -> None:
    if every is None:
        what = "replicas in memory bridge the steps between saves, and there are none"
        hint = "checkpoint.every=100, or checkpoint.replicate_every=null"
        raise _conflict(config, "checkpoint.replicate_every checkpoint.every", what, hint=hint)
    folder = config.checkpoint.replicate_dir
    if not os.access(folder, os.W_OK | os.X_OK) or not Path(folder).is_dir():
        what = "replicas need a folder in memory that can be written"
        hint = "checkpoint.replicate_every=null, or another folder, such as a mounted tmpfs"
        raise _conflict(config, "checkpoint.replicate_dir", what, allowed="a folder of every machine", hint=hint)


def _check_checkpoints(config: RunConfig) -> None:
    every, keep_every, resume = config.checkpoint.every, config.checkpoint.keep_every, config.checkpoint.resume
    eval_every = config.train.eval_every
    if every is not None and keep_every is not None and keep_every % every != 0:
        what = "most of the steps to keep are not saved"
        allowed = "a multiple of checkpoint.every, or null"
        hint = f"checkpoint.keep_every={-(-keep_every // every) * every}"
        raise _conflict(config, "checkpoint.keep_every checkpoint.every", what, allowed=allowed, hint=hint)
    if every is not None and config.checkpoint.keep_best and (eval_every is None or every % eval_every != 0):
        what = "not every checkpoint is evaluated, so the best is not known"
        allowed = "true where train.eval_every divides checkpoint.every, or false"
        # Save as often as the run evaluates, unless this misses steps of `keep_every`.
        is_missed = eval_every is None or (keep_every is not None and keep_every % eval_every != 0)
        hint = f"train.eval_every={every}"
        hint = hint if is_missed else f"checkpoint.every={eval_every}, or {hint}"
        raise _conflict(config, "checkpoint.keep_best train.eval_every", what, allowed=allowed, hint=hint)
    if config.checkpoint.replicate_every is not None:
        _check_replicas(config, every)
    words = ["auto", "never"]
    steps = sorted(str(path) for path in Path(resume).expanduser().glob("step-*") if not path.suffix)
    if resume and resume not in words and steps:
        what, hint = "this folder holds checkpoints, and is none itself", shlex.quote(f"checkpoint.resume={steps[-1]}")
        raise _conflict(config, "checkpoint.resume", what, allowed="the folder of one of them", hint=hint)
    if resume not in words and not (resume and Path(resume).expanduser().is_dir()):
        what = "this is neither auto, nor never, nor a folder that exists"
        allowed = "auto, never, or the folder of a checkpoint"
        beside = sorted(str(path) for path in Path(resume).expanduser().parent.glob("step-*") if not path.suffix)
        hint = (
            shlex.quote(f"checkpoint.resume={beside[-1]}")
            if beside
            else f"checkpoint.resume={'never' if resume.lower() in OFF else 'auto'}"
        )
        hint = nearest(resume.lower(), words, "checkpoint.resume={}") or hint
        raise _conflict(config, "checkpoint.resume", what, allowed=allowed, hint=hint)


_ROUNDS = (IslandMethod.diloco, IslandMethod.federated)
_OF_METHODS = (
    dict.fromkeys(("every", "outer_optimizer", "outer_lr", "outer_momentum", "outer_beta2", "outer_eps"), _ROUNDS)
    | dict.fromkeys(("fragments", "overlap", "mix"), _ROUNDS[:1])
    | dict.fromkeys(("participation", "proximal"), _ROUNDS[1:])
    | {"staleness": (IslandMethod.parameter_server,)}
)
"""Keys of `islands`: the methods that read them."""


def _check_islands(config: RunConfig) -> None:
    islands, default = config.islands, IslandsConfig()
    if not islands.is_used:
        for name in (field.name for field in dataclasses.fields(islands)):
            if getattr(islands, name) != getattr(default, name):
                what = "this key belongs to islands, and there are none"
                value = json.dumps(plain(getattr(default, name))).strip('"')
                hint = f"islands.method=diloco, or islands.{name}={value}"
                raise _conflict(config, f"islands.{name} islands.method", what, hint=hint)
        return
    if islands.address is None or not re.fullmatch(r".+:\d{1,5}", islands.address):
        what = "the server of the islands has no address"
        hint = "hfdist serve port=29600, and islands.address=HOST:29600"
        raise _conflict(config, "islands.address islands.method", what, allowed="HOST:PORT", hint=hint)
    is_server = islands.method is IslandMethod.parameter_server
    for name, methods in _OF_METHODS.items():
        if islands.method not in methods and getattr(islands, name) != getattr(default, name):
            what = f"this key does not belong to islands.method={islands.method.value}"
            raise _conflict(config, f"islands.{name} islands.method", what, hint=f"islands={methods[0].value}")
    if is_server and config.train.precision is Precision.fp16:
        what = "a loss scaler looks at the gradients of one island alone"
        raise _conflict(
            config, "train.precision islands.method", what, allowed="fp32, bf16", hint="train.precision=bf16"
        )
    if islands.every % islands.fragments != 0:
        what = "the parts of the model cannot be exchanged at equal distances"
        allowed = f"a divisor of {islands.every}"
        raise _conflict(config, "islands.fragments islands.every", what, allowed=allowed)
    if islands.overlap >= islands.exchange_every:
        what, allowed = "the next exchange would begin before the last has ended", f"0 to {islands.exchange_every - 1}"
        raise _conflict(config, "islands.overlap islands.every islands.fragments", what, allowed=allowed)
    if islands.index >= islands.count:
        what, allowed = "there are fewer islands", f"0 to {islands.count - 1}"
        raise _conflict(config, "islands.index islands.count", what, allowed=allowed)
