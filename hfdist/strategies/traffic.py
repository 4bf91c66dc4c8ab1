"""The traffic of a rank in a step, in closed form from a few sizes: the parts of which each Strategy makes its sum.

Axes have the same names as in measurements of the bytes that a run has sent.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import TypedDict, Unpack

from hfdist.config.batch import BatchPlan
from hfdist.config.strategy import Compression, ContextMethod, StrategyConfig
from hfdist.config.task import TeacherSharding
from hfdist.sent_bytes import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, REDUCE_SCATTER, SEND, ring_bytes
from hfdist.topology import Topology

DATA, SHARD, REPLICATE = "data", "shard", "replicate"
"""Axes of gradients and state: all ranks with other tokens, the ranks that share one state, and the ranks that hold the
same shares of it."""
_DDP_BUCKET_BYTES = 25 * 2**20
"""Bytes of a bucket of gradients in DDP, by default."""


class Phase(Enum):
    """Parts of a step, in order."""

    forward = "forward"
    backward = "backward"
    optimizer = "optimizer step"


@dataclass(frozen=True, kw_only=True)
class Sent:
    """The bytes that one rank sends in a step by one kind of collective, over one axis."""

    axis: str
    """Name of the axis of the mesh."""
    kind: str
    """Kind of the collective, such as `all_reduce`."""
    size: int
    """Number of ranks that take part."""
    stride: int
    """Distance from one rank that takes part to the next, in ranks."""
    num_bytes: float
    """Bytes that this rank sends in all calls of a step."""
    calls: float
    """Number of calls of the collective in a step."""
    hidden_by: Phase | None = None
    """The phase beside which the calls can run; None: the rank waits for them."""
    microbatches: int = 1
    """Number of micro batches of a step in which there are such calls; the time of the others hides nothing."""


class When(TypedDict, total=False):
    """The fields of `Sent` that say beside what a collective runs, as keyword arguments."""

    hidden_by: Phase | None
    microbatches: int


@dataclass(frozen=True, kw_only=True)
class TensorSizes:
    """Elements that one plan for tensor ranks divides and exchanges."""

    divided: int = 0
    """Parameters of which each rank has a part."""
    embedded: int = 0
    """Elements summed for each token after the embedding; 0: the embedding is whole on each rank."""
    summed: int = 0
    """Elements summed for each token in the forward of the blocks."""
    gathered: int = 0
    """Elements gathered for each token in the forward of the blocks."""
    summed_backward: int = 0
    """Elements summed for each token in the backward of the blocks."""
    calls: int = 0
    """Collectives of the forward of all blocks; the backward has about as many."""


@dataclass(frozen=True, kw_only=True)
class FrozenSizes:
    """Sizes of a frozen model that runs beside the trained one, and only in forwards."""

    weight_bytes: float
    """Bytes of all parameters."""
    gathered_bytes: float
    """The most bytes that are whole at a time where ranks share them: a block, and parameters in no block."""
    num_blocks: int
    """Number of blocks."""
    sequence_flops: float
    """FLOPs of a forward of one sequence."""
    sharding: TeacherSharding
    """How ranks share the parameters."""


@dataclass(frozen=True, kw_only=True)
class StepSizes:
    """Sizes of a whole model, in elements, and of the arithmetic of a step."""

    parameters: int
    """Elements of all parameters, tied ones once."""
    blocks: int
    """Elements of all blocks, experts included."""
    num_blocks: int
    """Number of blocks."""
    hidden: int
    """Width of the hidden states between blocks."""
    queries: int
    """Width of the queries of all heads together."""
    keys: int
    """Width of the keys of all heads together; the values have the same."""
    head_size: int
    """Width of one head."""
    embedding: int = 0
    """Elements of the input embedding."""
    is_tied: bool = False
    """Whether the head is the embedding."""
    trained_share: float = 1.0
    """Share of all parameters that is trained."""
    small: int = 0
    """Elements of the small tensors that ZeRO-3 keeps whole, by its key `stage3_param_persistence_threshold`."""
    experts: int = 0
    """Elements of all experts of all blocks."""
    num_expert_blocks: int = 0
    """Number of blocks with experts."""
    chosen_experts: int = 0
    """Number of experts that are chosen for a token."""
    frozen: FrozenSizes | None = None
    """Sizes of a frozen model that runs beside this one; None: there is none."""
    tensor: TensorSizes = field(default_factory=TensorSizes)
    """Sizes of the plan for `strategy.tensor` ranks."""
    weight_bytes: int = 4
    """Bytes of an element of the weights, of their gradients, and of the hidden states between blocks."""
    compute_bytes: int = 4
    """Bytes of an element of the results of matrix products."""
    recomputes: bool = False
    """Whether the backward runs the blocks' forward again."""
    sequence_tokens: int | None = None
    """Number of tokens that the model reads of a sequence; None: all tokens of the sequence."""
    embeddings: int = 0
    """Elements of the embeddings of all texts of a step, which all ranks get before they train on them, by a forward of
    their own; 0: there are none."""
    is_gpu: bool = True
    """Whether ranks compute on GPUs, and not on CPUs."""
    stepped_whole: tuple[int, ...] = ()
    """Elements of each trained parameter that the optimizer must see whole, in order."""
    worst_stage_share: float | None = None
    """Share of the parameters that the pipeline rank with most has; None: all pipeline ranks have equally many."""

    @property
    def passes(self) -> int:
        """Number of times that a step reads each micro batch."""
        return 2 if self.embeddings else 1

    @property
    def forwards(self) -> int:
        """Number of forwards of each block in a micro batch."""
        return self.passes + int(self.recomputes)


