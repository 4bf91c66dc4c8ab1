"""What one value or several together must satisfy once the config is composed, before anything is built."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hfdist.config.batch import num_warmup_steps
from hfdist.config.checks.adapter import check_adapter_keys
from hfdist.config.checks.data import check_data
from hfdist.config.checks.evaluate import check_evaluation
from hfdist.config.checks.layout import check_layout
from hfdist.config.data import SourceKind
from hfdist.config.model import Attention, Dtype, Init, ModelConfig
from hfdist.config.optimizer import OptimizerConfig, Schedule
from hfdist.config.ranges import LIMIT
from hfdist.config.run import ExportConfig, RunConfig, RunSection
from hfdist.config.schema import find_key
from hfdist.config.train import Precision, Recompute, TrainConfig
from hfdist.errors import ConfigError


def check_config(config: RunConfig) -> None:
    """Check ranges, then contradictions.

    Raises:
        ConfigError: the first that is found.
    """
    _check_ranges(config, "")
    _check_run(config.run)
    _check_model(config.model)
    check_adapter_keys(config.adapter)
    check_data(config.data)
    check_layout(config.strategy, config.train)
    _check_length(config.train)
    _check_optimizer(config)
    _check_tokens(config)
    _check_precision(config)
    _check_flash(config)
    _check_batch(config.train)
    _check_recompute(config.train)
    check_evaluation(config)
    _check_keeping(config)
    _check_resume(config.checkpoint.resume)
    _check_export(config.export)


def _check_ranges(value: Any, prefix: str) -> None:
    for name, item, limit in _items(value):
        key = f"{prefix}{name}"
        if limit is not None and item is not None and not limit.accepts(item):
            known = find_key(key)
            raise ConfigError(
                "the number is out of range",
                where=key,
                found=item,
                allowed=limit.allowed if known is None else known.allowed,
            )
        if dataclasses.is_dataclass(item) or isinstance(item, dict):
            _check_ranges(item, f"{key}.")


def _items(value: Any) -> Iterator[tuple[str, Any, Any]]:
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield field.name, getattr(value, field.name), field.metadata.get(LIMIT)
    else:
        yield from ((str(name), item, None) for name, item in value.items())


def _check_run(run: RunSection) -> None:
    if not re.fullmatch(r"\w[\w.=,+-]{0,127}", run.name):
        raise ConfigError(
            "the run's name must be a plain folder name",
            where="run.name",
            found=run.name,
            allowed="up to 128 letters, digits and _ . = , + -; the first a letter, digit or _",
            hint="run.dir=... places a run anywhere",
        )
    if not run.dir.strip() or "\0" in run.dir:
        raise ConfigError("not a folder", where="run.dir", found=run.dir, allowed="a path", hint="run.dir=runs/first")


def _check_model(model: ModelConfig) -> None:
    if model.name is None and model.type is None:
        raise ConfigError(
            "no model is named",
            where="model.name, model.type",
            found="both null",
            allowed="a Hub id or folder in model.name, or an architecture in model.type",
            hint="model=small, or model=hub model.name=HuggingFaceTB/SmolLM2-135M",
        )
    if model.name is not None and model.type is not None:
        raise ConfigError(
            "two models are named: a name gives the architecture, so a type has no meaning beside it",
            where="model.name, model.type",
            found=f"{model.name} and {model.type}",
            hint=f"model=hub model.name={model.name}, or model.name=null",
        )
    if model.gguf_file is not None and (model.name is None or not model.gguf_file.endswith(".gguf")):
        raise ConfigError(
            "a GGUF file lies in a repository or folder, which model.name gives",
            where="model.gguf_file",
            found=f"{model.gguf_file}, with model.name={model.name or 'null'}",
            allowed="NAME.gguf, with a model.name",
            hint="model.name=FOLDER/NAME.gguf, or model.name=OWNER/NAME model.gguf_file=NAME.gguf",
        )
    if model.init is not Init.pretrained:
        return
    if model.name is None:
        raise ConfigError(
            "pretrained weights need the name of a model",
            where="model.init",
            found=f"pretrained, with model.type={model.type}",
            allowed="random",
            hint="model=hub model.name=HuggingFaceTB/SmolLM2-135M, or model.init=random",
        )
    if model.tokenizer.name is None:
        raise ConfigError(
            "pretrained weights belong to a tokenizer; one trained on the corpus numbers the tokens differently",
            where="model.tokenizer.name",
            found="null",
            hint=f"model.tokenizer.name={model.name}",
        )


def _check_tokens(config: RunConfig) -> None:
    """Tokens mean nothing without the tokenizer that made them."""
    for section in ("sources", "eval_sources"):
        for name, source in getattr(config.data, section).items():
            if source.kind is SourceKind.tokens and config.model.tokenizer.name is None:
                raise ConfigError(
                    "a source of tokens needs the tokenizer that made them",
                    where="model.tokenizer.name",
                    found=f"null, with data.{section}.{name}.kind=tokens",
                    hint=f"model.tokenizer.name={source.path}/tokenizer",
                )


def _check_optimizer(config: RunConfig) -> None:
    given = [key for key, value in _warmups(config.optimizer).items() if value]
    if len(given) > 1:
        raise ConfigError(
            "the warm-up is given more than once",
            where=", ".join(given),
            found=", ".join(f"{value}" for value in _warmups(config.optimizer).values() if value),
            hint=" ".join(f"{key}={0 if key.endswith('steps') else 'null'}" for key in given[1:]),
        )
    if config.train.max_steps is not None and config.train.epochs is None:
        check_schedule(config, config.train.max_steps)
    _check_schedule_free(config.optimizer)
    _check_min_lr_ratio(config.optimizer)


def _warmups(optimizer: OptimizerConfig) -> dict[str, float | None]:
    names = ("warmup_steps", "warmup_tokens", "warmup_fraction")
    return {f"optimizer.{name}": getattr(optimizer, name) for name in names}


def check_schedule(config: RunConfig, max_steps: int) -> None:
    """Check warm-up and decay against the number of steps, which is only counted later where the run is so many epochs.

    Raises:
        ConfigError: they are longer than the run.
    """
    optimizer = config.optimizer
    tokens_per_step = config.train.global_batch_size * config.data.sequence_length
    warmup_steps = num_warmup_steps(optimizer, tokens_per_step=tokens_per_step, max_steps=max_steps)
    if warmup_steps >= max_steps:
        key = "optimizer.warmup_steps" if optimizer.warmup_tokens is None else "optimizer.warmup_tokens"
        given = optimizer.warmup_steps if optimizer.warmup_tokens is None else optimizer.warmup_tokens
        raise ConfigError(
            "the warm-up is as long as the whole run, so the learning rate never reaches its peak",
            where=key,
            found=f"{warmup_steps} steps of {max_steps}",
            allowed=f"fewer than {max_steps} steps",
            hint=f"{key}={given * (max_steps // 10) // warmup_steps}",
        )
    decay_steps = round(max_steps * optimizer.decay_fraction)
    if optimizer.schedule is Schedule.wsd and warmup_steps + decay_steps > max_steps:
        raise ConfigError(
            "warm-up and decay are longer than the run",
            where="optimizer.decay_fraction",
            found=f"{warmup_steps} + {decay_steps} steps of {max_steps}",
            allowed=f"<= {(max_steps - warmup_steps) / max_steps:g}",
        )


def _check_schedule_free(optimizer: OptimizerConfig) -> None:
    if optimizer.name.is_schedule_free and optimizer.schedule is not Schedule.constant:
        raise ConfigError(
            "a schedule-free optimizer averages weights in place of a falling rate",
            where="optimizer.schedule",
            found=f"{optimizer.schedule.value}, with optimizer.name={optimizer.name.value}",
            allowed="constant",
            hint="optimizer.schedule=constant",
        )


def _check_min_lr_ratio(optimizer: OptimizerConfig) -> None:
    if optimizer.min_lr_ratio is not None and optimizer.schedule in (Schedule.linear, Schedule.constant):
        end = "0" if optimizer.schedule is Schedule.linear else "its peak"
        raise ConfigError(
            f"the {optimizer.schedule.value} schedule ends at {end}, so a smallest rate has no meaning",
            where="optimizer.min_lr_ratio",
            found=optimizer.min_lr_ratio,
            allowed="null",
            hint="optimizer.min_lr_ratio=null, or optimizer.schedule=cosine",
        )


def _check_precision(config: RunConfig) -> None:
    dtype, precision = config.model.dtype, config.train.precision
    if dtype is Dtype.float16:
        raise ConfigError(
            "float16 parameters cannot be trained: small updates vanish and gradients underflow",
            where="model.dtype",
            found=f"{dtype.value}, with train.precision={precision.value}",
            allowed="auto, float32, bfloat16",
            hint="model.dtype=float32 train.precision=fp16 (float16 arithmetic over float32 parameters)",
        )
    if dtype is Dtype.bfloat16 and precision is Precision.fp16:
        raise ConfigError(
            "fp16 arithmetic scales the gradients of float32 parameters",
            where="model.dtype",
            found=f"{dtype.value}, with train.precision={precision.value}",
            allowed="auto, float32",
            hint="train.precision=bf16, or model.dtype=float32",
        )


def _check_flash(config: RunConfig) -> None:
    """Transformers keeps packed documents apart under FlashAttention only in a batch of one sequence."""
    if config.model.attention is not Attention.flash_attention_2:
        return
    for name in ("micro_batch_size", "eval_micro_batch_size"):
        size = getattr(config.train, name)
        if size is not None and size > 1:
            raise ConfigError(
                "with FlashAttention, packed documents of a batch of several sequences would see each other",
                where=f"train.{name}",
                found=f"{size}, with model.attention=flash_attention_2",
                allowed="1 (use longer sequences instead)",
                hint=f"train.{name}=1, or model.attention=sdpa",
            )


def _check_length(train: TrainConfig) -> None:
    if train.max_steps is None and train.epochs is None:
        raise ConfigError(
            "nothing ends the run",
            where="train.max_steps, train.epochs",
            found="both null",
            allowed="a number of steps, of passes over the data, or both",
            hint="train.epochs=1",
        )


def _check_batch(train: TrainConfig) -> None:
    if train.micro_batch_size > train.global_batch_size:
        raise ConfigError(
            "a micro batch is larger than the global batch that it is a part of",
            where="train.micro_batch_size",
            found=train.micro_batch_size,
            allowed=f"<= {train.global_batch_size} (train.global_batch_size)",
            hint=f"train.micro_batch_size={train.global_batch_size}",
        )


def _check_recompute(train: TrainConfig) -> None:
    if train.recompute is not Recompute.all and not train.gradient_checkpointing:
        raise ConfigError(
            "nothing is computed again without gradient checkpointing",
            where="train.recompute",
            found=f"{train.recompute.value}, with train.gradient_checkpointing=false",
            allowed="all",
            hint="train.gradient_checkpointing=true, or train.recompute=all",
        )


def _check_keeping(config: RunConfig) -> None:
    every, keep_every = config.checkpoint.every, config.checkpoint.keep_every
    if every is None:
        return
    if keep_every is not None and keep_every % every != 0:
        raise ConfigError(
            "most of the steps that are to be kept are not saved",
            where="checkpoint.keep_every",
            found=f"{keep_every}, with checkpoint.every={every}",
            allowed="a multiple of checkpoint.every, or null",
            hint=f"checkpoint.keep_every={-(-keep_every // every) * every}",
        )
    eval_every = config.train.eval_every
    if config.checkpoint.keep_best and (eval_every is None or every % eval_every != 0):
        raise ConfigError(
            "the best is not known, since not every checkpoint is evaluated",
            where="checkpoint.keep_best",
            found=f"true, with train.eval_every={'null' if eval_every is None else eval_every}",
            allowed="true where train.eval_every divides checkpoint.every, or false",
            hint=_evaluated_when_saved(every, eval_every, keep_every),
        )


def _evaluated_when_saved(every: int, eval_every: int | None, keep_every: int | None) -> str:
    """What makes every checkpoint one that is evaluated: to save as often, unless that misses those to be kept."""
    if eval_every is None or (keep_every is not None and keep_every % eval_every != 0):
        return f"train.eval_every={every}"
    return f"checkpoint.every={eval_every}"


def _check_resume(resume: str) -> None:
    words = ["auto", "never"]
    if resume in words or (resume and Path(resume).expanduser().is_dir()):
        return
    near = difflib.get_close_matches(resume.lower(), words, n=1, cutoff=0.5)
    raise ConfigError(
        "this is neither a word for where to start nor a folder that exists",
        where="checkpoint.resume",
        found=resume,
        allowed="auto, never, or the folder of a checkpoint",
        hint=f"checkpoint.resume={near[0] if near else 'auto'}",
    )


def _check_export(export: ExportConfig) -> None:
    if export.push_to is not None and not re.fullmatch(r"[\w.-]{1,96}/[\w.-]{1,96}", export.push_to):
        raise ConfigError(
            "this is no repository of the Hub",
            where="export.push_to",
            found=export.push_to,
            allowed="OWNER/NAME: letters, digits, - _ .",
        )
