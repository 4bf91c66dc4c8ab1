"""Pipeline parallelism: each rank runs some of the model's blocks, and replicas of the pipeline average gradients."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from hfdist.checkpoint.piece import Piece
from hfdist.config.batch import BatchPlan
from hfdist.config.strategy import StrategyConfig
from hfdist.config.train import TrainConfig
from hfdist.errors import DataError, PartitionError
from hfdist.models.blocks import find_block_parts
from hfdist.models.flops import ModelSize, measure_size
from hfdist.optim.probe import Reach
from hfdist.pipeline.gradients import sum_gradients, total_norm
from hfdist.pipeline.infer_stage_io import StageIO, infer_stage_io
from hfdist.pipeline.partition import choose_stages
from hfdist.pipeline.pipeline import Pipeline
from hfdist.pipeline.schedule import bubble_fraction, check_microbatches, rank_of_stage, stages_per_rank
from hfdist.pipeline.split import SplitModel, split_at_blocks
from hfdist.pipeline.stage_io import P2PChannel, device_of
from hfdist.pipeline.stage_module import refuse_call
from hfdist.pipeline.timeline import ScheduleTrace
from hfdist.strategies import pieces_replicated
from hfdist.strategies.base import Batch, ShardFractions, TrainerHooks
from hfdist.strategies.mesh import build_mesh
from hfdist.strategies.microbatches import split_batch
from hfdist.topology import Topology

logger = logging.getLogger(__name__)


class PipelineStrategy:
    """`strategy.pipeline=N`, alone or with data parallelism."""

    def __init__(self, topology: Topology, batch: BatchPlan, strategy: StrategyConfig, train: TrainConfig) -> None:
        self.topology = topology
        self.batch = batch
        self.config = strategy
        self.train = train
        per_rank = stages_per_rank(strategy.schedule, strategy.stages_per_rank)
        self.rank_of_stage = rank_of_stage(strategy.schedule, topology.pipeline, per_rank)
        self.shares = ShardFractions(weights=1.0, gradients=1.0, optimizer=1.0)
        check_microbatches(
            strategy.schedule,
            num_ranks=topology.pipeline,
            stages_per_rank=per_rank,
            num_microbatches=batch.num_microbatches,
            micro_batch_size=batch.micro_batch_size,
            data_size=batch.data_size,
        )
        self._cut: SplitModel | None = None
        self._size: ModelSize | None = None

    def training_arguments(self) -> dict[str, object]:
        """The Trainer sees one batch a step: the schedule cuts it into micro batches."""
        eval_size = self.train.eval_micro_batch_size or self.batch.micro_batch_size
        return {
            "gradient_accumulation_steps": 1,
            "per_device_train_batch_size": self.batch.micro_batch_size * self.batch.num_microbatches,
            "per_device_eval_batch_size": eval_size * self.batch.num_microbatches,
            "average_tokens_across_devices": True,
        }

    @property
    def engine_class(self) -> type[PipelineEngine]:
        """Whose optimizer is torch's."""
        return PipelineEngine

    def agreed_arguments(self) -> dict[str, object]:
        """None: precision and clipping are the Trainer's."""
        return {}

    def describe_step(self, device: torch.device) -> ScheduleTrace:
        """What to call a step's picture, and the bubble to compare it with."""
        num_ranks, num_microbatches = self.topology.pipeline, self.batch.num_microbatches
        per_rank = len(self.rank_of_stage) // num_ranks
        return ScheduleTrace(
            rank=self.topology.pipeline_rank,
            device=device,
            replica=self.topology.replica(0),
            title=f"{self.config.schedule.value}: {num_ranks} ranks x {per_rank} stage{'s' if per_rank > 1 else ''}, "
            f"{num_microbatches} micro batches",
            formula=bubble_fraction(
                self.config.schedule,
                num_ranks=num_ranks,
                stages_per_rank=per_rank,
                num_microbatches=num_microbatches,
            ),
        )

    def start(self) -> None:
        """Nothing to do."""

    def cut(self, model: nn.Module) -> None:
        """Leave this rank's blocks in the model, and what may surround them. In place; nothing is read or moved.

        Raises:
            ConfigError, PartitionError: the model cannot be cut as `strategy.*` asks.
        """
        whole = cast(PreTrainedModel, model)
        self._size = measure_size(whole)
        blocks = find_block_parts(whole)
        stages = choose_stages(whole, blocks, self.config, self.batch, self.rank_of_stage, self.train.precision)
        mine = [stage for stage, rank in enumerate(self.rank_of_stage) if rank == self.topology.pipeline_rank]
        self._cut = split_at_blocks(whole, blocks, stages, mine)

    def build(self, model: nn.Module) -> PipelineEngine:
        """Find out what must travel between the stages, keep what this rank needs, and make the engine. A collective.

        Raises:
            PartitionError: the model cannot be split at its blocks.
        """
        if self._cut is None or self._cut.model is not model:
            self.cut(model)
        assert self._cut is not None
        assert self._size is not None
        model.register_forward_pre_hook(refuse_call)
        mesh = build_mesh(self.topology)
        settled = infer_stage_io(self._cut, self.rank_of_stage, self.topology, mesh)
        logger.info("%s; %s travel", _describe_stages(self._cut.stages), settled.carry.describe())
        return self.engine_class(self, self._cut, self._size, settled, mesh)


