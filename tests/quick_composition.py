"""Composition in which Hydra merges the same files once a session: most tests are about what comes of a config."""

from __future__ import annotations

import copy
import functools
import importlib
import pickle
from pathlib import Path
from typing import Any

import pytest
from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from hfdist.config.composition import compose
from hfdist.config.conf_folder import shipped_folder

_whole = compose.compose_untyped
_map_choices = defaults_list._create_interpolation_map
_parse = OverridesParser.parse_override
_load = ConfigRepository.load_config
_loaded: dict[tuple[str, str, str], bytes] = {}


def _map_choices_if_asked(overrides: Any, defaults: list[Any], self_added: bool) -> Any:
    """Hydra makes the map of all choices for each file, a fifth of its time, and few files refer to one."""
    return _map_choices(overrides, defaults, self_added) if any(one.is_interpolation() for one in defaults) else None


def _load_once(self: ConfigRepository, config_path: str) -> Any:
    """Hydra's own files, the schema and the shipped ones stay as they are; a user's file may change."""
    source = self._find_object_source(config_path, ObjectType.CONFIG)
    if source is None or (source.scheme() == "hfdist" and Path(source.path) != shipped_folder()):
        return _load(self, config_path)
    key = source.scheme(), source.path, config_path
    if key not in _loaded:
        # A copy by pickle takes a fifth of that by deepcopy.
        _loaded[key] = pickle.dumps(_load(self, config_path))
    return pickle.loads(_loaded[key])


@functools.cache
def _merged(name: str, groups: tuple[str, ...], folder: Path) -> bytes:
    """Args: folder: the shipped one, which is found once more."""
    return pickle.dumps(_whole(compose.make_request(name, groups, None)))


@functools.cache
def _parsed(override: str) -> Any:
    return _parse(OverridesParser.create(), override)


def _parse_once(self: OverridesParser, override: str) -> Any:
    """Many tests give the same overrides: a copy takes a thirtieth of Hydra's parser."""
    return copy.deepcopy(_parsed(override))


def _quick(request: Any) -> Any:
    groups = tuple(one.text for one in request.overrides if "." not in one.key)
    rest = [one.for_hydra for one in request.overrides if "." in one.key]
    if len(request.folders) > 1:
        return _whole(request)
    try:
        config = pickle.loads(_merged(request.config_name, groups, request.folders[0]))
        parsed = [_parsed(one) for one in rest]
        assert OmegaConf.get_type(config) is compose.RunConfig
    except Exception:
        if not rest:
            raise
        # Messages may depend on all of the request.
        return _whole(request)
    try:
        ConfigLoaderImpl._apply_overrides_to_config(parsed, config)
    except Exception as error:
        raise compose.explain(error, request) from error
    compose.refuse_unknown(config, request)
    return config


def quick_composition(patch: pytest.MonkeyPatch) -> None:
    """Put single keys into a copy of what Hydra has merged, by Hydra's own function, as long as `patch` lasts."""
    patch.setattr(compose, "compose_untyped", _quick)
    patch.setattr(defaults_list, "_create_interpolation_map", _map_choices_if_asked)
    patch.setattr(OverridesParser, "parse_override", _parse_once)
    patch.setattr(ConfigRepository, "load_config", _load_once)


def leave_stack(patch: pytest.MonkeyPatch) -> None:
    """Let Hydra not look for the module of each frame of pytest's stack, of which it asks for a path that is None."""
    # By its name: the package has a class of the same name.
    module = importlib.import_module("hydra.initialize")
    patch.setattr(module, "detect_calling_file_or_module_from_stack_frame", lambda depth: ("", None))
