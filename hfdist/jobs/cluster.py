"""`cluster.*`: the machines of a job, from a file of conf/cluster/ or of the user's own, and overrides.

The comments of conf/cluster/default.yaml say what each key means. A cluster is no part of a run's config: the same run
goes on elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hfdist.config.checks.urls import refuse_secrets
from hfdist.config.composition.files import display, list_options, read_config_text, shipped_folder
from hfdist.config.composition.overrides import COMMAND_LINE
from hfdist.config.ranges import LIMIT, Limit, limited
from hfdist.config.schema import Key, flatten, keys_of
from hfdist.errors import ConfigError, first_line, nearest

GROUP = "cluster"
_DEFAULT = "default"
_PREFIX = f"{GROUP}."


def _text(pattern: str, allowed: str) -> Any:
    limit = Limit(allowed, lambda value: re.fullmatch(pattern, value) is not None)
    return field(default=None, metadata={LIMIT: limit})


def _word() -> Any:
    return _text(r"[A-Za-z0-9_][\w.,:@/+=-]*", "one word of letters, digits and _ . , : @ / + = -")


def _dns_name() -> Any:
    return _text(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?", "a name of Kubernetes: small letters, digits, - and .")


@dataclass(kw_only=True)
class SlurmSection:
    """`cluster.slurm.*`."""

    partition: str | None = _word()
    account: str | None = _word()
    qos: str | None = _word()
    mounts: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)


class PodStarter(Enum):
    """Which object of Kubernetes starts the machines' pods."""

    jobset = "jobset"
    trainjob = "trainjob"
    """Of Kubeflow Trainer, with a runtime of its own."""


@dataclass(kw_only=True)
class KubernetesSection:
    """`cluster.kubernetes.*`."""

    kind: PodStarter = PodStarter.jobset
    namespace: str | None = _dns_name()
    queue: str | None = _dns_name()
    claim: str | None = _dns_name()
    mount: str = "/shared"
    shared_memory_gib: int = limited(16, at_least=1)
    node_selector: dict[str, str] = field(default_factory=dict)


@dataclass(kw_only=True)
class SkypilotSection:
    """`cluster.skypilot.*`."""

    infra: str | None = _word()
    accelerator: str | None = _word()
    spot: bool = False
    volume: str | None = _word()
    mount: str = "/shared"
    install: list[str] = field(default_factory=list)


class Capacity(Enum):
    """How a queue of AWS ParallelCluster gets its machines."""

    ONDEMAND = "ONDEMAND"
    SPOT = "SPOT"
    CAPACITY_BLOCK = "CAPACITY_BLOCK"


@dataclass(kw_only=True)
class AwsSection:
    """`cluster.aws.*`."""

    region: str | None = _word()
    subnet: str | None = _word()
    head_subnet: str | None = _word()
    key_name: str | None = _word()
    os: str = "ubuntu2404"
    instance: str | None = _word()
    head_instance: str = "m7i.xlarge"
    capacity: Capacity = Capacity.ONDEMAND
    efa: bool = False
    shared_gib: int = limited(1200, at_least=1200)


@dataclass(kw_only=True)
class ClusterConfig:
    """`cluster.*`: the machines of a job, and how a process starts there."""

    nodes: int = limited(1, at_least=1)
    processes: int = limited(1, at_least=1)
    gpus: bool = False
    cpus: int | None = limited(None, at_least=1)
    memory_gib: int | None = limited(None, at_least=1)
    hours: float | None = limited(None, above=0)
    interface: str | None = _text(r"[A-Za-z0-9][\w.-]{0,14}", "the name of one interface, as `ip link` shows it")
    grace_seconds: int = limited(300, at_least=60)
    join_seconds: int = limited(900, at_least=30)
    max_restarts: int = limited(3, at_least=0)
    same_files: bool = True
    folder: str | None = None
    python: str = "python"
    image: str | None = _text(r"[A-Za-z0-9/.][\w.:@/+#-]*", "the name of an image, without spaces")
    environment: dict[str, str] = field(default_factory=dict)
    setup: list[str] = field(default_factory=list)
    slurm: SlurmSection = field(default_factory=SlurmSection)
    kubernetes: KubernetesSection = field(default_factory=KubernetesSection)
    skypilot: SkypilotSection = field(default_factory=SkypilotSection)
    aws: AwsSection = field(default_factory=AwsSection)

    @property
    def world_size(self) -> int:
        """Processes of the whole job."""
        return self.nodes * self.processes


@cache
def cluster_keys() -> Mapping[str, Key]:
    """Every key by its name, with `cluster.` before it."""
    return {key.name: key for key in keys_of(ClusterConfig, _PREFIX)}


