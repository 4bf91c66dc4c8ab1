"""Environments by name: built in, or an entry point of an installed package."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from hfdist.config.task import TaskConfig
from hfdist.environments.calculator import Calculator
from hfdist.environments.code import Code
from hfdist.environments.environment import Environment
from hfdist.environments.guess import Guess
from hfdist.environments.openenv import OpenEnv
from hfdist.environments.reasoning_gym import ReasoningGym
from hfdist.environments.tools import Schema, describe_tools
from hfdist.errors import ConfigError, named_line
from hfdist.plugins import load_plugin
from hfdist.rewards.code import code
from hfdist.rewards.generation import Generation

GROUP = "hfdist.environments"
"""Group of entry points, in a package's pyproject.toml: `[project.entry-points."hfdist.environments"]`."""
_WHERE = "task.environment"
_EXPECTED = "a class without arguments that derives from hfdist.environments.Environment"

Factory = Callable[[], Environment]
"""Makes the environment of an episode."""


class Offer(NamedTuple):
    """What `task.environment` names."""

    factory: Factory
    tools: tuple[Schema, ...]
    """JSON schemas of its tools."""


BUILT_IN: Mapping[str, type[Environment]] = MappingProxyType(
    {"calculator": Calculator, "code": Code, "guess": Guess, "openenv": OpenEnv, "reasoning_gym": ReasoningGym}
)
_PACKAGES = {"openenv": ("websockets", "'websockets>=15'"), "reasoning_gym": ("reasoning_gym", "reasoning-gym")}
"""The module that an environment needs besides hfdist's own, and its package, by the environment's name."""

_TRIED: dict[int, Offer] = {}
"""What each factory offers, by its id: a run asks several times, and some environments are slow to make.

By id, as a package's factory may have no hash; an offer holds its factory, so that no other object gets the id."""


def load_environment(task: TaskConfig) -> Offer:
    """Find `task.environment`, and make one to know its tools.

    Raises:
        ConfigError: no installed package offers it, a package is missing, what is offered makes no environment, or its
            tools cannot be described.
    """
    name = task.environment
    assert name is not None
    factory = _find(task, name)
    if id(factory) not in _TRIED:
        _TRIED[id(factory)] = Offer(factory, _try(factory, name))
    return _TRIED[id(factory)]


def _find(task: TaskConfig, name: str) -> Factory:
    if name in _PACKAGES:
        module, package = _PACKAGES[name]
        if importlib.util.find_spec(module) is None:
            what = "this environment needs a package that is not installed"
            raise ConfigError(what, where=_WHERE, found=f"{name}, without {module}", hint=f"pip install {package}")
    if name == "openenv":
        assert task.environment_url is not None  # checked with the config
        return partial(OpenEnv, task.environment_url, task.environment_seconds)
    if name in BUILT_IN:
        return BUILT_IN[name]
    factory: Factory = load_plugin(
        GROUP, name, kind="environment", expected=_EXPECTED, where=_WHERE, hint=f"{_WHERE}={{}}", built_in=BUILT_IN
    )
    return factory


def _try(factory: Factory, name: str) -> tuple[Schema, ...]:
    """Make an environment, and describe its tools; ConfigError: either fails."""
    try:
        made: object = factory()
    except Exception as error:  # whatever a package raises
        what = f"the environment cannot be made: {named_line(error)}"
        raise ConfigError(what, where=_WHERE, found=name, allowed=_EXPECTED) from error
    if not isinstance(made, Environment):
        what, found = "what the package offers is no environment", f"{name}, a {type(made).__name__}"
        raise ConfigError(what, where=_WHERE, found=found, allowed=_EXPECTED)
    try:
        tools = list(made.tools())
    except Exception as error:  # whatever a package raises
        what = f"the environment gives no list of tools: {named_line(error)}"
        raise ConfigError(what, where=_WHERE, found=name, allowed="a list of functions, or ()") from error
    return tuple(describe_tools(tools, where=_WHERE, found=name))


def check_environment(task: TaskConfig) -> None:
    """Check `task.environment`, its server where it has one, and the sandbox where programs run.

    ConfigError: see `load_environment`; the server does not answer, or this machine cannot confine programs.
    """
    load_environment(task)
    if task.environment == "code":
        code([Generation(prompt="", text="", reference="assert True")])
    if task.environment == "openenv":
        assert task.environment_url is not None  # checked with the config
        try:
            OpenEnv(task.environment_url, task.environment_seconds).knock()
        except Exception as error:  # of sockets, TLS and HTTP
            what = f"the server of the environment does not answer: {named_line(error)}"
            where, found = "task.environment_url", task.environment_url
            allowed = "the address of a server of OpenEnv that runs"
            hint = "start the server first; its address ends in /ws"
            raise ConfigError(what, where=where, found=found, allowed=allowed, hint=hint) from error
