"""Pipeline parallelism: each rank runs some of the model's blocks, and replicas of the pipeline average gradients."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from hfdist.collectives import first_problem, gather_json, is_planned
from hfdist.config.batch import BatchPlan
from hfdist.config.strategy import Schedule, StrategyConfig
from hfdist.config.train import Compile, TrainConfig
from hfdist.errors import PartitionError
from hfdist.host_memory import usable_bytes
from hfdist.models.blocks import find_block_parts
from hfdist.models.embeddings import input_embeddings
from hfdist.models.flops import ModelSize, measure_size
from hfdist.optim.probe import Reach
from hfdist.pipeline.block_times import time_blocks_of_run
from hfdist.pipeline.channel import P2PChannel
from hfdist.pipeline.choose_schedule import choose_schedule
from hfdist.pipeline.costs import costs_by_parameters, kind_of_block
from hfdist.pipeline.generation_check import find_generation_problem
from hfdist.pipeline.infer_stage_io import StageIO, infer_stage_io
from hfdist.pipeline.microbatches import split_batch
from hfdist.pipeline.partition import choose_stages
from hfdist.pipeline.pipeline import Pipeline
from hfdist.pipeline.planned import PlannedChannel, PlannedPipeline
from hfdist.pipeline.schedule import bubble_fraction, check_microbatches, rank_of_stage, stages_per_rank
from hfdist.pipeline.split import SplitModel, split_at_blocks
from hfdist.pipeline.stage_io import CARRIES
from hfdist.pipeline.stage_module import Block, refuse_call
from hfdist.pipeline.timeline import Recorder
from hfdist.strategies.base import Strategy
from hfdist.strategies.engine import Batch, Engine, TrainerHooks, Value
from hfdist.strategies.gradients.reduction import average_gradients, sum_gradients
from hfdist.strategies.parts import ModelParts
from hfdist.strategies.same_batch import check_same_batch
from hfdist.topology import Topology, read_launcher

if TYPE_CHECKING:
    from accelerate.optimizer import AcceleratedOptimizer

    from hfdist.strategies.context import ContextParallel

logger = logging.getLogger(__name__)


class PipelineEngine(Engine):
    """Runs a whole optimizer step's micro batches through the stages."""

    optimizer_sees = Reach.parameter
    reduces_gradients = True
    runs_whole_model = False

    def __init__(
        self,
        strategy: PipelineStrategy,
        split: SplitModel,
        size: ModelSize,
        stage_io: StageIO,
        *,
        mesh: DeviceMesh,
        context: ContextParallel | None,
        parts: ModelParts | None,
    ) -> None:
        super().__init__(split.model, context, parts)
        self._size = size
        self._strategy = strategy
        self._split = split
        self._io = stage_io
        self._pipeline_group = mesh.get_group("pipeline")
        self._tokens_group = mesh.get_group("tokens")
        self.loss_group = self._tokens_group
        self._num_losses = strategy.topology.world_size // strategy.topology.tensor
        self._trainable = self._find_trainable()
        self._pipeline: Pipeline | None = None
        self._shard_stages(mesh)

    def _shard_stages(self, mesh: DeviceMesh) -> None:
        """Shard the parameters of this rank's stages in place, in layouts that do so."""

    @property
    def size(self) -> ModelSize:
        """Size of the model before it was split."""
        return self._size

    def setup(
        self, prepared: nn.Module, optimizer: AcceleratedOptimizer, scaler: torch.amp.GradScaler | None
    ) -> AcceleratedOptimizer:
        """Make the stages, now that the model is on its device; keep the optimizer and the loss scale."""
        if self._io.carry.embedding and hasattr(input_embeddings(self._split.model), "neftune_noise_alpha"):
            raise PartitionError(
                "every stage of this model looks up the embedding, and would add noise of its own to it",
                where="train.arguments.neftune_noise_alpha",
                hint="neftune_noise_alpha=null, or a strategy without a pipeline",
            )
        self._pipeline = self._make_pipeline()
        self._keep_optimizer(optimizer, scaler)
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
        stages = {stage: self._split.stage_module(stage, self._io.carry) for stage in self._split.mine}
        self._modules = [*self.model.modules(), *chain.from_iterable(stage.modules() for stage in stages.values())]
        return Pipeline(
            stages,
            self._strategy.config.schedule,
            self._make_channel(),
            num_microbatches=self._strategy.batch.num_microbatches,
            recorder=self.schedule_trace,
            splits_backward=not (self._split.is_compiled or self._split.model.is_activation_checkpointing),
            expert_group=None if self._parts is None else self._parts.groups.expert,
        )

    def _make_channel(self) -> P2PChannel:
        strategy, group = self._strategy, self._pipeline_group
        if strategy.planned is None:
            return P2PChannel(strategy.rank_of_stage, group, self._device)
        num_parts = strategy.topology.tensor if strategy.config.sequence else strategy.topology.context
        return PlannedChannel(
            strategy.rank_of_stage,
            group,
            self._device,
            planned=strategy.planned,
            stages=self._split.stages,
            shape=(strategy.batch.micro_batch_size, -(-strategy.batch.sequence_length // num_parts)),
        )

    def forward_backward(self, batch: Batch, num_items: torch.Tensor | None, hooks: TrainerHooks) -> torch.Tensor:
        """Run the schedule, and add up the gradients over ranks. Gives the loss that averages right over all ranks."""
        assert self._pipeline is not None
        assert self.schedule_trace is not None
        self._train_mode(True)
        self._check_unchanged(batch)
        self.begin(batch)
        microbatches = self._split_batch(batch)
        unscaled: list[torch.Tensor] = []

        def scaled_loss(stage_model: PreTrainedModel, microbatch: Batch) -> torch.Tensor:
            # The Trainer multiplies by the number of processes, for gradients that are averaged over all of them; but
            # tensor ranks compute one loss together.
            value = hooks.loss(stage_model, microbatch, num_items) / self._num_losses
            unscaled.append(value.detach())
            return self._scale(value)

        def scaled_router_loss() -> torch.Tensor | None:
            value = hooks.router_loss()
            if value is None:
                return None
            unscaled.append(value.detach())
            return self._scale(value)

        with self.schedule_trace.around_step():
            self._pipeline.forward_backward(microbatches, scaled_loss, scaled_router_loss)
        self._reduce_gradients()
        return self._reduce_loss(unscaled)

    def run_forwards(
        self, batch: Batch, function: Callable[[nn.Module, Batch], torch.Tensor], hooks: TrainerHooks
    ) -> None:
        """Run the schedule's forwards, without its backwards."""
        assert self._pipeline is not None
        self._train_mode(True)
        with torch.no_grad(), self._for_forwards():
            self._pipeline.forward_backward(self._split_batch(batch), function, hooks.router_loss)

    def forward(
        self,
        batch: Batch,
        function: Callable[[nn.Module, Batch], Value],
        hooks: TrainerHooks,
        *,
        as_whole: bool = False,
    ) -> list[Value]:
        """Run forwards through the stages. Only the rank of the last stage has values; with `as_whole` all have."""
        if as_whole and not self._writes_whole:
            return []
        with torch.no_grad():
            if self._pipeline is None:
                # An evaluation before training.
                self._pipeline = self._make_pipeline()
            self._train_mode(False)
            with self._for_forwards():
                if as_whole:
                    values = [self._pipeline.call_whole(self._sharded(batch), function)]
                else:
                    values = self._pipeline.forward(self._split_batch(batch), function)
        return values if self._has_values else []

    def _for_forwards(self) -> AbstractContextManager[None]:
        """Have what forwards alone need, within the block and without gradients."""
        return nullcontext()

    @cached_property
    def _writes_whole(self) -> bool:
        """Whether stages have caches of their own. A collective over all ranks the first time."""
        problem = None if self._io.carry == CARRIES[0] else f"{self._io.carry.describe()} travel between its stages"
        # Ranks of different machines must not disagree.
        problem = first_problem(problem or find_generation_problem(self._split.model))
        if problem is not None and dist.get_rank() == 0:
            logger.warning("each new token is computed from all tokens before it, without a cache: %s", problem)
        return problem is None

    def _split_batch(self, batch: Batch) -> list[AbstractContextManager[Batch]]:
        """Give this rank's part of the sequences of each micro batch."""
        return [self._sharded(part) for part in split_batch(batch, self._strategy.batch.num_microbatches)]

    def clip_grad_norm(self, max_norm: float) -> object:
        """Clip by the norm over all stages; `forward_backward` has reduced the gradients."""
        return self._clip(max_norm)

    def _norm_groups(self) -> list[dist.ProcessGroup]:
        return [*super()._norm_groups(), self._pipeline_group]

    def whole_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """List them as the base class does; what several stages hold has a name of its own, as they hold little else.

        So a tied embedding and its head, on two ranks, are compared.
        """
        if not self._sums_over_stages_last:
            return super().whole_parameters()
        num_pipelines = len(self._strategy.topology.pipelines)
        suffixes: dict[str, str] = {}
        for holders, names in self._io.shared:
            places = ", ".join(str(rank // num_pipelines) for rank in dist.get_process_group_ranks(holders))
            suffixes |= dict.fromkeys(names, f" of pipeline ranks {places}")
        held = super().whole_parameters()
        return [(name + suffixes.get(re.split(r"[ \[]", name)[0], ""), tensor) for name, tensor in held]

    @property
    def _sums_over_stages_last(self) -> bool:
        """Whether gradients of what several stages hold are added up after all other sums, and so equal to the bit."""
        return self._parts is None or self._parts.groups.tensor is None

    def _counts(self, name: str) -> bool:
        return name not in self._io.counted_elsewhere and super()._counts(name)

    def _find_trainable(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self.model.parameters()]

    def _check_unchanged(self, batch: Batch) -> None:
        """Check on what all ranks of a pipeline rely; PartitionError, DataError: on all of them alike. A collective."""
        is_changed = self._find_trainable() != self._trainable
        if check_same_batch(batch, self._pipeline_group, "pipeline", is_refused=is_changed):
            raise PartitionError(
                "parameters were frozen or unfrozen after the Trainer was made, when the stages had agreed on them",
                hint="set requires_grad before hfdist.Trainer(...)",
            )

    def _scale(self, loss: torch.Tensor) -> torch.Tensor:
        # Gradients are averaged over the ranks with other tokens.
        scaled = loss * self._tokens_group.size()
        return scaled if self._scaler is None else self._scaler.scale(scaled)

    def _reduce_gradients(self) -> None:
        if self._parts is None:
            average_gradients(list(self.model.parameters()), self._tokens_group)
        else:
            self._parts.average_gradients(self.model)
        self._sum_shared()

    def _sum_shared(self) -> None:
        """Give parameters on several ranks of a model replica one gradient."""
        for group, names in self._io.shared:
            sum_gradients((self.model.get_parameter(name) for name in names), group)
        if self._parts is not None:
            self._parts.reduce_gradients(self.model)

    def _reduce_loss(self, losses: list[torch.Tensor]) -> torch.Tensor:
        """Give all ranks the sum of all stages. The Trainer averages over all; ranks with other tokens have shares."""
        total = torch.stack(losses).sum() if losses else torch.zeros((), device=self._device)
        dist.all_reduce(total, group=self._pipeline_group)
        return total * self._tokens_group.size()

    def _train_mode(self, mode: bool) -> None:
        assert self._pipeline is not None
        # A callback may have put a part of the model into another mode.
        if all(module.training == mode for module in self._modules):
            return
        self.model.train(mode)
        for module in self._pipeline.modules.values():
            module.train(mode)


class PipelineStrategy(Strategy):
    """`strategy.pipeline=N`, alone or with data parallelism."""

    used_axes = ("pipeline", *Strategy.used_axes)
    engine_class: type[PipelineEngine] = PipelineEngine

    def __init__(self, topology: Topology, batch: BatchPlan, strategy: StrategyConfig, train: TrainConfig) -> None:
        super().__init__(topology, batch, strategy)
        self.train = train
        per_rank = stages_per_rank(strategy.schedule, strategy.stages_per_rank)
        self.rank_of_stage = rank_of_stage(strategy.schedule, topology.pipeline, per_rank)
        check_microbatches(
            strategy.schedule,
            num_ranks=topology.pipeline,
            stages_per_rank=per_rank,
            num_microbatches=batch.num_microbatches,
            micro_batch_size=batch.micro_batch_size,
            data_size=batch.data_size,
        )
        self.planned: PlannedPipeline | None = None
        """Set in a plan, before `build`: nothing comes from other ranks then."""
        self._split: SplitModel | None = None
        self._size: ModelSize | None = None

    @property
    def computes_losses(self) -> bool:
        """Whether this rank has the last stage, and so computes losses."""
        return self.rank_of_stage[-1] == self.topology.pipeline_rank

    def training_arguments(self) -> dict[str, object]:
        """The Trainer sees one batch a step: the schedule splits it into micro batches."""
        eval_size = self.train.eval_micro_batch_size or self.batch.micro_batch_size
        return {
            "gradient_accumulation_steps": 1,
            "per_device_train_batch_size": self.batch.micro_batch_size * self.batch.num_microbatches,
            "per_device_eval_batch_size": eval_size * self.batch.num_microbatches,
            "average_tokens_across_devices": True,
        }

    def describe_step(self, device: torch.device) -> Recorder:
        """Give the record of a step: its title, and the bubble to compare it with."""
        if self.planned is not None:
            return self.planned.recorder
        num_ranks, num_microbatches = self.topology.pipeline, self.batch.num_microbatches
        per_rank = len(self.rank_of_stage) // num_ranks
        return Recorder(
            rank=self.topology.pipeline_rank,
            device=device,
            replica=self.topology.pipelines[0],
            title=f"{self.config.schedule.value}: {num_ranks} ranks x {per_rank} stage{'s' if per_rank > 1 else ''}, "
            f"{num_microbatches} micro batches",
            formula=bubble_fraction(
                self.config.schedule,
                num_ranks=num_ranks,
                stages_per_rank=per_rank,
                num_microbatches=num_microbatches,
            ),
        )

    def kinds_of_places(self, model: PreTrainedModel) -> list[Hashable]:
        """Tell the ranks of a pipeline apart that compute different things: equal for those that run equal stages."""
        blocks = find_block_parts(model)
        stages = choose_stages(model, blocks, self.config, self.batch, self.rank_of_stage, self.train.precision)
        last = len(stages) - 1
        kinds: list[list[Hashable]] = [[] for _ in range(self.topology.pipeline)]
        for stage, (indices, rank) in enumerate(zip(stages, self.rank_of_stage, strict=True)):
            kinds[rank].append((stage == 0, stage == last, *(kind_of_block(blocks[index]) for index in indices)))
        return [tuple(of_rank) for of_rank in kinds]

    def partition(self, model: nn.Module) -> None:
        """Leave this rank's blocks in the model, and what may surround them. In place; nothing is read or moved.

        Raises:
            ConfigError, PartitionError: the model cannot be split as `strategy.*` asks.
        """
        super().partition(model)
        whole = cast(PreTrainedModel, model)
        self._size = measure_size(whole)
        blocks = find_block_parts(whole)
        stages = self._choose_stages(whole, blocks)
        mine = [stage for stage, rank in enumerate(self.rank_of_stage) if rank == self.topology.pipeline_rank]
        self._split = split_at_blocks(whole, blocks, stages, mine)

    def _choose_stages(self, model: PreTrainedModel, blocks: Sequence[Block]) -> tuple[range, ...]:
        """Give the blocks of each stage; with `strategy.schedule=auto` choose the schedule before. A collective."""
        batch, precision = self.batch, self.train.precision
        if self.config.schedule is not Schedule.auto or not dist.is_initialized() or is_planned():
            return choose_stages(model, blocks, self.config, batch, self.rank_of_stage, precision)
        shape = batch.micro_batch_size, batch.sequence_length
        times = time_blocks_of_run(model, blocks, shape, precision, halves=True)
        of_device = (
            torch.cuda.mem_get_info()[1]
            if torch.cuda.is_available()
            else usable_bytes(read_launcher().local_world_size)
        )
        choice = choose_schedule(
            times,
            costs_by_parameters(model, blocks),
            lambda ranks: choose_stages(model, blocks, self.config, batch, ranks, precision, times),
            num_ranks=self.topology.pipeline,
            num_microbatches=batch.num_microbatches,
            usable_bytes=min(gather_json(of_device)),
            # The optimizer is not made yet.
            state_bytes=self.fractions.of_adam(next(model.parameters()).dtype.itemsize),
            splits_backward=not (self.train.gradient_checkpointing or self.train.compile is Compile.blocks),
        )
        self.config = replace(self.config, schedule=choice.schedule, stages_per_rank=choice.stages_per_rank)
        self.rank_of_stage = rank_of_stage(choice.schedule, self.topology.pipeline, choice.stages_per_rank)
        return choice.stages

    def build(self, model: nn.Module) -> PipelineEngine:
        """Find out what must travel between the stages, keep what this rank needs, and make the engine. A collective.

        Raises:
            ConfigError: a model whose ranks cannot share sequences, or its parameters.
            PartitionError: the model cannot be split at its blocks.
        """
        self._partition_once(model)
        assert self._split is not None
        assert self._size is not None
        model.register_forward_pre_hook(refuse_call)
        stage_io = infer_stage_io(self._split, self.rank_of_stage, self.topology, self.mesh, self.planned)
        logger.info("%s; %s travel", _describe_stages(self._split.stages), stage_io.carry.describe())
        context = self._shard_sequences(model)
        parts = self._shard_parameters(model)
        engine = self.engine_class(
            self, self._split, self._size, stage_io, mesh=self.mesh, context=context, parts=parts
        )
        self._count_fractions(engine)
        return engine


def _describe_stages(stages: tuple[range, ...]) -> str:
    runs = ", ".join(f"{run.start}-{run.stop - 1}" if len(run) > 1 else str(run.start) for run in stages)
    return f"{len(stages)} stages of blocks {runs}"
