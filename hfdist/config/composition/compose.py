"""From config files and overrides to one checked RunConfig, and back to YAML."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hfdist.config.checks.urls import refuse_secrets
from hfdist.config.checks.values import check_config
from hfdist.config.composition.defaults_list import check_defaults_list
from hfdist.config.composition.earlier import as_now
from hfdist.config.composition.files import RUN_DEFAULTS, read_config
from hfdist.config.composition.folders import searching
from hfdist.config.composition.hydra_errors import explain, explain_interpolation, missing_value
from hfdist.config.composition.overrides import COMMAND_LINE, prepare_overrides
from hfdist.config.composition.refused_values import refuse_resolver
from hfdist.config.composition.request import Request
from hfdist.config.composition.unknown_keys import check_keys
from hfdist.config.composition.yaml_text import to_yaml_text
from hfdist.config.conf_folder import list_options, shipped_folder
from hfdist.config.data import EXAMPLES, Packing, RowFormat, SourceKind
from hfdist.config.model import Init
from hfdist.config.paths import expand_user
from hfdist.config.plain_values import flatten, plain
from hfdist.config.rates import default_learning_rate
from hfdist.config.run import RunConfig
from hfdist.config.task import TaskLoss
from hfdist.errors import ConfigError, HfdistError

SCHEMA = RUN_DEFAULTS[0]
"""Name of the RunConfig dataclass in the defaults list of a primary config: it types every merge after it."""

_RUNS_CODE = (("model", "trust_remote_code"), ("evaluate", "lm_eval_include"), ("report", "alert_command"))
"""Keys that no file may set, and no saved config has where they are set."""


def compose_config(
    overrides: Sequence[str] = (), *, name: str = "pretrain", extra_dir: str | Path | None = None
) -> RunConfig:
    """Compose and check the config of a run; ConfigError: a file, an override or a composed value is wrong.

    Args:
        overrides: as on the command line, such as `train.max_steps=10` or `+experiment=demo`.
        name: of the primary config.
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


def complete(values: RunConfig, given: Collection[str] = ()) -> RunConfig:
    """Fill in what follows from other values, but for keys that are given; check all; ConfigError: a failed check."""
    _expand_home(values)
    _fit_to_task(values)
    _switch_evaluation_off(values, given)
    if values.optimizer.lr is None:
        values.optimizer.lr = default_learning_rate(values)
    check_config(values)
    for source in values.data.sources.values():
        # The limits of the sources are what ends a stream.
        source.epochs = values.train.epochs if source.epochs is None else source.epochs
    return values


def _expand_home(config: RunConfig) -> None:
    """Write `~` out once, so that no room forgets to."""
    for section, name in (
        (config.run, "dir"),
        (config.model, "name"),
        (config.checkpoint, "resume"),
        (config.adapter, "path"),
        (config.evaluate, "lm_eval_include"),
    ):
        value = getattr(section, name)
        if value is not None and value.startswith("~"):
            setattr(section, name, os.path.expanduser(value))


def _switch_evaluation_off(config: RunConfig, given: Collection[str]) -> None:
    """Evaluate nothing where nothing is held out."""
    if config.data.eval_fraction > 0 or config.data.eval_sources:
        return
    for key, section, off in (
        ("train.eval_every", config.train, None),
        ("evaluate.at_start", config.evaluate, False),
        ("checkpoint.keep_best", config.checkpoint, False),
    ):
        # What an option of the command line sets, such as checkpoint=best, is asked for as well.
        if key not in given and not (key == "checkpoint.keep_best" and "checkpoint" in given):
            setattr(section, key.rpartition(".")[2], off)


def _fit_to_task(config: RunConfig) -> None:
    """Give `auto` the values that the task needs."""
    data, task = config.data, config.task.name
    if data.format is RowFormat.auto:
        own = RowFormat.prompt_completion if task.traits.is_reinforcement else config.task.row_format
        data.format = own or RowFormat.auto
    if data.keep_columns is None:
        data.keep_columns = task.traits.is_reinforcement
    if config.evaluate.at_start is None:
        config.evaluate.at_start = config.model.init is Init.pretrained
    is_text = data.format is RowFormat.text
    # Where rows may have images, their model decides: see run/images.py.
    may_have_images = task.traits.is_of_next_tokens and not is_text and data.images.used is not False
    if data.packing is Packing.auto and not may_have_images:
        is_whole = config.task.answers_prompts or task.traits.head.gives_labels
        by_rows = Packing.none if is_whole else Packing.concat if is_text else Packing.best_fit
        data.packing = task.traits.packing or by_rows


def to_yaml(config: RunConfig) -> str:
    """Write the whole resolved config as a primary config file, which composes to an equal RunConfig.

    The exceptions are `model.trust_remote_code`, `evaluate.lm_eval_include` and `report.alert_command`: no file may set
    them, so they are left out when they are set.
    """
    head = ["# The resolved config of a run. To start one from it: hfdist run <this file>"]
    for section, name in _RUNS_CODE:
        value = getattr(getattr(config, section), name)
        if value:
            # A command may hold what is not for everybody.
            text = "true" if value is True else "..." if name == "alert_command" else value
            head.append(f"# The run also had {section}.{name}={text}, which only the command line can say.")
    defaults = {"defaults": list(RUN_DEFAULTS)}
    return "\n".join(head) + "\n" + to_yaml_text(defaults | to_values(config))


def to_values(config: RunConfig) -> dict[str, object]:
    """Give the resolved config as plain values, without what only the command line sets; ConfigError: a secret."""
    values: dict[str, Any] = plain(config)
    refuse_secrets(values, "")
    for source in values["data"]["sources"].values():
        # As it came to be, so that the key can still be overridden where these values are composed again.
        source["epochs"] = None if source["epochs"] == config.train.epochs else source["epochs"]
    for section, name in _RUNS_CODE:
        if getattr(getattr(config, section), name):
            del values[section][name]
    return values


def _texts(values: object) -> Iterator[tuple[str, str]]:
    """Give every text in the values of a config with its key."""
    return ((key, value) for key, value in flatten(values, "") if isinstance(value, str))
