"""From config files and overrides to one checked RunConfig."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hfdist.config.composition.complete import complete
from hfdist.config.composition.defaults_list import check_defaults_list
from hfdist.config.composition.earlier import as_now
from hfdist.config.composition.files import RUN_DEFAULTS, read_config
from hfdist.config.composition.folders import searching
from hfdist.config.composition.hydra_errors import explain, explain_interpolation, missing_value
from hfdist.config.composition.overrides import prepare_overrides
from hfdist.config.composition.refused_values import refuse_resolver
from hfdist.config.composition.request import Request
from hfdist.config.composition.unknown_keys import check_keys
from hfdist.config.conf_folder import list_options, shipped_folder
from hfdist.config.data import EXAMPLES, SourceKind
from hfdist.config.override_text import COMMAND_LINE
from hfdist.config.paths import expand_user
from hfdist.config.plain_values import flatten
from hfdist.config.run import RunConfig
from hfdist.config.task import TaskLoss
from hfdist.errors import ConfigError, HfdistError

SCHEMA = RUN_DEFAULTS[0]
"""Name of the RunConfig dataclass in the defaults list of a primary config: it types every merge after it."""


def compose_config(
    overrides: Sequence[str] = (), *, name: str = "pretrain", extra_dir: str | Path | None = None
) -> RunConfig:
    """Compose and check the config of a run; ConfigError: a file, an override or a composed value is wrong.

    Args:
        overrides: as on the command line, such as `train.max_steps=10` or `+experiment=demo`.
        name: the name of the primary config.
        extra_dir: a folder of the user's own, laid out as `conf/`; its files win over shipped ones of the same name.
    """
    return compose_request(make_request(name, overrides, extra_dir))


def make_request(name: str, overrides: Sequence[str], extra_dir: str | Path | None) -> Request:
    """Parse the overrides, find the folders, and tell Hydra the schema."""
    store = ConfigStore.instance()
    if f"{SCHEMA}.yaml" not in store.repo:
        # Storing it takes as long as a quarter of what follows.
        store.store(name=SCHEMA, node=RunConfig)
        # Hydra copies the store, the schema of each key included, for each group that --help lists: two thirds of all
        # calls of --help. Nothing writes into such a copy, and `load` gives copies of what is in it.
        vars(store)["__deepcopy__"] = lambda memo: store
    folders: tuple[Path, ...] = (shipped_folder(),)
    if extra_dir is not None:
        own = expand_user(extra_dir).absolute()
        if not os.path.isdir(own):
            raise ConfigError("there is no such config folder", where="--config-dir", found=extra_dir)
        folders = (own, *folders)
    recipe = name if name in list_options(shipped_folder(), ".") else "pretrain"
    prepared = prepare_overrides(overrides, recipe, folders)
    return Request(config_name=name.removesuffix(".yaml"), overrides=prepared, folders=folders)


def compose_untyped(request: Request) -> DictConfig:
    """Let Hydra merge files and overrides, each typed; values may be missing. ConfigError: a mistake in one of them."""
    check_defaults_list(request)
    try:
        with searching(request.folders), initialize(config_path=None, job_name="hfdist", version_base="1.3"):
            config = compose(request.config_name, [override.for_hydra for override in request.overrides])
    except HfdistError:
        raise
    except Exception as error:  # whatever a parser raises on what a user wrote
        raise explain(error, request) from error
    if OmegaConf.get_type(config) is not RunConfig:
        what = "the primary config is not typed, so mistakes in it would pass"
        where = f"--config-name {request.config_name}"
        hint = f"begin it with its recipe, `defaults: [finetune, _self_]`, or pretrain, or tune; or with `- {SCHEMA}`"
        raise ConfigError(what, where=where, hint=hint)
    refuse_unknown(config, request)
    return config


def refuse_unknown(config: DictConfig, request: Request) -> None:
    """Refuse keys that the dataclasses do not know, and resolvers."""
    # Once for both: it takes as long as half of all checks.
    values: Any = OmegaConf.to_container(config, resolve=False)
    check_keys(values, request)
    for key, text in _texts(values):
        refuse_resolver(text, key)


def compose_request(request: Request) -> RunConfig:
    """Compose and check what a command line asks for.

    Raises:
        ConfigError: see `compose_config`; a missing value, a dead interpolation, or a failed check.
    """
    config = compose_untyped(request)
    try:
        values = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        unresolved = _texts(OmegaConf.to_container(config, resolve=False))
        missing = next((key for key, text in unresolved if text == "???"), None)
        raise explain_interpolation(error) if missing is None else missing_value(missing) from error
    except RecursionError as error:
        raise ConfigError("an interpolation refers to itself", where="${...}") from error
    assert isinstance(values, RunConfig)
    _refuse_mixed_example(values, request)
    _take_as_now(values, request)
    return complete(values, {override.key for override in request.overrides})


def _take_as_now(values: RunConfig, request: Request) -> None:
    """Say what the config of a run of an earlier version says of its loss as this version does."""
    task, path = values.task, request.file(request.config_name)
    if path is None or task.loss is not TaskLoss.sigmoid or not task.name.traits.is_reinforcement:
        return
    written = dict(flatten(read_config(path), ""))
    now, given = as_now(written), {override.key for override in request.overrides}
    if now != written and "task.loss" not in given:
        task.loss = TaskLoss(now["task.loss"])
        task.clip = task.clip if "task.clip" in given else now["task.clip"]


def _refuse_mixed_example(values: RunConfig, request: Request) -> None:
    """Refuse a source that the command line adds to a recipe's own example, where neither has a weight."""
    keys = [override.key for override in request.overrides]
    added = {part[1] for key in keys if (part := re.match(r"data\.sources\.([^.=]+)", key))}
    sources = values.data.sources
    example = next((name for name in EXAMPLES if name in sources and name not in added), None)
    is_chosen = {"data", "experiment"} & {*keys} or request.config_name not in list_options(shipped_folder(), ".")
    if not added or example is None or is_chosen or any(source.weight is not None for source in sources.values()):
        return
    name = min(added)
    kind, path = sources[name].kind, sources[name].path or "PATH"
    of_kind = "" if kind is SourceKind.files else f", kind: {kind.value}"
    parts = f"{name}={{path: {path}{of_kind}, weight: 1}}", f"{example}={{kind: {example}, weight: 1}}"
    hint = f"data={path}" if kind is SourceKind.files else f"data={kind.value} data.sources.{kind.value}.path={path}"
    hint += f", or data=mixture {' '.join(shlex.quote(f'+data.sources.{part}') for part in parts)}"
    what, where = "the example of the recipe would be mixed with it", f"data.sources.{name} ({COMMAND_LINE})"
    raise ConfigError(what, where=where, found=", ".join(sources), hint=hint)


def _texts(values: object) -> Iterator[tuple[str, str]]:
    """Give every text in the values of a config with its key."""
    return ((key, value) for key, value in flatten(values, "") if isinstance(value, str))