class Axes:
    """The parts of a rank's traffic in one layout; each part is empty for an axis of one rank.

    Args:
        topology: the ranks of the layout.
        batch: the micro batches of a step.
        config: `strategy.*`.
        sizes: the sizes of the model.
    """

    def __init__(self, topology: Topology, batch: BatchPlan, config: StrategyConfig, sizes: StepSizes) -> None:
        self.topology, self.batch, self.config, self.sizes = topology, batch, config, sizes
        read_tokens = sizes.sequence_tokens or batch.sequence_length
        self.tokens = batch.num_microbatches * batch.micro_batch_size * read_tokens / topology.context
        """Tokens of a step that go through this rank's part of the model."""
        self.stages_share = 1 / topology.pipeline
        """Share of the blocks that this rank's stages have."""

    @property
    def _sharded_axis(self) -> str:
        """Name of the axis whose ranks share state: without replicas, all data ranks."""
        return DATA if self.topology.replicate == 1 else SHARD

    def held(self) -> float:
        """Count the elements of a rank's parameters before they are sharded, without experts that ranks share out."""
        sizes, topology = self.sizes, self.topology
        divided = sizes.tensor.divided if topology.tensor > 1 else 0
        whole = sizes.parameters - divided + divided / topology.tensor
        if topology.expert > 1:
            whole -= sizes.experts
        return whole * (self.stages_share if sizes.worst_stage_share is None else sizes.worst_stage_share)

    def held_experts(self) -> float:
        """Count the elements of a rank's share of the experts; 0: experts are not shared out."""
        if self.topology.expert == 1:
            return 0.0
        return self.sizes.experts / self.topology.expert * self.stages_share

    def reduce(
        self,
        kind: str,
        axis: str,
        num_elements: float,
        *,
        calls: float,
        is_gradient: bool = True,
        of_experts: bool = False,
        **when: Unpack[When],
    ) -> Iterator[Sent]:
        """Give one collective of gradients or weights over an axis.

        Args:
            kind: kind of the collective.
            axis: DATA, SHARD or REPLICATE.
            num_elements: elements of the parameters in a step, frozen ones included.
            calls: number of calls in a step.
            is_gradient: whether gradients travel, which frozen parameters have not; else weights.
            of_experts: whether the parameters are experts that ranks share out.
            when: beside what it runs.
        """
        topology = self.topology
        # Neighbouring ranks hold other experts.
        distance = topology.expert if of_experts else 1
        size, stride = {
            DATA: (topology.data * topology.context // distance, topology.tensor * distance),
            SHARD: (topology.shard * topology.context // distance, topology.tensor * distance),
            REPLICATE: (topology.replicate, topology.shard * topology.context * topology.tensor),
        }[axis]
        axis = DATA if topology.replicate == 1 else axis
        num_elements *= self.sizes.trained_share if is_gradient else 1
        yield from self._send(kind, axis, size, stride, num_elements * self.sizes.weight_bytes, calls, **when)

    def average_gradients(self) -> Iterator[Sent]:
        """Give one all-reduce of all gradients at the end of a step, and another of the experts that ranks share."""
        calls = max(1, round(self.held() * self.sizes.weight_bytes / _DDP_BUCKET_BYTES))
        kind, share = self._compressed()
        # DDP reduces beside the last backward; where ranks have parts of parameters, gradients wait for the end.
        hidden_by = None if self.topology.divides_parameters else Phase.backward
        yield from self.reduce(kind, DATA, self.held() * share, calls=calls, hidden_by=hidden_by)
        yield from self.reduce(ALL_REDUCE, DATA, self.held_experts(), calls=1, of_experts=True)

    def _compressed(self) -> tuple[str, float]:
        """Give the kind of collective that DDP's gradients travel by, and the share of their bytes that travels."""
        config, item_bytes = self.config, self.sizes.weight_bytes
        match config.compression:
            case Compression.fp16 | Compression.bf16:
                return ALL_REDUCE, 2 / item_bytes
            case Compression.powersgd:
                # The share for matrices as wide as the hidden states; wider ones send a little less.
                return ALL_REDUCE, min(1.0, 2 * config.compression_rank / self.sizes.hidden)
            case Compression.topk:
                # Each rank sends numbers and their places.
                num_ranks = self.topology.data * self.topology.context
                return ALL_GATHER, num_ranks * config.compression_share * (1 + 4 / item_bytes)
            case Compression.none:
                return ALL_REDUCE, 1.0

    def shard_weights(self, *, again: float, microbatches: int, ends: Phase | None) -> Iterator[Sent]:
        """Give the collectives of FSDP2: weights gathered, gradients reduced to shards, shards averaged over replicas.

        Args:
            again: share of the weights that is gathered again for each backward.
            microbatches: how many times a step does this.
            ends: the phase beside which reductions run; None: the rank waits for them.
        """
        sizes, topology = self.sizes, self.topology
        calls, passes = (sizes.num_blocks * self.stages_share + 1) * microbatches, sizes.passes
        exchange = REDUCE_SCATTER if sizes.is_gpu else ALL_TO_ALL
        for held, of_experts in ((self.held(), False), (self.held_experts(), True)):
            reduce = partial(self.reduce, calls=calls, of_experts=of_experts, microbatches=microbatches)
            weights = held * microbatches
            gather = partial(reduce, ALL_GATHER, SHARD, is_gradient=False)
            yield from gather(weights * passes, calls=calls * passes, hidden_by=Phase.forward)
            weights_again = weights * again
            yield from reduce(ALL_GATHER, SHARD, weights_again, is_gradient=False, hidden_by=Phase.backward)
            yield from reduce(exchange, SHARD, weights, hidden_by=ends)
            shards = topology.shard * topology.context // (topology.expert if of_experts else 1)
            # Once in a step.
            calls_of_replicas = calls / microbatches
            yield from self.reduce(
                ALL_REDUCE, REPLICATE, held / shards, calls=calls_of_replicas, hidden_by=ends, of_experts=of_experts
            )

    def gather_frozen(self, frozen: FrozenSizes, num_ranks: int) -> Iterator[Sent]:
        """Give the collectives that gather a frozen model's weights for each forward, of a rank that runs it."""
        topology, times = self.topology, self.batch.num_microbatches
        axes = [self._sharded_axis] if topology.shard * topology.context > 1 else []
        axis = " x ".join([*axes, "tensor"] if topology.tensor > 1 or not axes else axes)
        num_bytes, calls = frozen.weight_bytes * times, (frozen.num_blocks + 1) * times
        yield from self._send(
            ALL_GATHER, axis, num_ranks, 1, num_bytes, calls, hidden_by=Phase.forward, microbatches=times
        )

    def exchange_embeddings(self) -> Iterator[Sent]:
        """Give the collectives that bring the embeddings of all texts, their gradients and losses to all ranks.

        All are in float32.
        """
        topology, num_bytes = self.topology, 4 * self.sizes.embeddings
        degrees = {"pipeline": topology.pipeline, "data": topology.data * topology.context, "tensor": topology.tensor}
        axis = " x ".join(name for name, degree in degrees.items() if degree > 1)
        yield from self._send(ALL_REDUCE, axis, topology.world_size, 1, num_bytes, 1)
        yield from self._send(BROADCAST, axis, topology.world_size, 1, num_bytes * (1 + 1 / self.sizes.hidden), 2)

    def gather_parts(self) -> Iterator[Sent]:
        """Give the exchanges by which tensor and expert ranks, which have parts of parameters, step them whole."""
        topology, (divided, experts, _) = self.topology, self._stepped_whole()
        yield from self._exchange_parts("tensor", topology.tensor, 1, divided)
        yield from self._exchange_parts("expert", topology.expert, topology.tensor * topology.context, experts)

    def gather_shards(self) -> Iterator[Sent]:
        """Give the exchanges by which ranks with FSDP2's shards of parameters step them whole."""
        topology, (divided, experts, others) = self.topology, self._stepped_whole()
        axis, ranks = self._sharded_axis, topology.shard * topology.context
        yield from self._exchange_parts(axis, ranks, topology.tensor, experts + others)
        yield from self._exchange_parts(f"{axis} x tensor", ranks * topology.tensor, 1, divided)

    def gather_runs(self, num_elements: float) -> Iterator[Sent]:
        """Give the exchanges, in float32, by which ZeRO's ranks step `num_elements` elements of parameters whole."""
        ranks = self.topology.data * self.topology.context
        yield from self._exchange_parts(DATA, ranks, self.topology.tensor, num_elements, item_bytes=4)

    def _stepped_whole(self) -> tuple[int, int, int]:
        """Give the elements of parameters that are stepped whole: divided by tensor ranks, of experts, all others."""
        elements, sizes = sum(self.sizes.stepped_whole), self.sizes
        experts = min(elements, sizes.experts)
        divided = min(elements - experts, sizes.tensor.divided) if self.topology.tensor > 1 else 0
        return divided, experts, elements - experts - divided

    def _exchange_parts(
        self, axis: str, size: int, stride: int, num_elements: float, item_bytes: int | None = None
    ) -> Iterator[Sent]:
        """Give an exchange of parts of parameters and gradients to the parameters' owners, and of new parts back."""
        held = num_elements / size * self.stages_share * (item_bytes or self.sizes.weight_bytes)
        yield from self._send(ALL_TO_ALL, axis, size, stride, 3 * held, 3)

    def model_axes(self) -> Iterator[Sent]:
        """Give the collectives by which the tensor, context, expert and pipeline ranks of a replica run the model."""
        yield from self._tensor()
        yield from self._context()
        yield from self._expert()
        yield from self._pipeline()

    def _tensor(self) -> Iterator[Sent]:
        sizes, of_plan, tokens = self.sizes, self.sizes.tensor, self.tokens * self.stages_share
        add, calls = self._on_tensor, of_plan.calls * self.batch.num_microbatches * self.stages_share
        num_sums = calls * (sizes.forwards + 1)
        written, read = of_plan.summed * sizes.compute_bytes, of_plan.summed_backward * sizes.weight_bytes
        summed = 0.0
        if self.config.sequence:
            # A module's input is gathered in the forward and once in the backward, of its sum a rank keeps its tokens;
            # gradients go the other way. The last block's output is gathered, too, and so is the gradient by the first
            # one's input.
            ranks = self._rank_of_stage()
            ends = self.tokens * (2 if ranks[0] == ranks[-1] else 1) * sizes.hidden * sizes.weight_bytes
            yield from add(ALL_GATHER, tokens * (read * 2 + written) + ends, 3 * calls)
            yield from add(REDUCE_SCATTER, tokens * (written * sizes.forwards + read), num_sums)
            # What is looked up, and the gradient by the last states.
            num_sums = 2 * self.batch.num_microbatches
        else:
            summed = tokens * (written * sizes.forwards + read)
        if of_plan.embedded:
            # What is looked up; of the loss in chunks the gradient by the last states, and four numbers for each row.
            summed += tokens * (2 * of_plan.embedded + 4) * sizes.weight_bytes
        yield from add(ALL_REDUCE, summed, num_sums)
        yield from add(ALL_GATHER, tokens * of_plan.gathered * sizes.compute_bytes * sizes.forwards, calls)
        # Gradients of what is whole on each tensor rank, or the shards of these.
        whole = (sizes.parameters - of_plan.divided - sizes.experts) * self.stages_share * sizes.trained_share
        if self.config.shards_state:
            # FSDP2 divides them: ZeRO does not go with tensor ranks.
            whole /= self.topology.shard * self.topology.context
        yield from add(ALL_REDUCE, whole * sizes.weight_bytes, 1)

    def _on_tensor(self, kind: str, num_bytes: float, calls: float) -> Iterator[Sent]:
        return self._send(kind, "tensor", self.topology.tensor, 1, num_bytes, calls)

    def _context(self) -> Iterator[Sent]:
        sizes, topology = self.sizes, self.topology
        own_tokens = self.tokens * self.stages_share / topology.tensor
        item_bytes, calls = sizes.compute_bytes, sizes.num_blocks * self.batch.num_microbatches * self.stages_share

        def add(kind: str, num_elements: float, num_calls: float) -> Iterator[Sent]:
            size, num_bytes = topology.context, num_elements * item_bytes
            return self._send(kind, "context", size, topology.tensor, num_bytes, num_calls * calls)

        if self.gathers_keys:
            keys = 2 * own_tokens * topology.context * sizes.keys * sizes.num_blocks
            yield from add(ALL_GATHER, keys * sizes.forwards, 2 * sizes.forwards)
            yield from add(REDUCE_SCATTER, keys, 2)
        else:
            # Queries, keys, values and outputs.
            states = own_tokens * 2 * (sizes.queries + sizes.keys) * sizes.num_blocks
            yield from add(ALL_TO_ALL, states * (sizes.forwards + 1), 4 * (sizes.forwards + 1))

    @property
    def gathers_keys(self) -> bool:
        """Whether context ranks gather keys and values, in place of exchanging heads."""
        if self.config.context_method is not ContextMethod.auto:
            return self.config.context_method is ContextMethod.gather
        # Not all numbers of heads are divided.
        degree, head = self.topology.context * self.topology.tensor, self.sizes.head_size
        return any(width // head % degree != 0 for width in (self.sizes.queries, self.sizes.keys))

    def _expert(self) -> Iterator[Sent]:
        sizes, topology = self.sizes, self.topology
        # Each chosen expert gets the token and sends it back; of both there is a gradient.
        routed = self.tokens * self.stages_share / topology.tensor * sizes.chosen_experts * sizes.hidden
        times = 2 * (sizes.forwards + 1) * sizes.num_expert_blocks
        calls = times * self.batch.num_microbatches * self.stages_share
        stride = topology.tensor * topology.context
        num_bytes = routed * times * sizes.compute_bytes
        yield from self._send(ALL_TO_ALL, "expert", topology.expert, stride, num_bytes, calls)

    def _pipeline(self) -> Iterator[Sent]:
        topology, sizes = self.topology, self.sizes
        stride = topology.data * topology.context * topology.tensor
        crossed = self._crossed_boundaries()
        sent_tokens = self.tokens / (topology.tensor if self.config.sequence else 1)
        num_bytes = crossed * sent_tokens * sizes.hidden * sizes.weight_bytes
        calls = crossed * self.batch.num_microbatches
        yield from self._send(SEND, "pipeline", topology.pipeline, stride, num_bytes, calls)
        if sizes.is_tied:
            # The first and the last rank give it one gradient.
            shared = sizes.embedding * sizes.trained_share * sizes.weight_bytes
            if sizes.tensor.embedded:
                shared /= topology.tensor
            ranks = self._rank_of_stage()
            size = 2 if ranks[0] != ranks[-1] else 1
            yield from self._send(ALL_REDUCE, "pipeline", size, stride * (topology.pipeline - 1), shared, 1)

    def _crossed_boundaries(self) -> int:
        """Count the messages of the rank that sends most, for each micro batch: outputs to the next, gradients back."""
        messages: Counter[int] = Counter()
        for rank, next_rank in itertools.pairwise(self._rank_of_stage()):
            if rank != next_rank:
                # Outputs go on in each pass, and gradients come back once.
                messages[rank] += self.sizes.passes
                messages[next_rank] += 1
        return max(messages.values(), default=0)

    def _rank_of_stage(self) -> tuple[int, ...]:
        """Give the pipeline rank of each stage."""
        if self.topology.pipeline == 1:
            return (0,)
        # Imported here: other layouts save the time.
        from hfdist.pipeline.schedule import rank_of_stage, stages_per_rank

        schedule = self.config.schedule
        return rank_of_stage(schedule, self.topology.pipeline, stages_per_rank(schedule, self.config.stages_per_rank))

    @staticmethod
    def _send(
        kind: str, axis: str, size: int, stride: int, whole_bytes: float, calls: float, **when: Unpack[When]
    ) -> Iterator[Sent]:
        if size > 1 and whole_bytes > 0:
            sent = ring_bytes(kind, whole_bytes, size)
            yield Sent(axis=axis, kind=kind, size=size, stride=stride, num_bytes=sent, calls=calls, **when)


def cut_elements(sizes: tuple[int, ...], num_parts: int) -> int:
    """Count the elements of parameters that a cut divides, when they lie in a row that is cut into equal parts.

    sizes 3 4 5, 2 parts      a a a b b b | b c c c c c      b is divided: 4 elements
    """
    part_size = sum(sizes) / num_parts
    num_cut, begin = 0, 0
    for size in sizes:
        end = begin + size
        if size and begin // part_size != (end - 1) // part_size:
            num_cut += size
        begin = end
    return num_cut