class PipelineEngine:
    """Runs a whole optimizer step's micro batches through the stages."""

    optimizer_sees = Reach.parameter

    def __init__(
        self, strategy: PipelineStrategy, cut: SplitModel, size: ModelSize, settled: StageIO, mesh: DeviceMesh
    ) -> None:
        self.model: nn.Module = cut.model
        self.size = size
        self.reduces_gradients = True
        self.runs_whole_model = False
        self.schedule_trace: ScheduleTrace | None = None
        self._strategy = strategy
        self._cut = cut
        self._carry = settled.carry
        self._shared = settled.shared
        self._pipeline_group = mesh.get_group("pipeline")
        self._data_group = mesh.get_group("data")
        self.loss_group: dist.ProcessGroup | None = self._data_group
        self._world_size = strategy.topology.world_size
        self._trainable = self._find_trainable()
        self._pipeline: Pipeline | None = None
        self._mode: bool | None = None
        self._optimizer: Any = None
        self._scaler: Any = None

    def attach(self, prepared: nn.Module, optimizer: Any, scaler: Any) -> Any:
        """Make the stages, now that the model is on its device; keep the optimizer and the loss scale."""
        if self._carry.embedding and hasattr(self._cut.model.get_input_embeddings(), "neftune_noise_alpha"):
            raise PartitionError(
                "every stage of this model looks up the embedding, and would add noise of its own to it",
                where="train.arguments.neftune_noise_alpha",
                hint="neftune_noise_alpha=null, or a strategy without a pipeline",
            )
        self._pipeline, self._mode = self._make_pipeline(), None
        self._optimizer, self._scaler = optimizer, scaler
        # The stages of one model must not draw the same dropout masks.
        torch.manual_seed(torch.initial_seed() + self._strategy.topology.pipeline_rank)
        if scaler is not None:
            # The scale is made at first use, and only the last stage has losses to scale.
            scaler.scale(torch.zeros((), device=self._device))
        return optimizer

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _make_pipeline(self) -> Pipeline:
        self.schedule_trace = self._strategy.describe_step(self._device)
        return Pipeline(
            {stage: self._cut.stage_module(stage, self._carry) for stage in self._cut.mine},
            self._strategy.config.schedule,
            P2PChannel(self._strategy.rank_of_stage, self._pipeline_group, self._device),
            num_microbatches=self._strategy.batch.num_microbatches,
            recorder=self.schedule_trace,
            splits_backward=not (self._cut.is_compiled or self._cut.model.is_activation_checkpointing),
        )

    def forward_backward(self, batch: Batch, num_items: torch.Tensor | None, default: TrainerHooks) -> torch.Tensor:
        """Run the schedule, and add up the gradients over ranks. Gives the loss that averages right over all ranks."""
        assert self._pipeline is not None
        assert self.schedule_trace is not None
        self._train_mode(True)
        self._check_unchanged(batch)
        microbatches = split_batch(batch, self._strategy.batch.num_microbatches)
        unscaled: list[torch.Tensor] = []

        def scaled_loss(stage_model: PreTrainedModel, microbatch: Batch) -> torch.Tensor:
            # The Trainer multiplies by the number of processes, for gradients that are averaged over all of them.
            value = default.loss(stage_model, microbatch, num_items) / self._world_size
            unscaled.append(value.detach())
            return self._scale(value)

        with self.schedule_trace.around_step():
            self._pipeline.forward_backward(microbatches, scaled_loss)
        self._reduce_gradients()
        return self._agree_on_loss(unscaled)

    def forward(self, batch: Batch, function: Callable[[nn.Module, Batch], Any], default: TrainerHooks) -> list[Any]:
        """Run forwards through the stages. Only the rank of the last stage has values."""
        if self._pipeline is None:
            # Before training.
            self._pipeline = self._make_pipeline()
        self._train_mode(False)
        with torch.no_grad():
            return self._pipeline.forward(split_batch(batch, self._strategy.batch.num_microbatches), function)

    def clip_grad_norm(self, max_norm: float, default: Callable[[], Any]) -> Any:
        """Clip by the norm over all stages; a parameter on several ranks counts once."""
        if self._scaler is not None:
            self._scaler.unscale_(self._optimizer.optimizer)
        parameters = dict(self.model.named_parameters())
        counted = (parameter for name, parameter in parameters.items() if name not in self._shared.counted_elsewhere)
        norm = total_norm(counted, self._pipeline_group, self._device)
        if max_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters.values(), max_norm, norm)
        return norm

    def whole_shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """Its own: a stage holds its parameters whole."""
        return tuple(parameter.shape)

    def whole_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Those of this rank's stages, which each replica of the pipeline has; tied ones are on several stages."""
        return self.model.named_parameters()

    def pieces(self) -> Iterable[Piece]:
        """This rank's parameters and their optimizer state, whole; names are the whole model's."""
        optimizer = None if self._optimizer is None else self._optimizer.optimizer
        return pieces_replicated.list_pieces(self.model, optimizer)

    def numbers(self) -> dict[str, Any]:
        """None: the Trainer keeps the loss scale."""
        return {}

    def restore_numbers(self, numbers: dict[str, Any]) -> None:
        """Nothing to take."""

    def loaded(self) -> None:
        """Nothing is derived from the pieces."""

    def _find_trainable(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self.model.parameters()]

    def _check_unchanged(self, batch: Batch) -> None:
        """Check what all ranks rely on without asking each other."""
        if self._find_trainable() != self._trainable:
            raise PartitionError(
                "parameters were frozen or unfrozen after the Trainer was made, when the stages had agreed on them",
                hint="set requires_grad before hfdist.Trainer(...)",
            )
        sums = torch.stack([_checksum(value) for value in batch.values() if isinstance(value, torch.Tensor)])
        extremes = torch.cat([sums, -sums]).to(device_of(self._pipeline_group))
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self._pipeline_group)
        largest, smallest = extremes.chunk(2)
        if not torch.equal(largest, -smallest):
            raise DataError(
                "the ranks of one pipeline were given different batches",
                where="train_dataset, data_collator",
                found="tensors that differ between ranks",
                allowed="the same items in the same order, and a collator that draws nothing at random",
                hint="draw in the dataset, from a generator seeded by the item's number",
            )

    def _scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss if self._scaler is None else self._scaler.scale(loss)

    def _reduce_gradients(self) -> None:
        self._sum_shared()
        sum_gradients(self.model.parameters(), self._data_group)

    def _sum_shared(self) -> None:
        for group, names in self._shared.groups:
            sum_gradients((self.model.get_parameter(name) for name in names), group)

    def _agree_on_loss(self, losses: list[torch.Tensor]) -> torch.Tensor:
        """Only the last stage has losses. The Trainer averages over all ranks, and each data rank has a share."""
        total = torch.stack(losses).sum() if self._cut.has_last else torch.zeros((), device=self._device)
        dist.all_reduce(total, group=self._pipeline_group)
        return total * self._strategy.topology.data_size

    def _train_mode(self, mode: bool) -> None:
        assert self._pipeline is not None
        if self.model.training == self._mode == mode:
            return
        self._mode = mode
        self.model.train(mode)
        for module in self._pipeline.modules.values():
            module.train(mode)


def _checksum(value: torch.Tensor) -> torch.Tensor:
    """Of shape and whole numbers; one that other orders of the same numbers do not have."""
    numbers = value.flatten().to(torch.int64)
    places = torch.arange(1, len(numbers) + 1, device=value.device)
    return (numbers * places).sum() + sum(size * 10**6 for size in value.shape)


def _describe_stages(stages: tuple[range, ...]) -> str:
    runs = ", ".join(f"{run.start}-{run.stop - 1}" if len(run) > 1 else str(run.start) for run in stages)
    return f"{len(stages)} stages of blocks {runs}"
