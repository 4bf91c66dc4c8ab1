"""`cluster.*`: the machines of a job, from a file of conf/cluster/ or of the user's own, and overrides.

The comments of conf/cluster/default.yaml say what each key means. A cluster is no part of a run's config: the same run
goes on elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from hfdist.config.composition.section import Section
from hfdist.config.ranges import LIMIT, Limit, limited
from hfdist.config.schema import Key
from hfdist.errors import ConfigError

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
    """The TrainJob of Kubeflow Trainer, with a runtime of its own."""


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
def _section() -> Section:
    return Section(ClusterConfig, GROUP)


def cluster_keys() -> Mapping[str, Key]:
    """Every key by its name, with `cluster.` before it."""
    return _section().keys


def compose_cluster(name: str, overrides: Sequence[str], own: Path | None = None) -> ClusterConfig:
    """Merge a file and overrides over the defaults, and check them; ConfigError: the first mistake.

    Args:
        name: of a file in a folder `cluster`, or the path of a file.
        overrides: such as `cluster.nodes=2`.
        own: a folder of the user's own, laid out as `conf/`, whose files win.
    """
    path = _section().find(name, own, key=GROUP, hint=f"{GROUP}={_DEFAULT} cluster.nodes=2")
    cluster: ClusterConfig = _section().compose(path, overrides)
    _check(cluster)
    return cluster


def _check(cluster: ClusterConfig) -> None:
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
