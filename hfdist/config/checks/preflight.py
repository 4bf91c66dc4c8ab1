"""What a run needs of this machine, found without torch: processes, environment, files, packages.

`Run` asks again, for programs that did not ask before their imports.
"""

from __future__ import annotations

import difflib
import glob
import importlib.util
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from hfdist.config.batch import BatchPlan, plan_batch
from hfdist.config.checks.environment import check_environment
from hfdist.config.checks.urls import scheme_of
from hfdist.config.data import SourceConfig, SourceKind
from hfdist.config.run import TRACKERS, RunConfig
from hfdist.errors import ConfigError
from hfdist.topology import Topology


def check_run(
    config: RunConfig, *, world_size: int | None = None, environment: Mapping[str, str] | None = None
) -> tuple[Topology, BatchPlan]:
    """Check what can be checked before anything large is imported.

    Args:
        config: composed.
        world_size: processes that are to be started; None: as the launcher says in the environment.
        environment: of the processes; None: this one's.

    Returns:
        This process's place (rank 0's where `world_size` is given), and the batch arithmetic.

    Raises:
        ConfigError: too few processes, sizes that do not divide, a variable against the config, a path without
            anything, a tracker that is not there.
    """
    check_environment(config, os.environ if environment is None else environment)
    topology, batch = plan_run(config, world_size=world_size, environment=environment)
    for section in ("sources", "eval_sources"):
        for name, source in getattr(config.data, section).items():
            _check_source(f"data.{section}.{name}.path", source)
    _check_folder("model.name", config.model.name)
    _check_folder("model.tokenizer.name", config.model.tokenizer.name)
    _check_writable("run.dir", config.run.dir)
    _check_trackers(config.report.to)
    return topology, batch


def plan_run(
    config: RunConfig, *, world_size: int | None = None, environment: Mapping[str, str] | None = None
) -> tuple[Topology, BatchPlan]:
    """Find the place of a process and the batch arithmetic; arguments as of `check_run`.

    Raises:
        ConfigError: too few processes, or sizes that do not divide.
    """
    degrees = config.strategy.degrees
    if world_size is None:
        topology = Topology.from_environment(degrees, environment)
    else:
        topology = Topology.of(degrees, world_size=world_size)
    batch = plan_batch(
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch_size,
        data_size=topology.data_size,
        sequence_length=config.data.sequence_length,
        lanes=config.data.lanes,
    )
    return topology, batch


def _check_source(key: str, source: SourceConfig) -> None:
    path = source.path
    if path is None or scheme_of(path) is not None or (source.kind is SourceKind.hub and not _is_local(path)):
        return
    if not _exists(path):
        allowed = "a file, a folder, or a glob (quote it)" if source.kind is SourceKind.files else "a folder"
        raise ConfigError("no file is there", where=key, found=path, allowed=allowed, hint=_near(key, path))


def _check_folder(key: str, name: str | None) -> None:
    if name is not None and _is_local(name) and not os.path.exists(os.path.expanduser(name)):
        raise ConfigError(
            "there is no such folder",
            where=key,
            found=name,
            allowed="a Hub id, a folder, or a .gguf file",
            hint=_near(key, name),
        )


def _is_local(name: str) -> bool:
    """Whether it is a path, and no Hub id."""
    return name.startswith((".", "/", "~"))


def _exists(path: str) -> bool:
    full = os.path.expanduser(path)
    return os.path.lexists(full) or any(glob.iglob(full, recursive=True))


def _near(key: str, path: str) -> str | None:
    """What lies in the same folder under a similar name."""
    full = Path(os.path.expanduser(path))
    try:
        names = [other.name for other in full.parent.iterdir()]
    except OSError:
        return None
    near = difflib.get_close_matches(full.name, names, n=1)
    return f"{key}={Path(path).with_name(near[0])}" if near else None


def _check_writable(key: str, folder: str) -> None:
    """Make a folder in the first part of the path that is there: permissions alone do not tell, as of root in /proc."""
    path = Path(folder).absolute()
    there = next(part for part in (path, *path.parents) if os.path.lexists(part))
    try:
        with tempfile.TemporaryDirectory(prefix=".hfdist-", dir=there):
            pass
    except OSError as error:
        reason = f"the folder cannot be used: {error.strerror}"
        raise ConfigError(
            reason if os.path.isdir(there) else "a file is in the folder's place",
            where=key,
            found=folder,
            allowed="a writable folder",
            hint="run.dir=runs/first",
        ) from error


def _check_trackers(names: list[str]) -> None:
    for name in names:
        if name not in TRACKERS:
            near = difflib.get_close_matches(name, TRACKERS, n=1, cutoff=0.5)
            raise ConfigError(
                "transformers has no such tracker",
                where="report.to",
                found=name,
                allowed=", ".join(sorted(TRACKERS)),
                hint=f"report.to=[{near[0] if near else ''}]",
            )
        modules = TRACKERS[name]
        if all(importlib.util.find_spec(module) is None for module in modules):
            raise ConfigError(
                "the tracker's package is not installed",
                where="report.to",
                found=name,
                hint=f"report.to=[], or pip install {modules[0]}",
            )
