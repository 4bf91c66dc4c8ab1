"""`cluster.*`: the machines of a job, from a file of conf/cluster/ or of the user's own, and overrides.

A cluster is no part of a run's config: the same run may go on on other machines.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path

from hfdist.config.composition.section import Section
from hfdist.config.ranges import LIMIT, Limit, limited
from hfdist.config.schema import Key
from hfdist.errors import ConfigError

GROUP = "cluster"
_DEFAULT = "default"
_PREFIX = f"{GROUP}."


def _text(pattern: str, allowed: str) -> str | None:
    limit = Limit(allowed, lambda value: re.fullmatch(pattern, value) is not None)
    made: str | None = field(default=None, metadata={LIMIT: limit})
    return made


def _word() -> str | None:
    return _text(r"[A-Za-z0-9_][\w.,:@/+=-]*", "one word of letters, digits and _ . , : @ / + = -")


def _dns_name() -> str | None:
    return _text(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?", "a name of Kubernetes: small letters, digits, - and .")


@dataclass(kw_only=True)
class SlurmSection:
    """`cluster.slurm.*`."""

    partition: str | None = _word()
    """Value of --partition."""
    account: str | None = _word()
    """Value of --account."""
    qos: str | None = _word()
    """Value of --qos."""
    mounts: list[str] = field(default_factory=list)
    """Mounts of the image: ["/shared:/shared"]."""
    options: list[str] = field(default_factory=list)
    """Further options of sbatch, as they stand: ["--exclusive", "--constraint=h100"]."""


class PodStarter(Enum):
    """Which object of Kubernetes starts the machines' pods."""

    jobset = "jobset"
    trainjob = "trainjob"
    """The TrainJob of Kubeflow Trainer, with a runtime of its own."""


@dataclass(kw_only=True)
class KubernetesSection:
    """`cluster.kubernetes.*`."""

    kind: PodStarter = PodStarter.jobset
    """Kind of the job: jobset | trainjob (of Kubeflow Trainer)."""
    namespace: str | None = _dns_name()
    """Namespace; null: that of kubectl."""
    queue: str | None = _dns_name()
    """Local queue of Kueue."""
    claim: str | None = _dns_name()
    """PersistentVolumeClaim for the run's folder; all machines write to it."""
    mount: str = "/shared"
    """Where the claim is mounted, and where the run starts."""
    shared_memory_gib: int = limited(16, at_least=1)
    """Size of /dev/shm, for data workers and NCCL."""
    node_selector: dict[str, str] = field(default_factory=dict)
    """Labels of the machines: {node.kubernetes.io/instance-type: p5.48xlarge}."""


@dataclass(kw_only=True)
class SkypilotSection:
    """`cluster.skypilot.*`."""

    infra: str | None = _word()
    """Where machines are, such as aws, gcp/us-central1 or k8s; null: the cheapest."""
    accelerator: str | None = _word()
    """Kind of the GPUs, such as H100; cluster.processes of them on each machine."""
    spot: bool = False
    """Whether machines may be taken away."""
    volume: str | None = _word()
    """Volume of SkyPilot for the run's folder; all machines write to it."""
    mount: str = "/shared"
    """Where the volume is mounted, and where the run starts."""
    install: list[str] = field(default_factory=list)
    """Lines of shell that set a new machine up, as they stand, with hfdist."""


class Capacity(Enum):
    """How a queue of AWS ParallelCluster gets its machines."""

    ONDEMAND = "ONDEMAND"
    SPOT = "SPOT"
    CAPACITY_BLOCK = "CAPACITY_BLOCK"


@dataclass(kw_only=True)
class AwsSection:
    """`cluster.aws.*`."""

    region: str | None = _word()
    """Region, such as us-east-1."""
    subnet: str | None = _word()
    """Subnet of the machines: subnet-..."""
    head_subnet: str | None = _word()
    """Subnet of the head node; null: the same."""
    key_name: str | None = _word()
    """Key pair of EC2 for ssh."""
    os: str = "ubuntu2404"
    """System of all machines."""
    instance: str | None = _word()
    """Type of the machines, such as p5.48xlarge."""
    head_instance: str = "m7i.xlarge"
    """Type of the head node."""
    capacity: Capacity = Capacity.ONDEMAND
    """How machines are bought: ONDEMAND | SPOT | CAPACITY_BLOCK."""
    efa: bool = False
    """Whether machines have the fast network of large instances, in one placement group."""
    shared_gib: int = limited(1200, at_least=1200)
    """Size of FSx for Lustre under /shared: 1200, 2400, or a multiple of 2400."""


