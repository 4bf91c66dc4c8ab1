"""Folders of config files, as Hydra finds them: hfdist's own, and in front of it one of the user's.

Both classes are Hydra plugins, by its public plugin interfaces. They change nothing for other Hydra applications in the
same process: outside `searching` no folder is added.
"""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import Container, OmegaConf

from hfdist.config.composition.files import NUM_KEPT, display, read_config_text
from hfdist.config.composition.yaml_graph import refusing_yaml
from hfdist.config.conf_folder import NOT_GROUPS
from hfdist.errors import ConfigError

_folders: ContextVar[tuple[Path, ...]] = ContextVar("hfdist_conf_folders", default=())


@contextmanager
def searching(folders: tuple[Path, ...]) -> Iterator[None]:
    """Let Hydra search these folders, the first one first, for everything within the context."""
    for plugin in (CheckedFolder, AddFolders):
        Plugins.instance().register(plugin)
    token = _folders.set(folders)
    try:
        yield
    finally:
        _folders.reset(token)


class AddFolders(SearchPathPlugin):
    """Adds the folders of `searching` to Hydra's search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append each folder, in order: the first that has a file wins."""
        for folder in _folders.get():
            search_path.append(provider="hfdist", path=f"{CheckedFolder.scheme()}://{folder}")


class CheckedFolder(ConfigSource):
    """A folder of YAML files."""

    @staticmethod
    def scheme() -> str:
        """Give the prefix of paths that Hydra opens with this class."""
        return "hfdist"

    def load_config(self, config_path: str) -> ConfigResult:
        """Read, check and parse one file; ConfigError: see `read_config_text`."""
        path = self._file(config_path)
        if not os.path.isfile(path):
            raise ConfigLoadError(f"Config not found : {path}")
        text = read_config_text(path)
        with refusing_yaml(text, display(path)):
            config = copy.deepcopy(_load(text))
        try:
            header = self._get_header_dict(text[:512])
        except ValueError as error:
            what, allowed = f"the comment that places the file is wrong: {error}", "# @package _global_, or none"
            raise ConfigError(what, where=display(path), allowed=allowed) from error
        return ConfigResult(provider=self.provider, path=self.full_path(), config=config, header=header)

    def is_group(self, config_path: str) -> bool:
        """Whether this is a folder of options."""
        return config_path not in NOT_GROUPS and os.path.isdir(Path(self.path) / config_path)

    def is_config(self, config_path: str) -> bool:
        """Whether this is a config file."""
        # Not by pathlib: Python 3.11 raises for a name that is too long.
        return os.path.isfile(self._file(config_path))

    def available(self) -> bool:
        """Whether the folder exists."""
        return self.is_group("")

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """List groups and options below a folder."""
        names: list[str] = []
        for path in sorted((Path(self.path) / config_path).iterdir()):
            if not path.name.startswith(("_", ".")):
                self._list_add_result(names, str(Path(config_path) / path.name), path.name, results_filter)
        return sorted(set(names))

    def _file(self, config_path: str) -> Path:
        return Path(self.path) / self._normalize_file_name(config_path)


@lru_cache(NUM_KEPT)
def _load(text: str) -> Container:
    config = OmegaConf.load(io.StringIO(text))
    assert isinstance(config, Container)
    return config
