"""A pipeline whose optimizer state is partitioned over the data ranks by DeepSpeed ZeRO-1.

Weights stay in float32, as without ZeRO, and half precision is autocast's: the arithmetic is the same in all layouts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from accelerate.utils import DeepSpeedOptimizerWrapper
from torch import nn

from hfdist.checkpoint.piece import Piece
from hfdist.collectives import gather_json
from hfdist.config.batch import BatchPlan
from hfdist.config.checks.deepspeed import AUTO, PLACE
from hfdist.config.plain_values import flatten
from hfdist.config.strategy import StrategyConfig
from hfdist.config.train import Precision, TrainConfig
from hfdist.errors import PartitionError
from hfdist.strategies.deepspeed import pieces_zero
from hfdist.strategies.deepspeed.buckets import bucket_elements, fit_buckets
from hfdist.strategies.deepspeed.deepspeed_config import generate
from hfdist.strategies.deepspeed.estimates import reduce_to_owners, with_master_weights
from hfdist.strategies.deepspeed.startup import start_deepspeed
from hfdist.strategies.deepspeed.step_hooks import hook_steps
from hfdist.strategies.pipelines.pipeline import PipelineEngine, PipelineStrategy
from hfdist.strategies.step_memory import Buffers, MemoryUse, RankSizes, ShardFractions
from hfdist.strategies.traffic import Axes, Sent, cut_elements
from hfdist.topology import Topology

if TYPE_CHECKING:
    from accelerate.optimizer import AcceleratedOptimizer

    from hfdist.strategies.deepspeed.flat_buffers import ZeroOptimizer

logger = logging.getLogger(__name__)


class PipelineZeroEngine(PipelineEngine):
    """DeepSpeed reduces and steps at the end of `forward_backward`, as it does in the Trainer without a pipeline."""

    steps_other_tensors = True
    clips_stepped = True
    # DeepSpeed reduces after the sum over stages, on each stage in its own order.
    _sums_over_stages_last = False
    _strategy: PipelineZeroStrategy

    def setup(
        self, prepared: nn.Module, optimizer: AcceleratedOptimizer, scaler: torch.amp.GradScaler | None
    ) -> DeepSpeedOptimizerWrapper:
        """Make DeepSpeed's optimizer of torch's."""
        import deepspeed

        super().setup(prepared, optimizer, scaler)
        self._check_every_rank_trains()
        for name, parameter in self.model.named_parameters():
            # By these two DeepSpeed knows what to count in the norm.
            parameter.model_parallel = True  # type: ignore[attr-defined]
            parameter.ds_pipe_replicated = name in self._io.counted_elsewhere  # type: ignore[attr-defined]
        self._engine, *_ = deepspeed.initialize(
            model=self.model,
            optimizer=optimizer.optimizer,
            mpu=self._groups(),
            config=self._strategy.deepspeed_config,
            dist_init_required=False,
        )
        self._whole_steps = hook_steps(self.model, self._split.model, self._engine.optimizer)
        fit_buckets(self._engine.optimizer, self.model.parameters())
        self._norm = torch.zeros(())
        return DeepSpeedOptimizerWrapper(self._engine.optimizer)

    def _groups(self) -> SimpleNamespace:
        """DeepSpeed's interface to the process groups of a layout ("mpu")."""
        model, data = self._pipeline_group, self._tokens_group
        return SimpleNamespace(
            get_model_parallel_group=lambda: model,
            get_model_parallel_rank=lambda: dist.get_rank(model),
            get_model_parallel_world_size=lambda: dist.get_world_size(model),
            get_data_parallel_group=lambda: data,
            get_data_parallel_group_ranks=lambda: dist.get_process_group_ranks(data),
            get_data_parallel_rank=lambda: dist.get_rank(data),
            get_data_parallel_world_size=lambda: dist.get_world_size(data),
        )

    def _check_every_rank_trains(self) -> None:
        trains = gather_json(any(parameter.requires_grad for parameter in self.model.parameters()))
        if not all(trains):
            raise PartitionError(
                "DeepSpeed makes no optimizer for a rank whose parameters are all frozen",
                where="strategy.sharding",
                found=f"zero1, with nothing to train on rank {trains.index(False)}",
                hint="strategy.sharding=none, or stages (strategy.blocks_per_stage) that give each rank something",
            )

    def clip_grad_norm(self, max_norm: float) -> object:
        """Give the norm of the step that DeepSpeed has made."""
        return self._norm

    def pieces(self) -> Iterable[Piece]:
        """List this rank's runs of its stages' flattened parameters and of their optimizer state."""
        return pieces_zero.list_pieces(self.model, self._engine, self._whole_steps)

    def after_load(self) -> None:
        """Copy what was read into the weights that the model computes with."""
        pieces_zero.after_load(self.model, self._engine)

    def _reduce_gradients(self) -> None:
        self._sum_shared()
        step = _Step(self.model, self._engine.optimizer)
        if self._scaler is None:
            step.step()
        else:
            # All of an optimizer that the scaler asks for.
            stepped = cast(torch.optim.Optimizer, step)
            self._scaler.unscale_(stepped)
            self._scaler.step(stepped)
            self._scaler.update()
        self._norm = step.norm


