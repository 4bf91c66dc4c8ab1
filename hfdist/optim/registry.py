"""The optimizer of a config: the class that a name or a plugin means, its settings, and one that is made so."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import nn

from hfdist.config.optimizer import OptimizerConfig, OptimizerName
from hfdist.config.run import RunConfig
from hfdist.errors import ConfigError, first_line, nearest
from hfdist.optim.check import check
from hfdist.optim.joined import groups_by_optimizer
from hfdist.optim.muon import MuonWithAdamW
from hfdist.optim.probe import Reach, probe_optimizer
from hfdist.optim.trial_step import state_after_step
from hfdist.optim.width import check_optimizer_of_width
from hfdist.plugins import load_plugin

ClassAndSettings = tuple[Callable[..., Any], dict[str, Any]]
"""The value of `optimizer_cls_and_kwargs` of `transformers.Trainer`."""

GROUP = "hfdist.optimizers"
"""The group of entry points, in a package's pyproject.toml: `[project.entry-points."hfdist.optimizers"]`."""

_OWN_KEYS = {"lr": "lr", "weight_decay": "weight_decay"}
"""Settings that every optimizer takes, each with its key in `optimizer`."""
_OWN_KEYS_OF_ADAM = {"betas": "beta1=... optimizer.beta2", "eps": "eps"}
"""Settings that only Adam and its relatives take, each with its key."""


def name_for_arguments(config: OptimizerConfig) -> str:
    """Give the value of `TrainingArguments.optim`: of the optimizer itself, or of its nearest relative there."""
    if config.plugin is not None or config.name in (OptimizerName.adamw, OptimizerName.muon):
        return "adamw_torch_fused" if config.fused else "adamw_torch"
    return config.name.value


def find_optimizer(config: OptimizerConfig, *, warmup_steps: int) -> ClassAndSettings:
    """Give the class of `optimizer.name` or `optimizer.plugin` and its settings.

    Raises:
        ConfigError: its package is not installed, or `optimizer.arguments` has what the class does not take.
    """
    own_keys = _OWN_KEYS | _OWN_KEYS_OF_ADAM
    values: dict[str, object] = {
        "lr": config.lr, "weight_decay": config.weight_decay, "betas": (config.beta1, config.beta2), "eps": config.eps
    }  # fmt: skip
    if config.plugin is not None:
        kind: Callable[..., Any] = _load_plugin(config)
        # A constructor of any arguments is given what every optimizer takes.
        taken = inspect.signature(kind).parameters
        own_keys = {name: key for name, key in own_keys.items() if name in taken} if "lr" in taken else _OWN_KEYS
        settings = {name: values[name] for name in own_keys}
    elif config.name is OptimizerName.muon:
        kind, settings = MuonWithAdamW, values
    else:
        if "adam" not in config.name.value and "lion" not in config.name.value:
            own_keys = _OWN_KEYS
        kind, settings = _find_in_transformers(config, warmup_steps)
    _check_arguments(config, kind, own_keys)
    return kind, settings | config.arguments


def settings_from_keys(config: OptimizerConfig) -> frozenset[str]:
    """Name the settings of a group of parameters that keys of `optimizer` give: Adam's, or the first two alone.

    Raises:
        ConfigError: as of `find_optimizer`.
    """
    _, settings = find_optimizer(config, warmup_steps=0)
    of_adam = settings.keys() & _OWN_KEYS_OF_ADAM.keys() - config.arguments.keys()
    # Each group has these two, by the schedule and by what decays in the model.
    return frozenset(_OWN_KEYS) | of_adam


def _load_plugin(config: OptimizerConfig) -> type[torch.optim.Optimizer]:
    """Load the class of `optimizer.plugin`."""
    if config.name is not OptimizerName.adamw:
        raise ConfigError(
            "the optimizer is given by two keys",
            where="optimizer.name, optimizer.plugin",
            found=f"{config.name.value}, {config.plugin}",
            hint="optimizer.plugin=null, or leave optimizer.name=adamw",
        )
    assert config.plugin is not None
    key, expected = "optimizer.plugin", "a subclass of torch.optim.Optimizer"
    kind = load_plugin(GROUP, config.plugin, kind="optimizer", expected=expected, where=key, hint=f"{key}={{}}")
    if not (inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)):
        raise ConfigError("the plugin is no optimizer", where=key, found=config.plugin, allowed=expected)
    return kind


