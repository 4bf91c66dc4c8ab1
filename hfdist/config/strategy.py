"""`strategy.*`: the layout, that is the degrees of parallelism and how state is sharded."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from hfdist.config.ranges import limited
from hfdist.errors import ConfigError
from hfdist.topology import MODEL_AXES, OWN_AXES, LauncherPlace, Mesh, Topology, read_launcher

Schedule = Enum(
    "Schedule",
    {
        "gpipe": "gpipe",
        "1f1b": "1f1b",
        "interleaved_1f1b": "interleaved_1f1b",
        "interleaved_zero_bubble": "interleaved_zero_bubble",
        "zbv": "zbv",
        "dualpipev": "dualpipev",
        "auto": "auto",
    },
)
"""Schedules of torch.distributed.pipelining. Made by a call, since `1f1b` cannot be written as an attribute.

auto: the one whose step is the shortest by the times of blocks, which the start of a run measures; see
hfdist/pipeline/choose_schedule.py. Until then, and in plans, it counts as 1f1b.
"""

ONE_F_ONE_B = Schedule["1f1b"]


class Sharding(Enum):
    """What is sharded over the data ranks: nothing, optimizer state, + gradients, + parameters (FSDP2 too)."""

    none = "none"
    zero1 = "zero1"
    zero2 = "zero2"
    zero3 = "zero3"
    fsdp2 = "fsdp2"

    @property
    def is_deepspeed(self) -> bool:
        """Whether DeepSpeed does it."""
        return self in (Sharding.zero1, Sharding.zero2, Sharding.zero3)


class Offload(Enum):
    """Where the optimizer's state is kept and stepped; under FSDP2 with the shards of parameters and gradients."""

    none = "none"
    cpu = "cpu"


class Compression(Enum):
    """How gradients travel in DDP."""

    none = "none"
    fp16 = "fp16"
    bf16 = "bf16"
    powersgd = "powersgd"
    """Gradients as two narrow matrices."""
    topk = "topk"
    """Only the largest entries of gradients."""


class Balance(Enum):
    """What is made equal over the ranks of a pipeline."""

    parameters = "parameters"
    flops = "flops"
    measured = "measured"


class ContextMethod(Enum):
    """How attention sees the tokens of all ranks that share a sequence."""

    auto = "auto"
    """ulysses where its degree divides all numbers of heads, else gather."""
    ulysses = "ulysses"
    gather = "gather"


