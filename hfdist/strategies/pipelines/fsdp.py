"""A pipeline whose stages are sharded over the data ranks by FSDP2.

Parameters are gathered at the start of a step and kept to its end, since gradients of all micro batches are whole until
then, too. Then gradients are reduced to shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hfdist.config.batch import BatchPlan
from hfdist.config.strategy import StrategyConfig
from hfdist.config.train import TrainConfig
from hfdist.pipeline.pipeline import Pipeline
from hfdist.strategies.base import check_no_scalars
from hfdist.strategies.engine import Batch, TrainerHooks
from hfdist.strategies.fsdp import ShardedEngine
from hfdist.strategies.fsdp_units import shard_by_blocks
from hfdist.strategies.pipelines.pipeline import PipelineEngine, PipelineStrategy
from hfdist.strategies.step_memory import Buffers, RankSizes, ShardFractions
from hfdist.strategies.traffic import Axes, Sent
from hfdist.topology import Topology


class _Step(nn.Module):
    """Has all that a rank holds; FSDP takes its forward for that of a step, and its backward for the end of it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, begin: torch.Tensor) -> torch.Tensor:
        return begin.clone()


class PipelineFsdpEngine(ShardedEngine, PipelineEngine):
    """The stages compute with gathered parameters, the optimizer and checkpoints see shards."""

    def _shard_stages(self, mesh: DeviceMesh) -> None:
        self._step, config = _Step(self.model), self._strategy.config
        unused = shard_by_blocks(self.model, self._step, mesh, config, self._parts)
        self._take_root(self._step, mesh, config.frees_after_forward, unused)

    def _make_pipeline(self) -> Pipeline:
        self._begin_step()
        self._wait_for_gathered()
        # Stages are made of gathered parameters: these are the same tensors in each step, with memory for it alone.
        pipeline = super()._make_pipeline()
        self._reshard()
        return pipeline

    def forward_backward(self, batch: Batch, num_items: torch.Tensor | None, hooks: TrainerHooks) -> torch.Tensor:
        """Run the schedule over gathered parameters; gradients are whole until its end."""
        self._reduce_after_backward(False)
        self._end = self._begin_step()
        return super().forward_backward(batch, num_items, hooks)

    @contextmanager
    def _for_forwards(self) -> Iterator[None]:
        self._begin_step()
        yield
        # A block that has not run is gathered as well.
        self._wait_for_gathered()
        self._reshard()

    def _begin_step(self) -> torch.Tensor:
        """Begin to gather all units; the backward of what it gives ends the step."""
        end: torch.Tensor = self._step(torch.zeros((), device=self._device, requires_grad=True))
        for unit in self._units:
            # The first forward of the unit waits for this.
            unit.unshard(async_op=True)
        return end

    def _wait_for_gathered(self) -> None:
        for unit in self._units:
            unit.unshard()

    def _reduce_after_backward(self, reduces: bool) -> None:
        """Say whether FSDP reduces gradients and frees what is gathered after the backwards that follow."""
        self._root.set_is_last_backward(reduces)
        self._root.set_requires_gradient_sync(reduces)
        self._root.set_reshard_after_backward(reduces)

    def _reduce_gradients(self) -> None:
        self._reduce_after_backward(True)
        # After a backward FSDP reduces all gradients that are left.
        self._end.backward()
        self._sum_shared()
        self._drop_unused_gradients()


class PipelineFsdpStrategy(PipelineStrategy):
    """`strategy.pipeline=N strategy.sharding=fsdp2`."""

    engine_class = PipelineFsdpEngine
    counts_all_experts = True

    def __init__(self, topology: Topology, batch: BatchPlan, strategy: StrategyConfig, train: TrainConfig) -> None:
        super().__init__(topology, batch, strategy, train)
        share = 1.0 / (topology.shard * topology.context)
        self.fractions = ShardFractions(weights=share, gradients=share, optimizer=share)

    def partition(self, model: nn.Module) -> None:
        """Partition a model as a pipeline does, and refuse parameters without a dimension: FSDP2 takes none."""
        check_no_scalars(model, "FSDP2")
        super().partition(model)

    def _state_traffic(self, axes: Axes) -> Iterable[Sent]:
        return axes.shard_weights(again=0.0, microbatches=1, ends=None)

    def _whole_traffic(self, axes: Axes) -> Iterable[Sent]:
        return axes.gather_shards()

    @classmethod
    def _buffers(cls, sizes: RankSizes) -> Buffers:
        return Buffers(gathered=sizes.elements * sizes.weight_bytes, reduced=sizes.trained * sizes.gradient_bytes)
