"""Who am I: the degrees of parallelism and this process's place in them, as one frozen value without torch.

Processes are numbered with the tensor axis fastest and the pipeline axis slowest, because neighbours in rank
usually share a machine and tensor parallelism talks the most:

    rank = ((pipeline_index * data + data_index) * context + context_index) * tensor + tensor_index

The data ranks are `replicate` groups of `shard` neighbours (HSDP): what is sharded lies once in each group.

Expert parallelism needs no ranks of its own: experts are spread over `expert` neighbouring data ranks of a replica, and
then the shard axis is `expert_shard` groups of them.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

from hfdist.errors import ConfigError

_LAUNCHER_VARIABLES = re.compile(
    r"(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_\w+|ROLE_\w+|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+|ACCELERATE_\w+"
    r"|(PMI|OMPI_COMM_WORLD|MV2_COMM_WORLD)_\w+)"
)


OWN_AXES = ("pipeline", "context", "tensor")
"""Axes whose ranks hold one replica of the model between them."""
MODEL_AXES = (*OWN_AXES, "expert")
"""Axes whose ranks exchange something to run the model. Each is a degree of `Mesh`, and the key `strategy.NAME`."""
PARTS = {"tensor": "parameters", "expert": "experts"}
"""Axes whose ranks have parts of each block, and of what."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """How many ways each axis is split."""

    data: int = 1
    """Number of shares into which each global batch is divided."""
    replicate: int = 1
    pipeline: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    AXES = ("pipeline", "replicate", "shard", "context", "tensor")

    @property
    def model(self) -> int:
        """Processes that hold one replica of the model between them."""
        return math.prod(getattr(self, axis) for axis in OWN_AXES)

    @property
    def world_size(self) -> int:
        """Number of all processes."""
        return self.data * self.model

    @property
    def shard(self) -> int:
        """Number of ranks over which state is sharded, without those of a context group."""
        return self.data // self.replicate

    @property
    def splits_model(self) -> bool:
        """Whether several ranks compute one loss together, so that none may do a part of a step alone."""
        return any(getattr(self, axis) > 1 for axis in MODEL_AXES)

    @property
    def divides_parameters(self) -> bool:
        """Whether ranks have parts of the parameters before these are sharded."""
        return any(getattr(self, axis) > 1 for axis in ("pipeline", *PARTS))

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
    def pipelines(self) -> list[range]:
        """Ranks of each pipeline, in the order of stages: they have one place on all other axes."""
        num_pipelines = self.world_size // self.pipeline
        return [range(place, self.world_size, num_pipelines) for place in range(num_pipelines)]

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
class Topology(Mesh):
    """The place of one process in the mesh. `StrategyConfig.topology` finds it."""

    rank: int = 0
    local_rank: int = 0

    @classmethod
    def of(cls, mesh: Mesh, *, rank: int = 0, local_rank: int = 0) -> Topology:
        """Give the place of a rank in a mesh, or in what has one."""
        degrees = {one.name: getattr(mesh, one.name) for one in fields(Mesh)}
        return cls(**degrees, rank=rank, local_rank=local_rank)

    @property
    def data_rank(self) -> int:
        """Which share of the global batch this process reads; equal for all ranks of one model replica."""
        return self.rank // (self.context * self.tensor) % self.data

    @property
    def pipeline_rank(self) -> int:
        """Place along the pipeline axis."""
        return self.rank // (self.data * self.context * self.tensor)

    @property
    def is_first_of_replica(self) -> bool:
        """Whether this process is the first of those that hold one copy of the model between them."""
        return self.rank == self.data_rank * self.context * self.tensor

    @property
    def is_main(self) -> bool:
        """Whether this process writes the reports."""
        return self.rank == 0


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
        raise ConfigError(
            "the launcher's environment does not name a process",
            where="RANK, WORLD_SIZE",
            found=f"RANK={rank} WORLD_SIZE={world_size}",
            allowed="0 <= RANK < WORLD_SIZE",
            hint="unset both: launch.processes=2 starts two processes",
        )
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


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Leave out what a launcher tells its ranks, for a process that is to be none of them."""
    return {name: value for name, value in environment.items() if not _LAUNCHER_VARIABLES.fullmatch(name)}
