"""`strategy.*`: the layout, that is the degrees of parallelism and how state is sharded."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hfdist.config.ranges import limited
from hfdist.topology import Degrees

Schedule = Enum(
    "Schedule",
    {
        "gpipe": "gpipe",
        "1f1b": "1f1b",
        "interleaved_1f1b": "interleaved_1f1b",
        "interleaved_zero_bubble": "interleaved_zero_bubble",
        "zbv": "zbv",
        "dualpipev": "dualpipev",
    },
)
"""Schedules of torch.distributed.pipelining. Made by a call, since `1f1b` cannot be written as an attribute."""

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
    data: int | None = limited(None, at_least=1)
    """Data-parallel degree; null: all processes that are left. A number makes another count an error."""
    min_data: int = limited(1, at_least=1)
    replicate: int = limited(1, at_least=1)
    """Groups of data ranks that each hold all of the state. With more than one, FSDP2 is called HSDP."""
    pipeline: int = limited(1, at_least=1)
    context: int = limited(1, at_least=1)
    """Ranks that share each sequence."""
    context_method: ContextMethod = ContextMethod.auto
    tensor: int = limited(1, at_least=1)
    expert: int = limited(1, at_least=1)
    schedule: Schedule = ONE_F_ONE_B
    """What the stages of a pipeline do when. More stages a rank and the zero-bubble schedules idle less."""
    stages_per_rank: int | None = limited(None, at_least=1)
    balance: Balance = Balance.flops
    blocks_per_stage: list[int] | None = None
    offload: Offload = Offload.none
    compression: Compression = Compression.none
    compression_rank: int = limited(1, at_least=1)
    """Width of PowerSGD's matrices."""
    compression_share: float = limited(0.01, above=0, at_most=1)
    """Share of a gradient's entries that topk sends."""
    compression_warmup_steps: int = limited(10, at_least=0)
    """First steps of a run, in which powersgd and topk send all."""
    reshard: bool | None = None
    """Whether FSDP2 frees a block's gathered parameters after its forward, and gathers them again for its backward.

    None: it does so, but a pipeline keeps them for a whole step."""
    prefetch: int = limited(0, at_least=0)
    """Blocks whose parameters FSDP2 gathers ahead of the one that computes; 0: one, and only in the backward."""
    deepspeed: dict[str, Any] = field(default_factory=dict)
    """Further keys of DeepSpeed's own config, merged over the generated one and checked against its schema.

    Those that follow from other keys are `auto`, or equal to what follows."""

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
    def frees_after_forward(self) -> bool:
        """`reshard`, decided."""
        return self.pipeline == 1 if self.reshard is None else self.reshard

    @property
    def degrees(self) -> Degrees:
        """How many ways each axis is split."""
        return Degrees(
            data=self.data,
            min_data=self.min_data,
            replicate=self.replicate,
            pipeline=self.pipeline,
            context=self.context,
            tensor=self.tensor,
            expert=self.expert,
        )
