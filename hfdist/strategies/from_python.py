"""Strategies of Python programs: from arguments of `make_strategy`, or from a preset and TrainingArguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hfdist.config.batch import plan_batch
from hfdist.config.checks.deepspeed import check_optimizer_sections, read_deepspeed_file
from hfdist.config.checks.strategy import check_layout
from hfdist.config.cli.process_end import report_uncaught
from hfdist.config.composition.aliases import override_for, reason_against
from hfdist.config.composition.presets import read_preset
from hfdist.config.composition.python_words import speaking_python
from hfdist.config.schema import Key, keys_of
from hfdist.config.strategy import StrategyConfig
from hfdist.config.train import Precision, TrainConfig
from hfdist.errors import ConfigError, nearest
from hfdist.strategies.base import Strategy
from hfdist.strategies.select import device_type_here, select_strategy

if TYPE_CHECKING:
    from transformers import TrainingArguments

_GROUP = "strategy"
"""Folder of the presets in conf/."""
Section = TypeVar("Section")
"""A group's dataclass."""


@speaking_python()
def make_strategy(
    name: str | None = None,
    /,
    *,
    global_batch_size: int | None = None,
    micro_batch_size: int = 1,
    sequence_length: int = 1024,
    precision: str | None = None,
    max_grad_norm: float = 1.0,
    **layout: object,
) -> Strategy:
    """Make a strategy from Python, for `hfdist.Trainer` with a model and a dataset of one's own.

    From then on an error of hfdist's that the program does not catch ends it as a recipe ends: see `report_uncaught`.

        strategy = hfdist.make_strategy("pipeline_zero1", global_batch_size=32, micro_batch_size=4)
        args = TrainingArguments("out", bf16=True, **strategy.training_arguments())
        hfdist.Trainer(model, args, strategy=strategy, train_dataset=dataset).train()

    Args:
        name: the name of a preset in conf/strategy/; None: one process, but for what `layout` says.
        global_batch_size: sequences in one optimizer step, over all processes; must be given.
        micro_batch_size: sequences in one forward of one data rank.
        sequence_length: tokens of a usual sequence, to balance the stages of a pipeline.
        precision: fp32, bf16 or fp16, as in the TrainingArguments; None: theirs, and fp32 where DeepSpeed must know it.
        max_grad_norm: that of the TrainingArguments, which DeepSpeed must know, as it clips by itself.
        layout: the keys of `strategy.*`, under their names and with their values there; `deepspeed` may be the path of
            a DeepSpeed config file.

    Raises:
        ConfigError: a key, a value or a size that does not fit.
    """
    report_uncaught()
    sizes = {"micro_batch_size": micro_batch_size, "precision": precision or "fp32", "max_grad_norm": max_grad_norm}
    strategy, train = _read_sections(name, layout, sizes | {"global_batch_size": global_batch_size})
    if type(sequence_length) is not int or sequence_length < 1:
        allowed = "a whole number >= 1"
        raise ConfigError("no such length", where=_where("sequence_length"), found=sequence_length, allowed=allowed)
    made = _make(strategy, train, sequence_length=sequence_length)
    made.asked_precision = None if precision is None else train.precision
    return made


@speaking_python()
def strategy_by_name(name: str, args: TrainingArguments) -> Strategy:
    """Make a strategy of a preset in conf/strategy/, with the sizes of TrainingArguments; ConfigError: none fits.

    Each data rank reads as many sequences in a step as each process does without a strategy.
    """
    report_uncaught()
    layout = {"deepspeed": args.deepspeed} if args.deepspeed else {}
    size = args.per_device_train_batch_size * args.gradient_accumulation_steps
    sizes: dict[str, object] = {
        "global_batch_size": size,
        "micro_batch_size": args.per_device_train_batch_size,
        "eval_micro_batch_size": args.per_device_eval_batch_size,
        "precision": "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
    }
    if (args.max_grad_norm or 0) > 0:
        # Else nothing is clipped. DeepSpeed, which clips by itself, then refuses the arguments.
        sizes["max_grad_norm"] = args.max_grad_norm
    strategy, train = _read_sections(name, layout, sizes, where="Trainer(strategy)")
    train.global_batch_size *= strategy.topology().data
    return _make(strategy, train)


