"""`optimizer.name` and `optimizer.arguments`: which class steps, with which settings."""

from __future__ import annotations

import difflib
import inspect
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import nn

from hfdist.config.optimizer import OptimizerConfig, OptimizerName
from hfdist.config.run import RunConfig
from hfdist.errors import ConfigError
from hfdist.optim.fit import check
from hfdist.optim.muon import MuonWithAdamW
from hfdist.optim.probe import Reach, state_after_step

ClassAndSettings = tuple[Any, dict[str, Any]]
"""What `transformers.Trainer` takes as `optimizer_cls_and_kwargs`."""

_OWN_KEYS = {"lr": "lr", "weight_decay": "weight_decay"}
_OWN_KEYS_OF_ADAM = {"betas": "beta1 and optimizer.beta2", "eps": "eps"}
"""Settings that other keys of `optimizer` stand for."""


def name_for_arguments(config: OptimizerConfig) -> str:
    """Give what TrainingArguments calls it, or, of what it does not know, the nearest relative."""
    if config.name in (OptimizerName.adamw, OptimizerName.muon):
        return "adamw_torch_fused" if config.fused else "adamw_torch"
    return config.name.value


def find_optimizer(config: OptimizerConfig, *, warmup_steps: int) -> ClassAndSettings:
    """Give the class of `optimizer.name` and its settings.

    Raises:
        ConfigError: its package is not installed, or `optimizer.arguments` has what the class does not take.
    """
    package = config.name.package
    if package is not None and find_spec(package.module) is None:
        raise ConfigError(
            "the optimizer's package is not installed",
            where="optimizer.name",
            found=config.name.value,
            hint=f"pip install {package.name}",
        )
    kind, settings = _class_and_settings(config, warmup_steps)
    _check_arguments(config, kind)
    return kind, settings | config.arguments


def check_optimizer(config: RunConfig) -> None:
    """Make the optimizer for a small layer, and check it against the layout, before anything large is made.

    Raises:
        ConfigError: it is not installed, takes no such settings, or would train otherwise in this layout.
    """
    optimizer = config.optimizer
    if optimizer.name is OptimizerName.adamw and not optimizer.arguments:
        return
    check(make_small(optimizer), _seen(config), is_saved=config.checkpoint.every is not None)


def make_small(config: OptimizerConfig) -> torch.optim.Optimizer:
    """Make the optimizer for one small layer.

    Raises:
        ConfigError: as of `find_optimizer`, or a value that the class refuses.
    """
    kind, settings = find_optimizer(config, warmup_steps=0)
    layer = nn.Linear(4, 4)
    try:
        made: torch.optim.Optimizer = (
            kind()(layer, **settings) if kind is MuonWithAdamW else kind(layer.parameters(), **settings)
        )
    except Exception as error:  # of the class, and so of any kind
        raise ConfigError(
            f"the optimizer refuses its settings: {str(error).splitlines()[0]}",
            where="optimizer.arguments",
            found=config.arguments,
        ) from error
    return made


def values_per_weight(optimizer: torch.optim.Optimizer) -> float:
    """How many numbers it keeps for each element of a large matrix: two of Adam, next to none of Adafactor."""
    matrix = torch.zeros(256, 256)
    state = state_after_step(optimizer, optimizer.param_groups[0], matrix)
    return sum(value.numel() for value in state.values() if torch.is_tensor(value)) // 256 / 256


def _seen(config: RunConfig) -> Reach:
    """What the layout gives the optimizer whole; the engine says it again, once there is one."""
    if config.strategy.shards_state:
        return Reach.element
    return Reach.parameter if config.strategy.pipeline > 1 else Reach.model


def _class_and_settings(config: OptimizerConfig, warmup_steps: int) -> ClassAndSettings:
    if config.name is OptimizerName.muon:
        betas = (config.beta1, config.beta2)
        return MuonWithAdamW, {
            "lr": config.lr, "weight_decay": config.weight_decay, "betas": betas, "eps": config.eps
        }  # fmt: skip
    # What transformers reads of TrainingArguments to make an optimizer.
    fields: Any = SimpleNamespace(
        optim=name_for_arguments(config),
        optim_args=None,
        learning_rate=config.lr,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_epsilon=config.eps,
        weight_decay=config.weight_decay,
        warmup_steps=warmup_steps,
    )
    kind, settings = transformers.Trainer.get_optimizer_cls_and_kwargs(fields)
    return kind, settings


def _own_keys(name: OptimizerName) -> dict[str, str]:
    is_like_adam = "adam" in name.value or "lion" in name.value or name is OptimizerName.muon
    return _OWN_KEYS | (_OWN_KEYS_OF_ADAM if is_like_adam else {})


def _check_arguments(config: OptimizerConfig, kind: Any) -> None:
    # Muon's maker hands on what it does not know.
    makers = (kind.__call__, torch.optim.Muon) if kind is MuonWithAdamW else (kind,)
    parameters = {name: p for maker in makers for name, p in inspect.signature(maker).parameters.items()}
    takes_any = kind is not MuonWithAdamW and any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    known = sorted(
        name
        for name, p in parameters.items()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        and name not in ("self", "params", "model", *_own_keys(config.name))
    )
    for name, value in config.arguments.items():
        where = f"optimizer.arguments.{name}"
        if name in _own_keys(config.name):
            own_key = f"optimizer.{_own_keys(config.name)[name]}"
            raise ConfigError("this setting has a key of its own", where=where, found=value, hint=f"{own_key}=...")
        if name not in known and not takes_any:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            raise ConfigError(
                f"{kind.__name__} takes no such argument",
                where=where,
                found=value,
                allowed=", ".join(known),
                hint=f"optimizer.arguments.{near[0]}={value}" if near else None,
            )
