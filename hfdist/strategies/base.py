"""The strategy of a layout: its TrainingArguments, its traffic and memory in a plan, and the engine that it builds.

The class `Strategy` itself is the layout in which each rank holds the whole model. Other layouts derive from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from hfdist.config.batch import BatchPlan
from hfdist.config.strategy import Compression, StrategyConfig
from hfdist.config.task import TeacherSharding
from hfdist.config.train import Precision
from hfdist.errors import ConfigError
from hfdist.models.partitioning import Partitioning
from hfdist.strategies.engine import Engine
from hfdist.strategies.gradients.reduction import BUCKET_ELEMENTS, local_tensor
from hfdist.strategies.mesh import build_mesh
from hfdist.strategies.parts import ModelParts
from hfdist.strategies.pieces import list_shapes
from hfdist.strategies.step_memory import Buffers, Copied, MemoryUse, RankSizes, ShardFractions
from hfdist.strategies.traffic import Axes, Phase, Sent, StepSizes
from hfdist.topology import MODEL_AXES, PARTS, Topology

if TYPE_CHECKING:
    from hfdist.strategies.context import ContextParallel
    from hfdist.strategies.parallel_plans import Plans

_MOVED_BY_A_SUM = 3
"""Numbers that are read and written where one is added to another, in place."""


class Strategy(Partitioning):
    """The way in which one model becomes distributed. It is cheap to make, and needs no process group until `start`.

    The class itself is `strategy.sharding=none` without a pipeline: on several processes accelerate wraps the model in
    DDP, if no ranks share parameters.

    Args:
        topology: the ranks of the run, and this one.
        batch: the micro batches of a step.
        config: `strategy.*`.

    Raises:
        ConfigError: the layout does not know how to use an axis of the topology, or compresses nothing.
    """

    used_axes: tuple[str, ...] = ("context", *PARTS)
    """Axes of the mesh whose ranks together hold one replica, and that this layout knows how to use."""
    fractions = ShardFractions()
    """The shares of the model's state that this rank holds."""
    asked_precision: Precision | None = None
    """The precision that `make_strategy` was told; None: the TrainingArguments decide."""
    keeps_uneven_gradients = False
    """Whether a rank keeps whole the gradients of parameters that it steps in part, so that ranks differ."""
    calls_alike = False
    """Whether all data ranks must call the same modules in each forward, as they send each other their parameters."""
    counts_all_experts = False
    """Whether `fractions` are shares of all experts, also of those that other expert ranks hold before sharding."""

    def __init__(self, topology: Topology, batch: BatchPlan, config: StrategyConfig) -> None:
        self.topology = topology
        self.batch = batch
        self.config = config
        for axis in MODEL_AXES:
            if (degree := getattr(topology, axis)) > 1 and axis not in self.used_axes:
                # Ranks of such an axis would train alone, on wrong numbers.
                what, hint = f"{type(self).__name__} does not use this axis", f"strategy.{axis}=1"
                raise ConfigError(what, where=f"strategy.{axis}", found=degree, allowed="1", hint=hint)
        self._partitioned: nn.Module | None = None
        self._plans: list[Plans] = []
        """Plans for the parameters of the partitioned model, the best first; empty: ranks share none."""
        self.whole: dict[str, tuple[int, ...]] = {}
        """Shapes of all that the model saves, by name, as it was before it was partitioned."""
        if config.compression is not Compression.none and topology.world_size == 1:
            found = f"{config.compression.value}, with one process"
            hint = "strategy.compression=none, or launch.processes=2"
            raise ConfigError("one process sends no gradients", where="strategy.compression", found=found, hint=hint)

    @property
    def sharing_keys(self) -> str:
        """Keys of the config by which ranks share weights, with their values; "": each rank has all weights."""
        axes = {axis: getattr(self.topology, axis) for axis in ("pipeline", "tensor")}
        keys = [f"strategy.{axis}={degree}" for axis, degree in axes.items() if degree > 1]
        if self.fractions.weights < 1:
            keys.append(f"strategy.sharding={self.config.sharding.value}")
        return ", ".join(keys)

    def training_arguments(self) -> dict[str, object]:
        """Give the fields of TrainingArguments that this layout sets, with their values."""
        return {
            "gradient_accumulation_steps": self.batch.num_microbatches,
            "per_device_train_batch_size": self.batch.micro_batch_size,
        }

    def agreed_arguments(self) -> dict[str, object]:
        """Give fields of TrainingArguments that the user sets and must not change later, with this layout's values."""
        return {}

    def traffic(self, sizes: StepSizes) -> list[Sent]:
        """Give the traffic in a step of the rank that sends most. Needs no process group and no model."""
        axes = Axes(self.topology, self.batch, self.config, sizes)
        sent = [*axes.model_axes(), *self._state_traffic(axes), *self._whole_traffic(axes)]
        if sizes.embeddings:
            sent += axes.exchange_embeddings()
        if sizes.frozen is not None:
            sent += axes.gather_frozen(sizes.frozen, self.ranks_of_frozen(sizes.frozen.sharding))
        return sent

    def ranks_of_frozen(self, sharding: TeacherSharding, *, by_all: bool = False) -> int:
        """Give the number of ranks that share a frozen model's weights; 1: each rank that runs it has it whole.

        Args:
            sharding: how the user wants them shared.
            by_all: whether all ranks run the model at the same time, and not only the ranks of the last stage.
        """
        topology = self.topology
        if sharding is TeacherSharding.whole or (sharding is TeacherSharding.auto and not self.sharing_keys):
            return 1
        return topology.world_size if by_all else topology.shard * topology.context * topology.tensor

    @property
    def computes_losses(self) -> bool:
        """Whether this rank has the model's last stage."""
        return True

    def _state_traffic(self, axes: Axes) -> Iterable[Sent]:
        """Give the collectives that weights and gradients need, by how their state is sharded."""
        return axes.average_gradients()

    def _whole_traffic(self, axes: Axes) -> Iterable[Sent]:
        """Give the collectives that an optimizer adds which must see whole parameters."""
        return axes.gather_parts()

    @classmethod
    def held(cls, sizes: RankSizes) -> Iterator[tuple[Phase, MemoryUse]]:
        """Give the moments of a step at which a rank may hold most, each with its phase.

        This is arithmetic that a search asks for thousands of times: `sizes` have the layout, and no strategy is made.
        """
        use, buffers = cls._state(sizes), cls._buffers(sizes)
        # Before the last backward there may be two copies of the gradients: DDP's buckets, which are there all the
        # time, and the sums of earlier micro batches. At its end the sums are in the buckets.
        num_copies = int(sizes.layout.num_microbatches > 1) + int(sizes.layout.is_ddp)
        early = replace(use, gradients=use.gradients * num_copies)
        in_backward = buffers.gathered + buffers.reduced
        yield Phase.forward, replace(early, activations=use.activations + sizes.of_head, buffers=buffers.gathered)
        # Gradients of the last blocks come while all activations are still there.
        yield Phase.backward, replace(early, activations=use.activations + sizes.working, buffers=in_backward)
        # At its end all gradients are there, and the activations of a block.
        yield Phase.backward, replace(use, activations=sizes.working, buffers=in_backward)
        yield Phase.optimizer, replace(use, activations=0.0, buffers=buffers.after_blocks)

    @classmethod
    def _state(cls, sizes: RankSizes) -> MemoryUse:
        """Give the bytes that a rank holds between steps, and its activations after the forward."""
        return sizes.state()

    @classmethod
    def _buffers(cls, sizes: RankSizes) -> Buffers:
        """Give the bytes of the layout's own buffers."""
        layout = sizes.layout
        if layout.data * layout.context == 1 or not layout.divides_parameters:
            return Buffers()
        # hfdist averages the gradients itself, in buckets.
        return Buffers(after_blocks=min(BUCKET_ELEMENTS, sizes.trained) * sizes.gradient_bytes)

    @classmethod
    def copied(cls, sizes: RankSizes) -> Copied:
        """Give the bytes that are copied in a step: later micro batches add their gradients to those before them."""
        layout = sizes.layout
        # In a pipeline a rank adds up all gradients of its stages before they are sharded.
        held = sizes.trained if layout.pipeline > 1 else sizes.state_trained * sizes.fractions.gradients
        return Copied(_MOVED_BY_A_SUM * sizes.gradient_bytes * held * (1 - 1 / layout.num_microbatches))

    def start(self) -> None:
        """Set up what needs the process group. ZeRO-3 needs this before the model is made. Later calls do nothing."""

    def partition(self, model: nn.Module) -> None:
        """Check that ranks can share the parameters of the model; it stays whole until `build`.

        Raises:
            ConfigError: ranks cannot share the parameters.
        """
        topology = self.topology
        self._partitioned, self._plans, self.whole = model, [], list_shapes(model)
        if topology.tensor * topology.expert > 1:
            # Imported here: other layouts save the time.
            from hfdist.strategies.parallel_plans import make_plans

            whole = cast(PreTrainedModel, model)
            sizes = {"tensor": topology.tensor, "expert": topology.expert}
            self._plans = make_plans(whole, **sizes, splits_tokens=self.config.sequence)

    def _partition_once(self, model: nn.Module) -> None:
        """Partition a model that was made without this strategy."""
        if self._partitioned is not model:
            self.partition(model)

    def build(self, model: nn.Module) -> Engine:
        """Make the engine of a model that is whole or partitioned. A collective where ranks share the model.

        Raises:
            ConfigError: a model whose ranks cannot share sequences, or its parameters.
        """
        self._partition_once(model)
        context = self._shard_sequences(model)
        make_compressor = None
        if self.config.compression is not Compression.none:
            # Imported here: other layouts save the time.
            from hfdist.strategies.gradients.compression import GradientCompressor

            make_compressor = partial(GradientCompressor, topology=self.topology, config=self.config)
        engine = Engine(model, context, self._shard_parameters(model), make_compressor)
        self._count_fractions(engine)
        return engine

    def _shard_sequences(self, model: nn.Module) -> ContextParallel | None:
        """Let context ranks share sequences, in place in the model; None: there is one context rank."""
        if self.topology.context == 1:
            return None
        # Imported here: other layouts save the time.
        from hfdist.strategies.context_check import make_context_parallel

        topology, group = self.topology, self.mesh.get_group("context")
        return make_context_parallel(model, group, self.config.context_method, num_tensor_ranks=topology.tensor)

    def _shard_parameters(self, model: nn.Module) -> ModelParts | None:
        """Leave in the model, in place, the parts that this rank holds before FSDP2 shards them; None: all is whole."""
        if not self._plans:
            return None
        # Imported here: other layouts save the time.
        from hfdist.strategies.parallel_plans import shard_parameters

        self._num_elements = sum(parameter.numel() for parameter in model.parameters())
        return shard_parameters(cast(PreTrainedModel, model), self.mesh, self._plans)

    def _count_fractions(self, engine: Engine) -> None:
        """Set `fractions` by what this rank holds, where it depends on the model."""
        if self._plans:
            share = sum(local_tensor(parameter).numel() for parameter in engine.model.parameters()) / self._num_elements
            self.fractions = ShardFractions(weights=share, gradients=share, optimizer=share)

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The mesh of all ranks; a collective the first time."""
        return build_mesh(self.topology)


def check_no_scalars(model: nn.Module, by: str) -> None:
    """Raise a ConfigError for a parameter without a dimension, which neither DeepSpeed nor FSDP2 takes."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise ConfigError(
                f"{by} cannot shard a parameter that is a single number without a dimension",
                where=name,
                found="shape []",
                hint="torch.zeros(1) in place of torch.tensor(0.0), or a strategy without sharding",
            )
