"""The costs of a part of a model as lines over the number of sequences, through a trace of one and one of two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from hfdist.config.train import Recompute
from hfdist.planning.costs import OpCosts
from hfdist.planning.searching.constants import Growth, Mode, PartCosts, Work


@dataclass
class PartTrace:
    """What was measured of one part with so many sequences."""

    forward: OpCosts = field(default_factory=OpCosts)
    backward: OpCosts = field(default_factory=OpCosts)
    kept: float = 0.0
    """Bytes of activations that are kept from the forward to the backward."""
    working: float = 0.0
    """Most bytes of activations beside these, in the backward."""
    whole: float = 0.0
    """Bytes of what is kept that are as wide as the hidden states."""

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
    """Fit a part's costs.

    Args:
        item_bytes: bytes of an element of the weights.
        named: the part's parameters, by name.
        plain: traces without activation checkpointing, by the number of sequences: 1 and 2.
        by_mode: the same for each mode of activation checkpointing.
    """
    one = plain[1]
    # How much of what grows with the sequences is whole on each tensor rank.
    growing = max(plain[2].kept - one.kept, 1.0)
    share = min(1.0, (plain[2].whole - one.whole) / growing)
    least = by_mode[Recompute.all]
    floor = max(0.0, least[2].kept - least[1].kept)

    def kept(mode: Mode, seen: Mapping[int, PartTrace]) -> Growth:
        fixed, line = _line({number: found.kept for number, found in seen.items()})
        # The blocks' inputs are whole, of the rest as much as without checkpointing.
        whole = min(line, floor + (line - floor) * share) if mode is not None else line * share
        return Growth(fixed=fixed, whole=whole, divided=line - whole)

    def spread(values: Mapping[int, float]) -> Growth:
        fixed, line = _line(values)
        return Growth(fixed=fixed, whole=line * share, divided=line * (1 - share))

    def work(values: Mapping[int, OpCosts]) -> Work:
        moved = spread({number: costs.moved_bytes for number, costs in values.items()})
        return Work(flops=values[1].flops, moved=moved, kernels=values[1].kernels)

    return PartCosts(
        parameters=sum(p.nbytes for p in named.values()) / item_bytes,
        trained=float(sum(p.numel() for p in named.values() if p.requires_grad)),
        forward=work({number: seen.forward for number, seen in plain.items()}),
        backward={
            mode: work({number: found.backward for number, found in seen.items()}) for mode, seen in by_mode.items()
        },
        kept={mode: kept(mode, seen) for mode, seen in by_mode.items()},
        working={
            mode: spread({number: found.working for number, found in seen.items()}) for mode, seen in by_mode.items()
        },
    )


def with_chunks(epilogue: PartCosts, head: nn.Module | None) -> PartCosts:
    """Tell what grows with the head's weights, as their gradient does, from chunks of logits."""
    of_weights = 0.0 if head is None else float(sum(p.nbytes for p in head.parameters() if p.requires_grad))
    working = {
        mode: replace(grown, fixed=min(grown.fixed, of_weights), constant=max(0.0, grown.fixed - of_weights))
        for mode, grown in epilogue.working.items()
    }
    return replace(epilogue, working=working)


def _line(values: Mapping[int, float]) -> tuple[float, float]:
    """Give what does not grow with the sequences, and what each adds."""
    each = max(0.0, values[2] - values[1])
    return max(0.0, values[1] - each), each