def _make(strategy: StrategyConfig, train: TrainConfig, *, sequence_length: int = 1024) -> Strategy:
    """Check what was asked for, and make the strategy of this process."""
    if train.precision is Precision.fp8:
        what, allowed = "the model is the caller's own, and only a run changes its layers to float8", "fp32, bf16, fp16"
        raise ConfigError(what, where=_where("precision"), found="fp8", allowed=allowed, hint='precision="bf16"')
    check_layout(strategy, train)
    check_optimizer_sections(strategy.deepspeed, None)
    topology = strategy.topology()
    batch = plan_batch(
        global_batch_size=train.global_batch_size,
        micro_batch_size=train.micro_batch_size,
        data_size=topology.data,
        sequence_length=sequence_length,
        lanes=topology.data,
    )
    return select_strategy(strategy, train, topology=topology, batch=batch, device_type=device_type_here())


def _read_sections(
    name: str | None, layout: Mapping[str, object], sizes: Mapping[str, object], *, where: str = "make_strategy(...)"
) -> tuple[StrategyConfig, TrainConfig]:
    """Give the keys of a preset with `layout` over it, and the sizes, each of its type and in its range."""
    if not isinstance(name, str | None):
        what, hint = "a preset has a name", 'make_strategy("fsdp2", ...), or sharding="fsdp2"'
        raise ConfigError(what, where=where, found=repr(name), hint=hint)
    preset = {} if name is None else read_preset(_GROUP, name, where=where)
    known = [field.name for field in dataclasses.fields(StrategyConfig)]
    for key, value in layout.items():
        if key not in known:
            hint = override_for(key, value) or reason_against(key) or nearest(key, [*known, *sizes], f"{{}}={value!r}")
            allowed = ", ".join([*known, *sizes])
            raise ConfigError("there is no such argument", where=_where(key), found=value, allowed=allowed, hint=hint)
    if sizes["global_batch_size"] is None:
        what, hint = "how many sequences one optimizer step takes must be said", "global_batch_size=8"
        raise ConfigError(what, where=_where("global_batch_size"), hint=hint)
    file = layout.get("deepspeed")
    if isinstance(file, str | PathLike):
        layout = {**layout, "deepspeed": read_deepspeed_file(str(file), _where("deepspeed"))}
    return _read_section(StrategyConfig, _GROUP, {**preset, **layout}), _read_section(TrainConfig, "train", sizes)


def _read_section(kind: type[Section], section: str, values: Mapping[str, object]) -> Section:
    """Give values as a group's dataclass; ConfigError: one has another type, or is out of its range."""
    keys = {key.leaf: key for key in keys_of(kind, f"{section}.")}
    merged: DictConfig = OmegaConf.structured(kind)
    for name, value in values.items():
        key = keys[name]
        try:
            merged.merge_with({name: value})
            made = merged[name]
        except OmegaConfBaseException as error:
            what = "the value has the wrong type or is not among the allowed"
            near = nearest(str(value), _allowed_words(key))
            hint = None if near is None else f"{section}.{name}={near}"
            raise ConfigError(what, where=_where(name), found=repr(value), allowed=key.allowed, hint=hint) from error
        if value is not None and key.limit is not None and not key.limit.accepts(made):
            raise ConfigError("the number is out of range", where=_where(name), found=value, allowed=key.allowed)
    try:
        typed = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError("a value refers to others", where=_where(section), found="${") from error
    assert isinstance(typed, kind)
    return typed


def _allowed_words(key: Key) -> list[str]:
    return key.allowed.replace(" or ", ", ").split(", ")


def _where(argument: str) -> str:
    """Name an argument in messages."""
    return f"make_strategy({argument})"