@dataclass(kw_only=True)
class ClusterConfig:
    """`cluster.*`: the machines of a job, and how a process starts there."""

    nodes: int = limited(1, at_least=1)
    """Number of machines."""
    processes: int = limited(1, at_least=1)
    """Processes on each machine; with GPUs one for each."""
    gpus: bool = False
    """Whether each process has a GPU."""
    cpus: int | None = limited(None, at_least=1)
    """Cores for each process; null: as the cluster gives."""
    memory_gib: int | None = limited(None, at_least=1)
    """Memory of each machine; null: as the cluster gives."""
    hours: float | None = limited(None, above=0)
    """Longest that one job of SLURM may take; null: as the cluster allows."""
    interface: str | None = _text(r"[A-Za-z0-9][\w.-]{0,14}", "the name of one interface, as `ip link` shows it")
    """Network interface between the machines, such as ib0; null: the one that leads to the others."""
    grace_seconds: int = limited(300, at_least=60)
    """Time from the signal to the end by force: more than a step plus a save."""
    join_seconds: int = limited(900, at_least=30)
    """How long machines wait for each other at the start."""
    max_restarts: int = limited(3, at_least=0)
    """How often in a row a job is started again after a lost rank, without getting further."""
    same_files: bool = True
    """Whether this machine sees the files that the job's machines see: paths and packages are checked here."""
    folder: str | None = None
    """Where the run starts on the machines; null: where `hfdist job` is called."""
    python: str = "python"
    """Interpreter that has hfdist."""
    image: str | None = _text(r"[A-Za-z0-9/.][\w.:@/+#-]*", "the name of an image, without spaces")
    """Container image, where jobs run in one."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables of the job: {NCCL_DEBUG: WARN}."""
    setup: list[str] = field(default_factory=list)
    """Lines of shell before the run, as they stand: ["module load cuda", "source .venv/bin/activate"]."""
    slurm: SlurmSection = field(default_factory=SlurmSection)
    """Settings for to=slurm, and the job of to=parallelcluster."""
    kubernetes: KubernetesSection = field(default_factory=KubernetesSection)
    """Settings for to=kubernetes."""
    skypilot: SkypilotSection = field(default_factory=SkypilotSection)
    """Settings for to=skypilot."""
    aws: AwsSection = field(default_factory=AwsSection)
    """Settings for to=parallelcluster: the cluster itself."""

    @property
    def world_size(self) -> int:
        """Processes of the whole job."""
        return self.nodes * self.processes


@cache
def _section() -> Section[ClusterConfig]:
    return Section(ClusterConfig, GROUP)


def describe_keys() -> str:
    """Give a line for each key, for a command's help."""
    return _section().describe()


def cluster_keys() -> Mapping[str, Key]:
    """Every key by its name, with `cluster.` before it."""
    return _section().keys


def compose_cluster(name: str, overrides: Sequence[str], own: Path | None = None) -> ClusterConfig:
    """Merge a file and overrides over the defaults, and check them; ConfigError: the first mistake.

    Args:
        name: name of a file in a folder `cluster`, or the path of a file.
        overrides: overrides such as `cluster.nodes=2`.
        own: a folder of the user's own, laid out as `conf/`, whose files win.
    """
    path = _section().find(name, own, key=GROUP, hint=f"{GROUP}={_DEFAULT} cluster.nodes=2")
    cluster: ClusterConfig = _section().compose(path, overrides)
    _check(cluster)
    # A job's file quotes them, so that its shell expands no `~`.
    for key in ("folder", "python"):
        value = getattr(cluster, key)
        if value is not None and cluster.same_files:
            setattr(cluster, key, os.path.expanduser(value))
        elif value is not None:
            refuse_home(f"{_PREFIX}{key}", value)
    return cluster


def refuse_home(key: str, path: str) -> None:
    """Raise a ConfigError where a path on machines that do not see this one's files begins with `~`."""
    if path.startswith("~"):
        what, allowed = "the home folder need not be the same on the machines", "an absolute path"
        raise ConfigError(what, where=key, found=path, allowed=allowed, hint="cluster.same_files=true where it is")


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
