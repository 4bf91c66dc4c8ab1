"""Who am I: the degrees of parallelism and this process's place in them, as one frozen value without torch.

Processes are numbered with the tensor axis fastest and the pipeline axis slowest, because neighbours in rank
usually share a machine and tensor parallelism talks the most:

    rank = ((pipeline_index * data + data_index) * context + context_index) * tensor + tensor_index

The data ranks are `replicate` groups of `shard` neighbours (HSDP): what is sharded lies once in each group.

Expert parallelism needs no ranks of its own: experts are spread over `expert` neighbouring data ranks of a replica, and
then the shard axis is `expert_shard` groups of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from hfdist.errors import ConfigError

_OF_A_LAUNCHER = re.compile(
    r"(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_\w+|ROLE_\w+|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+|ACCELERATE_\w+"
    r"|(PMI|OMPI_COMM_WORLD|MV2_COMM_WORLD)_\w+)"
)


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """How many ways each axis is split. `data=None`: whatever is left of the processes, `min_data` at least."""

    data: int | None = None
    min_data: int = 1
    replicate: int = 1
    pipeline: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    @property
    def model(self) -> int:
        """Processes that hold one replica of the model between them."""
        return self.pipeline * self.context * self.tensor


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The place of one process in the layout. Build it with `Topology.of` or `Topology.from_environment`."""

    world_size: int = 1
    rank: int = 0
    local_rank: int = 0
    data: int = 1
    replicate: int = 1
    pipeline: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    AXES = ("pipeline", "replicate", "shard", "context", "tensor")

    @classmethod
    def of(cls, degrees: Degrees, *, world_size: int, rank: int = 0, local_rank: int | None = None) -> Topology:
        """Give the place of `rank` among `world_size` processes.

        Raises:
            ConfigError: the degrees do not multiply to the number of processes.
        """
        data = degrees.data if degrees.data is not None else max(1, world_size // degrees.model)
        if data * degrees.model != world_size or data < degrees.min_data:
            raise _wrong_world_size(degrees, world_size)
        replicas = "the data ranks are divided into replicas, so their number must divide the data degree"
        _check_divides("replicate", degrees.replicate, data, "data ranks", replicas)
        experts = "experts are spread over the data ranks of one replica, so the expert degree must divide their number"
        _check_divides("expert", degrees.expert, data // degrees.replicate, "data ranks in a replica", experts)
        return cls(
            world_size=world_size,
            rank=rank,
            local_rank=rank if local_rank is None else local_rank,
            data=data,
            replicate=degrees.replicate,
            pipeline=degrees.pipeline,
            context=degrees.context,
            tensor=degrees.tensor,
            expert=degrees.expert,
        )

    @classmethod
    def from_environment(cls, degrees: Degrees) -> Topology:
        """Read the place that the launcher gave this process. No launcher: one process."""
        place = read_launcher()
        return cls.of(degrees, world_size=place.world_size, rank=place.rank, local_rank=place.local_rank)

    @property
    def shard(self) -> int:
        """Number of ranks over which state is sharded."""
        return self.data // self.replicate

    @property
    def degrees(self) -> dict[str, int]:
        """Size of each axis of the mesh, and `expert`, which lies within the data ranks."""
        return {axis: getattr(self, axis) for axis in (*self.AXES, "expert")}

    @property
    def mesh_shape(self) -> dict[str, int]:
        """Axis name to size, slowest axis first: the shape of the device mesh."""
        sizes = {axis: [(axis, getattr(self, axis))] for axis in self.AXES}
        if self.expert > 1:
            sizes["shard"] = [("expert_shard", self.shard // self.expert), ("expert", self.expert)]
        return dict(size for of_axis in sizes.values() for size in of_axis)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Give the place of any rank along each axis of `mesh_shape`."""
        places = {}
        for axis, size in reversed(self.mesh_shape.items()):
            rank, places[axis] = divmod(rank, size)
        return places

    @property
    def data_size(self) -> int:
        """Number of shares into which each global batch is divided."""
        return self.data

    @property
    def data_rank(self) -> int:
        """Which share of the global batch this process reads; equal for all ranks of one model replica."""
        return self.rank // (self.context * self.tensor) % self.data

    @property
    def pipeline_rank(self) -> int:
        """Place along the pipeline axis."""
        return self.rank // (self.data * self.context * self.tensor)

    @property
    def pipelines(self) -> list[range]:
        """Ranks of each pipeline, in the order of stages: they have one place on all other axes."""
        num_pipelines = self.world_size // self.pipeline
        return [range(place, self.world_size, num_pipelines) for place in range(num_pipelines)]

    @property
    def is_first_of_replica(self) -> bool:
        """Whether this process is the first of those that hold one copy of the model between them."""
        return self.rank == self.data_rank * self.context * self.tensor

    @property
    def is_main(self) -> bool:
        """Whether this process writes the reports."""
        return self.rank == 0

    def describe(self) -> str:
        """One line for people, for example `8 processes: pipeline 2 x data 4`."""
        shape = {axis: getattr(self, axis) for axis in self.AXES}
        if self.replicate == 1:
            shape = {"data" if axis == "shard" else axis: size for axis, size in shape.items()}
        axes = [f"{axis} {size}" for axis, size in shape.items() if size > 1]
        if self.expert > 1:
            axes.append(f"expert {self.expert} (within data)")
        processes = f"{self.world_size} process{'es' if self.world_size > 1 else ''}"
        return f"{processes}: {' x '.join(axes)}" if axes else processes


@dataclass(frozen=True, kw_only=True)
class LauncherPlace:
    """What the launcher said in the environment."""

    world_size: int = 1
    rank: int = 0
    local_rank: int = 0
    is_given: bool = False
    """Whether there is a launcher."""
    local_world_size: int = 1
    """Processes of this machine; all, where it does not say."""
    says_machine: bool = False
    """Whether it says how many processes are on this machine."""

    @property
    def has_other_machines(self) -> bool:
        """Whether it has started processes on other machines, too; False where it does not say."""
        return self.local_world_size < self.world_size


def read_launcher(environment: Mapping[str, str] | None = None) -> LauncherPlace:
    """Read RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE: the only place in hfdist that does.

    Raises:
        ConfigError: a value that is not a number in range.
    """
    values = os.environ if environment is None else environment
    world_size = _number(values, "WORLD_SIZE", 1)
    rank = _number(values, "RANK", 0)
    if world_size < 1 or not 0 <= rank < world_size:
        what, where = "the launcher's environment does not name a process", "RANK, WORLD_SIZE"
        found, allowed = f"RANK={rank} WORLD_SIZE={world_size}", "0 <= RANK < WORLD_SIZE"
        hint = "unset both: launch.processes=2 starts two processes"
        raise ConfigError(what, where=where, found=found, allowed=allowed, hint=hint)
    local_rank = _number(values, "LOCAL_RANK", 0)
    return LauncherPlace(
        world_size=world_size,
        rank=rank,
        local_rank=local_rank,
        is_given="RANK" in values,
        local_world_size=_number(values, "LOCAL_WORLD_SIZE", world_size),
        says_machine="LOCAL_WORLD_SIZE" in values,
    )


def _number(values: Mapping[str, str], name: str, default: int) -> int:
    text = values.get(name, str(default))
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError("not a whole number in the environment", where=name, found=text) from error


def _check_divides(axis: str, degree: int, number: int, of: str, what: str) -> None:
    if number % degree != 0:
        fitting = [d for d in range(1, number + 1) if number % d == 0]
        allowed, hint = ", ".join(map(str, fitting)), f"strategy.{axis}={max(d for d in fitting if d <= degree)}"
        found = f"{degree} with {number} {of}"
        raise ConfigError(what, where=f"strategy.{axis}", found=found, allowed=allowed, hint=hint)


def _wrong_world_size(degrees: Degrees, world_size: int) -> ConfigError:
    asked = {axis: getattr(degrees, axis) for axis in ("data", "pipeline", "context", "tensor")}
    product = " x ".join(f"{axis} {size}" for axis, size in asked.items() if size not in (None, 1)) or "one process"
    example = (degrees.data or degrees.min_data) * degrees.model
    if degrees.data is not None:
        needed = f"exactly {example} ({product})"
    else:
        needed = f"{example} or more" + (f", a multiple of {degrees.model} ({product})" if degrees.model > 1 else "")
    if example == 1:
        start = "launch.processes=1, and no launcher"
    elif world_size == 1:
        start = (
            f"launch.processes={example} (or accelerate launch --multi_gpu --num_processes {example} ...: without "
            "--multi_gpu, or with --cpu, it starts one process, whatever the number)"
        )
    else:
        start = f"launch.processes={example}, or that number for the launcher"
    where = "strategy.data" if degrees.data is not None or degrees.min_data > 1 else "strategy"
    found = f"{world_size} process{'es' if world_size > 1 else ''}"
    hint = f"{start}; or another layout, such as {simple_layout(degrees, world_size)}"
    what = "the layout does not fit the number of processes"
    return ConfigError(what, where=where, found=found, allowed=needed, hint=hint)


def simple_layout(degrees: Degrees, world_size: int) -> str:
    """Give the overrides of a layout for any model on so many processes, whatever else sets these degrees."""
    keys = [f"strategy.{axis}=1" for axis in ("pipeline", "context", "tensor") if getattr(degrees, axis) > 1]
    if world_size == 1:
        data = [] if degrees.data in (None, 1) else ["strategy.data=1"]
        return " ".join(["strategy=single", *data, *keys])
    data = [] if degrees.data is None else ["strategy.data=null"]
    return " ".join(["strategy=ddp", *data, *keys])


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Leave out what a launcher tells its ranks, for a process that is to be none of them."""
    return {name: value for name, value in environment.items() if not _OF_A_LAUNCHER.fullmatch(name)}
