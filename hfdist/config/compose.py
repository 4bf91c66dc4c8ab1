"""From `conf/` and the command line to one checked `RunConfig`, through Hydra."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

import hfdist
from hfdist.config.checks import check_config
from hfdist.config.explain import explain
from hfdist.config.files import check_folder
from hfdist.config.overrides import check_overrides
from hfdist.config.run import RunConfig
from hfdist.errors import ConfigError

SCHEMA = "run_schema"


def conf_dir() -> Path:
    """Folder of the shipped configs: inside an installed package, beside it in a checkout."""
    package = Path(hfdist.__file__).resolve().parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def register_schema() -> None:
    """Let YAML files name the typed schema in their defaults list."""
    ConfigStore.instance().store(name=SCHEMA, node=RunConfig)


def compose_config(
    overrides: Sequence[str] = (), *, name: str = "pretrain", extra_dir: Path | None = None
) -> RunConfig:
    """Compose, type-check and cross-check a run's config.

    Args:
        overrides: as on the command line, such as `train.max_steps=10` or `+experiment=demo`.
        name: of the primary config.
        extra_dir: a folder of the user's own, laid out as `conf/`, searched as well.

    Raises:
        ConfigError: names the key, the place, what is allowed and the nearest known key.
    """
    folders = [conf_dir()]
    if extra_dir is not None:
        check_folder(extra_dir)
        folders.append(extra_dir.resolve())
    check_overrides(overrides, folders)
    searched = [f"hydra.searchpath=[{','.join(f'file://{folder}' for folder in folders[1:])}]"] if extra_dir else []
    register_schema()
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(folders[0]), version_base="1.3"):
            composed = hydra.compose(name, [*overrides, *searched])
        # Also for a primary config that does not name the schema, such as the config.yaml of a run.
        typed = OmegaConf.merge(OmegaConf.structured(RunConfig), composed)
        _refuse_unsafe(typed, overrides)
        config = OmegaConf.to_object(typed)
    except ConfigError:
        raise
    except Exception as error:
        raise explain(error, overrides) from error
    finally:
        GlobalHydra.instance().clear()
    assert isinstance(config, RunConfig)
    check_config(config)
    return config


def to_yaml(config: RunConfig) -> str:
    """Give the resolved config as YAML, which composes to the same again."""
    return OmegaConf.to_yaml(OmegaConf.create(_plain(config)))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return value.name if hasattr(value, "name") and hasattr(value, "value") else value


def _refuse_unsafe(config: DictConfig, overrides: Sequence[str]) -> None:
    """Keep code and the environment out: configs are passed around and written to run folders."""
    for path, value in _leaves(OmegaConf.to_container(config, resolve=False), ""):
        if path.rsplit(".", 1)[-1] in ("_target_", "_partial_", "_recursive_"):
            raise ConfigError("a config cannot name code to run", where=path, found=value)
        if isinstance(value, str) and "${oc." in value:
            raise ConfigError(
                "the environment cannot be read into a config: it may hold secrets",
                where=path,
                found=value,
                hint="write the value, or an override in the shell: key=$VARIABLE",
            )
    is_asked_for = any(o.replace(" ", "").lower() == "model.trust_remote_code=true" for o in overrides)
    if config.model.trust_remote_code and not is_asked_for:
        raise ConfigError(
            "only your own command line may let a model's repository run code",
            where="model.trust_remote_code",
            found="true in a file",
            hint="model.trust_remote_code=true on the command line, if you trust the repository",
        )


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{index}]")
    else:
        yield path, value