@dataclass(kw_only=True)
class StrategyConfig:
    """A degree that is not given is 1; the data degree is what is left of the processes."""

    sharding: Sharding = Sharding.none
    """What ranks share: none | zero1 (optimizer state) | zero2 (+ gradients) | zero3, fsdp2 (+ parameters)."""
    data: int | None = limited(None, at_least=1)
    """Data-parallel degree; null: all processes that are left.

    A number makes another count an error.
    """
    min_data: int = limited(1, at_least=1)
    """Fewest data ranks with which a run starts: a launcher that started one process is noticed."""
    replicate: int = limited(1, at_least=1)
    """fsdp2: groups of data ranks that each hold all of the state (HSDP)."""
    pipeline: int = limited(1, at_least=1)
    """Ranks of a pipeline, each with some of the model's blocks."""
    context: int = limited(1, at_least=1)
    """Ranks that share each sequence (not with ZeRO, but for zero1 in a pipeline)."""
    context_method: ContextMethod = ContextMethod.auto
    """How context ranks share a sequence: ulysses (all-to-all of heads) | gather (of keys and values) | auto."""
    tensor: int = limited(1, at_least=1)
    """Ranks that share the matrices of each layer; with none and fsdp2."""
    sequence: bool = False
    """Whether tensor ranks also share the tokens between attention and MLP: blocks keep less; about as much is sent."""
    expert: int = limited(1, at_least=1)
    """Data ranks that share the experts of each block; with none and fsdp2."""
    schedule: Schedule = ONE_F_ONE_B
    """Order of a pipeline: gpipe | 1f1b | interleaved_1f1b | interleaved_zero_bubble | zbv | dualpipev | auto.

    More stages a rank and the zero-bubble schedules idle less, but compute longer. auto times the model's blocks at the
    start, and takes the schedule whose step would be the shortest of those that fit in memory.
    """
    stages_per_rank: int | None = limited(None, at_least=1)
    """Stages of a rank; null: 1, or 2 where the schedule is made of several."""
    balance: Balance = Balance.flops
    """What the stages share evenly: parameters | flops | measured."""
    blocks_per_stage: list[int] | None = None
    """In place of balance: blocks of each stage, such as [7,8,8,7]."""
    offload: Offload = Offload.none
    """Where ZeRO and fsdp2 keep and step the optimizer's state: none (the device) | cpu."""
    compression: Compression = Compression.none
    """How gradients of ddp travel: none | fp16, bf16 (half the bytes) | powersgd | topk (far less)."""
    compression_rank: int = limited(1, at_least=1)
    """powersgd: width of the two matrices that stand for one gradient."""
    compression_share: float = limited(0.01, above=0, at_most=1)
    """topk: share of the entries that travel, those with the largest size."""
    compression_warmup_steps: int = limited(10, at_least=0)
    """powersgd, topk: first steps, which send all."""
    reshard: bool | None = None
    """fsdp2: whether gathered parameters are freed after a block's forward; null: if there is no pipeline.

    They are gathered again for the backward; a pipeline keeps them for a whole step.
    """
    prefetch: int = limited(0, at_least=0)
    """fsdp2: blocks that are gathered ahead; 0: one, and only in the backward."""
    deepspeed: dict[str, Any] = field(default_factory=dict)
    """Further keys of DeepSpeed's config; on the command line also a file of it, as ds.json.

    They are merged over the generated ones and checked against its schema. Those that follow from other keys are
    `auto`, or equal to what follows.
    """

    @property
    def defers_gradients(self) -> bool:
        """Whether each rank keeps what it does not send of a gradient for the next step."""
        return self.compression in (Compression.powersgd, Compression.topk)

    @property
    def num_uncompressed_steps(self) -> int:
        """First steps of a run that send gradients whole, where later ones do not."""
        return self.compression_warmup_steps if self.defers_gradients else 0

    @property
    def shards_state(self) -> bool:
        """Whether the optimizer steps a share of the parameters on each rank."""
        return self.sharding is not Sharding.none

    @property
    def partitions_in_constructor(self) -> bool:
        """Whether each parameter is partitioned as soon as the model's constructor has made it: ZeRO-3."""
        return self.sharding is Sharding.zero3

    @property
    def frees_after_forward(self) -> bool:
        """`reshard`, decided."""
        return self.pipeline == 1 if self.reshard is None else self.reshard

    @property
    def mesh(self) -> Mesh:
        """The mesh on the fewest processes that will do."""
        degrees = {axis: getattr(self, axis) for axis in ("replicate", *MODEL_AXES)}
        return Mesh(data=self.data or self.min_data, **degrees)

    def topology(self, world_size: int | None = None, *, rank: int = 0) -> Topology:
        """Give the place of `rank` among so many processes; None: the place that the launcher gave this process.

        Raises:
            ConfigError: the degrees do not multiply to the number of processes.
        """
        if world_size is None:
            place = read_launcher()
        else:
            place = LauncherPlace(world_size=world_size, rank=rank, local_rank=rank)
        data = self.data or max(1, place.world_size // self.mesh.model)
        if data * self.mesh.model != place.world_size or data < self.min_data:
            raise _wrong_world_size(self, place.world_size)
        replicas = "the data ranks are divided into replicas, so their number must divide the data degree"
        _check_divides("replicate", self.replicate, data, "data ranks", replicas)
        experts = "experts are spread over the data ranks of one replica, so the expert degree must divide their number"
        _check_divides("expert", self.expert, data // self.replicate, "data ranks in a replica", experts)
        return Topology.of(replace(self.mesh, data=data), rank=place.rank, local_rank=place.local_rank)


def _check_divides(axis: str, degree: int, number: int, of_what: str, problem: str) -> None:
    if number % degree != 0:
        fitting = [d for d in range(1, number + 1) if number % d == 0]
        allowed, hint = ", ".join(map(str, fitting)), f"strategy.{axis}={max(d for d in fitting if d <= degree)}"
        found = f"{degree} with {number} {of_what}"
        raise ConfigError(problem, where=f"strategy.{axis}", found=found, allowed=allowed, hint=hint)


def _wrong_world_size(strategy: StrategyConfig, world_size: int) -> ConfigError:
    asked = {axis: getattr(strategy, axis) for axis in ("data", *OWN_AXES)}
    product = " x ".join(f"{axis} {size}" for axis, size in asked.items() if size not in (None, 1)) or "one process"
    example, model = strategy.mesh.world_size, strategy.mesh.model
    if strategy.data is not None:
        needed = f"exactly {example} ({product})"
    else:
        needed = f"{example} or more" + (f", a multiple of {model} ({product})" if model > 1 else "")
    if example == 1:
        start = "launch.processes=1, and no launcher"
    elif world_size == 1:
        start = (
            f"launch.processes={example} (or accelerate launch --multi_gpu --num_processes {example} ...: without "
            "--multi_gpu, or with --cpu, it starts one process, whatever the number)"
        )
    else:
        start = f"launch.processes={example}, or that number for the launcher"
    where = "strategy.data" if strategy.data is not None or strategy.min_data > 1 else "strategy"
    found = f"{world_size} process{'es' if world_size > 1 else ''}"
    other = simple_layout(strategy, world_size)
    # Who has started several processes wants them.
    hint = f"{other}; or {start}" if example == 1 else f"{start}; or another layout, such as {other}"
    what = "the layout does not fit the number of processes"
    return ConfigError(what, where=where, found=found, allowed=needed, hint=hint)


def simple_layout(strategy: StrategyConfig, world_size: int) -> str:
    """Give the overrides of a layout for any model on so many processes, whatever else sets these degrees."""
    keys = [f"strategy.{axis}=1" for axis in OWN_AXES if getattr(strategy, axis) > 1]
    if world_size == 1:
        data = [] if strategy.data in (None, 1) else ["strategy.data=1"]
        return " ".join(["strategy=single", *data, *keys])
    data = [] if strategy.data is None else ["strategy.data=null"]
    return " ".join(["strategy=ddp", *data, *keys])
