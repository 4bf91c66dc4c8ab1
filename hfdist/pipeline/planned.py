"""A pipeline of which one rank exists, in a plan (hfdist/planning): what would come from others has a block's form.

A plan assumes that hidden states alone travel, as `Carry` calls them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from hfdist.pipeline.channel import P2PChannel
from hfdist.pipeline.stage_io import Activations, Header, TensorMeta
from hfdist.pipeline.timeline import Recorder


@dataclass(frozen=True)
class PlannedPipeline:
    """What a plan knows instead of other ranks."""

    header: Header
    """Header of what the first block hands on; its tensors have the shape [sequences, tokens, width]."""
    recorder: Recorder
    """Recorder that is told of each action."""
    receives_early: bool
    """Whether stages receive early, as the channel of the run does."""


class PlannedChannel(P2PChannel):
    """Gives stages what ranks would send that do not exist, and drops what goes to them.

    Args:
        planned: what is known instead.
        stages: the blocks of every stage.
        shape: sequences and tokens of a micro batch on this rank.
    """

    def __init__(
        self,
        rank_of_stage: tuple[int, ...],
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        planned: PlannedPipeline,
        stages: tuple[range, ...],
        shape: tuple[int, int],
    ) -> None:
        super().__init__(rank_of_stage, group, device)
        self.receives_early = planned.receives_early
        self._stages = stages
        leaves = (
            replace(leaf, shape=(*shape, *leaf.shape[2:])) if isinstance(leaf, TensorMeta) else leaf
            for leaf in planned.header.leaves
        )
        self._header = Header(planned.header.spec, tuple(leaves))

    def send(self, stage: int, activations: Activations | None) -> None:
        """Hand over on this rank."""
        if self.rank_of_stage[stage] == self._own_rank:
            super().send(stage, activations)

    def receive(self, stage: int) -> Activations | None:
        """Give what was handed over, or empty tensors."""
        if self.rank_of_stage[stage - 1] == self._own_rank:
            return super().receive(stage)
        metas = self._header.metas
        tensors = (
            torch.empty(m.shape, dtype=m.dtype, device=self.device).requires_grad_(m.requires_grad) for m in metas
        )
        packed = self._header.pack(tuple(tensors))
        last_block = self._stages[stage - 1].stop - 1
        return Activations({f"{last_block}.{at.split('.')[1]}": value for at, value in packed.outputs.items()})