class PipelineZeroStrategy(PipelineStrategy):
    """`strategy.pipeline=N strategy.sharding=zero1`."""

    used_axes = ("pipeline", "context")
    engine_class = PipelineZeroEngine

    def __init__(
        self, topology: Topology, batch: BatchPlan, strategy: StrategyConfig, train: TrainConfig, *, device_type: str
    ) -> None:
        super().__init__(topology, batch, strategy, train)
        self.fractions = ShardFractions(optimizer=1.0 / (topology.data * topology.context))
        self.deepspeed_config = generate(strategy, train, batch, device_type)
        for precision in ("bf16", "fp16"):
            self.deepspeed_config[precision]["enabled"] = False
        # DeepSpeed counts each rank that shares sequences as one with sequences of its own.
        self.deepspeed_config["train_batch_size"] *= topology.context
        # Gradients are reduced once, after the schedule: DeepSpeed must not hook into each backward.
        self.deepspeed_config["zero_optimization"]["overlap_comm"] = False
        self._left_out = _keys_left_out(strategy.deepspeed, train.precision)

    def agreed_arguments(self) -> dict[str, object]:
        """What DeepSpeed's config has taken over; half precision is autocast's."""
        return {"max_grad_norm": self.train.max_grad_norm}

    def start(self) -> None:
        """Let DeepSpeed take over the process group, and name the user's keys that it does not follow here."""
        if self._left_out and self.topology.rank == 0:
            logger.warning(
                "%s: left out. A pipeline reduces gradients once, after its schedule, and half precision is torch's",
                ", ".join(f"{PLACE}.{key}" for key in self._left_out),
            )
            # A recipe and its Trainer both start the strategy: one of them says it.
            self._left_out = []
        start_deepspeed()

    def _state_traffic(self, axes: Axes) -> Iterable[Sent]:
        return reduce_to_owners(axes, microbatches=1, hidden_by=None)

    def _whole_traffic(self, axes: Axes) -> Iterable[Sent]:
        # Each rank has a part of the blocks of its stages.
        return axes.gather_runs(cut_elements(axes.sizes.stepped_whole, axes.topology.world_size))

    @classmethod
    def _state(cls, sizes: RankSizes) -> MemoryUse:
        return with_master_weights(sizes).state()

    @classmethod
    def _buffers(cls, sizes: RankSizes) -> Buffers:
        # Gradients go through one bucket to the rank's own part.
        num_elements = bucket_elements(sizes.trained, sizes.ends) + sizes.stepped
        return Buffers(after_blocks=num_elements * sizes.gradient_bytes)


def _keys_left_out(given: Mapping[str, object], precision: Precision) -> list[str]:
    """List keys of a user's DeepSpeed config that a pipeline does not follow, in this precision."""
    of_precision = f"{precision.value}."
    return [
        key
        for key, value in flatten(given, "")
        if value != AUTO and key != f"{of_precision}enabled"
        if key.startswith(of_precision) or (key == "zero_optimization.overlap_comm" and value)
    ]


class _Step:
    """What a loss scaler needs of an optimizer: gradients to unscale, and a step to leave out if one overflowed."""

    def __init__(self, model: nn.Module, zero: ZeroOptimizer) -> None:
        self.param_groups = [{"params": list(model.parameters())}]
        self.norm = torch.full((), torch.inf)
        """Norm of the gradients; infinite where the step was left out."""
        self._zero = zero

    def step(self) -> None:
        """Reduce gradients to the ranks that step them, and step."""
        self._zero.reduce_gradients(pipeline_parallel=True)
        self._zero.step()
        self.norm = torch.as_tensor(self._zero._global_grad_norm)