def compose_cluster(name: str, overrides: Sequence[str], own: Path | None = None) -> ClusterConfig:
    """Merge a file and overrides over the defaults, and check them; ConfigError: the first mistake.

    Args:
        name: of a file in a folder `cluster`, or the path of a file.
        overrides: such as `cluster.nodes=2`.
        own: a folder of the user's own, laid out as `conf/`, whose files win.
    """
    config = OmegaConf.structured(ClusterConfig)
    path = _find_file(name, own)
    content = yaml.safe_load(read_config_text(path))
    given = [(f"{_PREFIX}{key}", value, display(path)) for key, value in content.items()]
    given += [(*_parse(override), COMMAND_LINE) for override in overrides]
    for key, value, place in given:
        config = _merge(config, key, value, place)
    try:
        values = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise ConfigError(f"a reference leads nowhere: {first_line(error)}", where=GROUP) from error
    assert isinstance(values, ClusterConfig)
    _check(values)
    return values


def _find_file(name: str, own: Path | None) -> Path:
    folders = [folder for folder in (own, shipped_folder()) if folder is not None]
    for path in (*(folder / GROUP / f"{name}.yaml" for folder in folders), Path(name).expanduser()):
        if path.is_file():
            return path
    known = sorted({option for folder in folders for option in list_options(folder, GROUP)})
    allowed = f"{', '.join(known)}, or the path of a file"
    hint = nearest(name, known, f"{GROUP}={{}}") or f"{GROUP}={_DEFAULT} cluster.nodes=2"
    raise ConfigError("there is no such cluster", where=GROUP, found=name, allowed=allowed, hint=hint)


def _parse(override: str) -> tuple[str, Any]:
    key, _, value = override.partition("=")
    try:
        parsed = OverridesParser.create().parse_override(override)
        if parsed.is_sweep_override() or parsed.is_add() or parsed.is_delete():
            raise HydraException("only key=value")
        refuse_secrets(parsed.value(), key, place=COMMAND_LINE)
        return parsed.key_or_group, parsed.value()
    except HydraException as error:
        what, hint = "this is not an override", f"quote it, for the shell and for the config: '{key}=\"{value}\"'"
        raise ConfigError(what, where=COMMAND_LINE, found=override, allowed="key=value", hint=hint) from error


def _merge(config: Any, key: str, value: Any, place: str) -> Any:
    for name, _ in _members(key, value):
        if name not in cluster_keys():
            hint = nearest(name, cluster_keys(), "{}=...", cutoff=0.6)
            section = cluster_keys().get(name.rpartition(".")[0])
            known = [k.name for k in cluster_keys().values() if section is None or k.name.startswith(section.name)]
            what, names = f"there is no key `{name}`", ", ".join(known)
            raise ConfigError(what, where=f"{name} ({place})", allowed=names, hint=hint)
    nested = value
    for part in reversed(key.removeprefix(_PREFIX).split(".")):
        nested = {part: nested}
    try:
        return OmegaConf.merge(config, nested)
    except OmegaConfBaseException as error:
        what = f"this value does not fit: {first_line(error)}"
        # A member of a free mapping is no key itself.
        allowed = (cluster_keys().get(key) or cluster_keys()[key.rpartition(".")[0]]).allowed
        raise ConfigError(what, where=f"{key} ({place})", found=value, allowed=allowed) from error


def _members(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Give the keys that a value sets, each with its full name."""
    known = cluster_keys().get(key)
    if isinstance(value, dict) and (known is None or known.type != dict[str, str]):
        for name, item in value.items():
            yield from _members(f"{key}.{name}", item)
    else:
        # One member of a free mapping, as in cluster.environment.NCCL_DEBUG=INFO.
        section = cluster_keys().get(key.rpartition(".")[0])
        yield (section.name if section is not None and section.type == dict[str, str] else key), value


def _check(cluster: ClusterConfig) -> None:
    for key, known in cluster_keys().items():
        value: Any = cluster
        for part in key.removeprefix(_PREFIX).split("."):
            value = getattr(value, part)
        if value is not None and known.limit is not None and not known.limit.accepts(value):
            raise ConfigError("this value is not possible", where=key, found=value, allowed=known.allowed)
        # OmegaConf takes a list or a mapping in a list of texts.
        members = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        if not all(isinstance(member, str) for member in members):
            raise ConfigError("each value must be text", where=key, found=value, allowed=known.allowed)
        # What a line of a job file holds must not begin another.
        for name, text in flatten(value, key) if isinstance(value, (str, list, dict)) else ():
            if isinstance(text, str) and not all(c.isprintable() or c == "\t" for c in text):
                what = "a value of a cluster is one line"
                raise ConfigError(what, where=name, found=text, allowed="text without control characters")
    for name in cluster.environment:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ConfigError("this is no name of a variable", where=f"{_PREFIX}environment", found=name)
    for option in cluster.slurm.options:
        if not option.startswith("-"):
            hint = f"--{option}"
            raise ConfigError("this is no option", where=f"{_PREFIX}slurm.options", found=option, hint=hint)
    if cluster.hours is not None and cluster.hours * 3600 < 2 * cluster.grace_seconds:
        what = "the job would be told to stop before it has run for a while"
        found = f"{cluster.grace_seconds}, with cluster.hours={cluster.hours:g}"
        allowed = f"at most half of the time: {int(cluster.hours * 1800)}"
        raise ConfigError(what, where=f"{_PREFIX}grace_seconds", found=found, allowed=allowed)