def _find_in_transformers(config: OptimizerConfig, warmup_steps: int) -> ClassAndSettings:
    """Ask transformers for the class of a name of its own."""
    package = config.name.package
    if package is not None and find_spec(package.module) is None:
        what, hint = "the optimizer's package is not installed", f"pip install {package.name}"
        raise ConfigError(what, where="optimizer.name", found=config.name.value, hint=hint)
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


def _check_arguments(config: OptimizerConfig, kind: Any, own_keys: dict[str, str]) -> None:
    """Refuse what `kind` does not take in `optimizer.arguments`; `own_keys`: settings by another key of `optimizer`."""
    # MuonWithAdamW passes what it does not know to torch's Muon.
    makers = (kind.__call__, torch.optim.Muon) if kind is MuonWithAdamW else (kind,)
    parameters = {name: p for maker in makers for name, p in inspect.signature(maker).parameters.items()}
    takes_any = kind is not MuonWithAdamW and any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    not_settings = ("self", "params", "model", *own_keys)
    named = {name for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    known = sorted(named.difference(not_settings))
    for name, value in config.arguments.items():
        where = f"optimizer.arguments.{name}"
        if name in own_keys:
            what = "this setting has a key of its own"
            raise ConfigError(what, where=where, found=value, hint=f"optimizer.{own_keys[name]}=...")
        if name not in known and not takes_any:
            what = f"{kind.__name__} takes no such argument"
            hint = nearest(name, known, f"optimizer.arguments.{{}}={value}")
            raise ConfigError(what, where=where, found=value, allowed=", ".join(known), hint=hint)


def check_optimizer(config: RunConfig) -> None:
    """Make the optimizer for a small layer, and check it against the layout, before anything large is made.

    Raises:
        ConfigError: it is not installed, takes no such settings, or would train otherwise in this layout.
    """
    optimizer = config.optimizer
    if _is_plain(optimizer):
        return
    # What the layout gives the optimizer whole; the engine says it again, once there is one.
    strategy = config.strategy
    has_parts = strategy.mesh.divides_parameters or strategy.shards_state
    made = make_small(optimizer)
    check(made, Reach.parameter if has_parts else Reach.model, is_saved=config.checkpoint.every is not None)
    if optimizer.base_width is not None:
        check_optimizer_of_width(made)


def make_over(found: ClassAndSettings, model: nn.Module, params: Iterable[Any]) -> torch.optim.Optimizer:
    """Make the optimizer that `find_optimizer` gave over `params` of a model, or over its groups of them.

    MuonWithAdamW makes groups of its own.
    """
    kind, settings = found
    made: torch.optim.Optimizer = kind()(model, **settings) if kind is MuonWithAdamW else kind(params, **settings)
    return made


def make_small(config: OptimizerConfig) -> torch.optim.Optimizer:
    """Make the optimizer for one small layer.

    Raises:
        ConfigError: as of `find_optimizer`, or a value that the class refuses.
    """
    found = find_optimizer(config, warmup_steps=0)
    # On the CPU also within a plan, which makes models without values: the steps of this layer are looked at.
    layer = nn.Linear(4, 4, device="cpu")
    try:
        return make_over(found, layer, layer.parameters())
    except Exception as error:  # of the class, and so of any kind
        what = f"the optimizer refuses its settings: {first_line(error)}"
        raise ConfigError(what, where="optimizer.arguments", found=config.arguments) from error


def stepped_whole(config: OptimizerConfig, model: nn.Module) -> tuple[int, ...]:
    """Give the elements of each trained parameter that the optimizer must see whole; no value is looked at.

    Raises:
        ConfigError: as of `make_small`.
    """
    if _is_plain(config):
        return ()
    if config.name is OptimizerName.muon and config.plugin is None:
        made = make_over(find_optimizer(config, warmup_steps=0), model, ())
        seen = [p for group in groups_by_optimizer(made, made.param_groups)[0][1] for p in group["params"]]
    else:
        seen = [p for p in model.parameters() if p.requires_grad]
        seen = seen if probe_optimizer(make_small(config)).reach is Reach.parameter else []
    return tuple(p.numel() for p in seen)


def _is_plain(config: OptimizerConfig) -> bool:
    """Whether it is AdamW as every layout knows it: nothing is to be asked of it."""
    return config.name is OptimizerName.adamw and config.plugin is None and not config.arguments


def values_per_weight(optimizer: torch.optim.Optimizer) -> float:
    """Count the numbers that an optimizer keeps for an element of a large matrix: 2 for Adam, about 0 for Adafactor."""
    matrix = torch.zeros(256, 256)
    state = state_after_step(optimizer, optimizer.param_groups[0], matrix)
    return sum(value.numel() for value in state.values() if torch.is_tensor(value)) // 256 / 256
