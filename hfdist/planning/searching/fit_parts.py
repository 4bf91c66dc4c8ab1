"""Fits the costs of a part of a model: a line over the number of sequences, through a trace of one and one of two."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from hfdist.config.train import Recompute
from hfdist.planning.costs import OpCosts
from hfdist.planning.searching.constants import Growth, Mode, PartCosts, Work


@dataclass
class PartTrace:
    """Operations and bytes of one part of a model, measured with some number of sequences."""

    forward: OpCosts = field(default_factory=OpCosts)
    backward: OpCosts = field(default_factory=OpCosts)
    kept: float = 0.0
    """Bytes of activations that are kept from the forward to the backward."""
    working: float = 0.0
    """The most bytes of activations in the backward, without the kept ones."""
    whole: float = 0.0
    """The bytes of `kept` in tensors as wide as the hidden states: each tensor rank has them whole."""

    def __add__(self, other: PartTrace) -> PartTrace:
        return PartTrace(
            self.forward + other.forward,
            self.backward + other.backward,
            self.kept + other.kept,
            max(self.working, other.working),
            self.whole + other.whole,
        )


def fit_part(
    item_bytes: int,
    named: Mapping[str, nn.Parameter],
    plain: Mapping[int, PartTrace],
    by_mode: Mapping[Mode, Mapping[int, PartTrace]],
) -> PartCosts:
    """Fit the costs of a part, of which each grows along a line with the number of sequences.

    Args:
        item_bytes: bytes of an element of the weights.
        named: the part's parameters, by name.
        plain: traces without activation checkpointing, by the number of sequences: 1 and 2.
        by_mode: traces for each mode of activation checkpointing, by the number of sequences: 1 and 2.
    """
    # How much of what grows with the sequences is whole on each tensor rank.
    growing = max(plain[2].kept - plain[1].kept, 1.0)
    whole_share = min(1.0, (plain[2].whole - plain[1].whole) / growing)
    _, inputs = _line(by_mode[Recompute.all], lambda trace: trace.kept)

    def kept(mode: Mode) -> Growth:
        fixed, each = _line(by_mode[mode], lambda trace: trace.kept)
        # The blocks' inputs are whole on each tensor rank. Of the rest the same share is as without checkpointing.
        whole = min(each, inputs + (each - inputs) * whole_share) if mode is not None else each * whole_share
        return Growth(fixed=fixed, whole=whole, divided=each - whole)

    def spread(traces: Mapping[int, PartTrace], value: Callable[[PartTrace], float]) -> Growth:
        fixed, each = _line(traces, value)
        return Growth(fixed=fixed, whole=each * whole_share, divided=each * (1 - whole_share))

    def work(traces: Mapping[int, PartTrace], costs: Callable[[PartTrace], OpCosts]) -> Work:
        of_one = costs(traces[1])
        moved = spread(traces, lambda trace: costs(trace).moved_bytes)
        return Work(flops=of_one.flops, moved=moved, kernels=of_one.kernels)

    return PartCosts(
        parameters=sum(p.nbytes for p in named.values()) / item_bytes,
        trained=float(sum(p.numel() for p in named.values() if p.requires_grad)),
        forward=work(plain, lambda trace: trace.forward),
        backward={mode: work(traces, lambda trace: trace.backward) for mode, traces in by_mode.items()},
        kept={mode: kept(mode) for mode in by_mode},
        working={mode: spread(traces, lambda trace: trace.working) for mode, traces in by_mode.items()},
    )


def with_chunks(epilogue: PartCosts, head: nn.Module | None) -> PartCosts:
    """Give the costs of the epilogue, with chunks of logits told apart from what grows with the head's weights.

    Neither depends on the number of sequences. The gradient of the weights is shared by ranks as the weights are
    (`fixed`); a chunk of logits has the same size on any rank (`constant`).
    """
    of_weights = 0.0 if head is None else float(sum(p.nbytes for p in head.parameters() if p.requires_grad))
    working = {
        mode: replace(grown, fixed=min(grown.fixed, of_weights), constant=max(0.0, grown.fixed - of_weights))
        for mode, grown in epilogue.working.items()
    }
    return replace(epilogue, working=working)


def _line(traces: Mapping[int, PartTrace], value: Callable[[PartTrace], float]) -> tuple[float, float]:
    """Give the share of a value that does not grow with the number of sequences, and what each sequence adds."""
    of_one, of_two = value(traces[1]), value(traces[2])
    each = max(0.0, of_two - of_one)
    return max(0.0, of_one - each), each
