"""Constants of a model, part by part, from which formulas compute memory and costs of any layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from hfdist.config.train import Recompute
from hfdist.pipeline.costs import Costs
from hfdist.planning.costs import OpCosts
from hfdist.strategies.traffic import StepSizes

Mode = Recompute | None
"""What activation checkpointing computes again; None: it is off."""
MODES: tuple[Mode, ...] = (None, Recompute.cheap, Recompute.all)
"""All of them, the fastest first."""


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Bytes that grow with the sequences of a micro batch."""

    fixed: float = 0.0
    """Bytes for any number of sequences: what goes with the weights, as their copies in half precision do."""
    constant: float = 0.0
    """Bytes for any number of sequences, on any rank: a chunk of logits."""
    whole: float = 0.0
    """Bytes for each sequence, on each tensor rank."""
    divided: float = 0.0
    """Bytes for each sequence, shared by the tensor ranks."""

    def of(self, sequences: float, tensor: int = 1, held: float = 1.0) -> float:
        """Give the bytes of so many sequences on one of `tensor` ranks, which holds this share of the weights."""
        return self.constant + self.fixed * held + sequences * (self.whole + self.divided / tensor)


@dataclass(frozen=True, kw_only=True)
class Work:
    """Operations of a forward or a backward, of one sequence."""

    flops: float = 0.0
    """Shared by tensor ranks."""
    moved: Growth = field(default_factory=Growth)
    kernels: int = 0
    """Number of kernels, for any number of sequences."""

    def of(self, sequences: float, tensor: int = 1, held: float = 1.0) -> OpCosts:
        """Give the costs of so many sequences on one of `tensor` ranks, which holds this share of the weights."""
        return OpCosts(
            flops=self.flops * sequences / tensor,
            moved_bytes=self.moved.of(sequences, tensor, held),
            kernels=self.kernels,
        )


@dataclass(frozen=True, kw_only=True)
class PartCosts:
    """One block, or what runs before or after all blocks."""

    parameters: float
    """Number of elements, those of another size as so many of `weight_bytes`; of a tied head none."""
    trained: float
    """Number of elements that are not frozen."""
    forward: Work
    backward: Mapping[Mode, Work]
    """Work of the backward by mode, with what is computed again."""
    kept: Mapping[Mode, Growth]
    """Bytes that the forward leaves for the backward, the output included."""
    working: Mapping[Mode, Growth]
    """The most bytes above these while the backward runs, gradients of the part's own parameters included; of what runs
    after the blocks while the loss is computed, too."""


@dataclass(frozen=True, kw_only=True)
class ShareOfParts:
    """Which part of the parameters a rank has by tensor and expert degree, before they are sharded."""

    prologue: float = 1.0
    kinds: tuple[float, ...]
    """Shares of each kind of block."""
    epilogue: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ModelConstants:
    """All that formulas need to know of a model, for one length of sequences and one precision."""

    kinds: tuple[PartCosts, ...]
    """Each kind of block once."""
    kind_of_block: tuple[int, ...]
    prologue: PartCosts
    """The embedding."""
    epilogue: PartCosts
    """Final norm, head and loss."""
    tied_parameters: float = 0.0
    """Elements that the head shares with the embedding; a pipeline has them twice."""
    sequence_length: int
    boundary_bytes: float
    """Bytes of one sequence between two blocks."""
    weight_bytes: float = 4.0
    """Bytes of one element of the weights."""
    gradient_bytes: float = 4.0
    optimizer_bytes: float = 8.0
    """Bytes of the optimizer's state of one trained element, without master weights."""
    half_bytes: float | None = None
    """Bytes of one element in the type of the arithmetic, where that is not the weights' type."""
    shares: Mapping[tuple[int, int], ShareOfParts]
    """Shares by (tensor, expert) degree; degrees that are missing do not go with this model."""
    sequence_degrees: frozenset[int] = frozenset()
    """Tensor degrees with which ranks can share the tokens between attention and MLP."""
    has_pipelines: bool = True
    """Whether stages of a pipeline can train it on the task's rows."""
    shares_tokens: bool = True
    """Whether ranks can share its sequences: what a token needs of others comes through attention."""
    balance: Costs
    """Costs by which a pipeline's stages share the blocks."""
    flops_per_sequence: float
    """FLOPs of forward and backward for one sequence, by the formula that MFU counts."""
    sizes: Mapping[int, StepSizes]
    """What traffic is computed from, by tensor degree."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the whole model."""
        return len(self.kind_of_block)

    @cached_property
    def kinds_of_parts(self) -> tuple[PartCosts, ...]:
        """`kinds` where tensor ranks share the tokens between attention and MLP, which read whole sequences."""
        sizes = self.sizes[min(self.sequence_degrees)]
        read = sizes.tensor.summed_backward / sizes.num_blocks * self.sequence_length * sizes.compute_bytes
        return tuple(_of_parts(kind, read) for kind in self.kinds)

    @property
    def parameters(self) -> float:
        """Elements of the whole model, tied ones once."""
        return (
            sum(self.kinds[kind].parameters for kind in self.kind_of_block)
            + self.prologue.parameters
            + self.epilogue.parameters
        )


def _of_parts(block: PartCosts, read: float) -> PartCosts:
    """Give the costs of a block of which `read` bytes of a sequence are made whole on each tensor rank."""
    whole = {mode: max(grown.whole, 1.0) for mode, grown in block.kept.items()}
    share = min(1.0, read / whole[None])
    # A rank keeps its part of what is made whole. Where cheap operations are computed again, it also keeps products
    # that are not yet summed.
    products = max(0.0, 1 - whole[Recompute.all] / whole[Recompute.cheap])
    shares = {None: 0.0, Recompute.cheap: products, Recompute.all: 0.0}

    def cut(growth: Growth, share: float) -> Growth:
        return replace(growth, whole=growth.whole * share, divided=growth.divided + growth.whole * (1 - share))

    return replace(
        block,
        forward=replace(block.forward, moved=cut(block.forward.moved, share)),
        backward={mode: replace(work, moved=cut(work.moved, share)) for mode, work in block.backward.items()},
        kept={mode: cut(grown, shares[mode]) for mode, grown in block.kept.items()},
        working={mode: cut(grown, share) for mode, grown in block.working.items()},
    )
