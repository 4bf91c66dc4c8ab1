"""DeepSpeed ZeRO: optimizer state (1), gradients (2) and parameters (3) partitioned over the data ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

from torch import nn
from transformers import TrainingArguments
from transformers.integrations import deepspeed as hf_deepspeed

from hfdist.config.batch import BatchPlan
from hfdist.config.strategy import StrategyConfig
from hfdist.config.train import Precision, TrainConfig
from hfdist.strategies.base import Strategy, check_no_scalars
from hfdist.strategies.deepspeed.deepspeed_config import STAGE, generate
from hfdist.strategies.deepspeed.engine import ZeroEngine
from hfdist.strategies.deepspeed.estimates import (
    LIVE_ELEMENTS,
    copied_in_step,
    gather_weights,
    hold_in_step,
    reduce_to_owners,
)
from hfdist.strategies.deepspeed.expert_modules import gather_experts_together
from hfdist.strategies.deepspeed.startup import start_deepspeed
from hfdist.strategies.step_memory import Copied, MemoryUse, RankSizes, ShardFractions
from hfdist.strategies.traffic import Axes, Phase, Sent, StepSizes, cut_elements
from hfdist.topology import Topology


class ZeroStrategy(Strategy):
    """`strategy.sharding=zero1|zero2|zero3`, through accelerate's DeepSpeed plugin."""

    used_axes = ()
    calls_alike = True

    def __init__(
        self, topology: Topology, batch: BatchPlan, strategy: StrategyConfig, train: TrainConfig, *, device_type: str
    ) -> None:
        super().__init__(topology, batch, strategy)
        self.stage = STAGE[strategy.sharding]
        self.partitions_in_constructor = strategy.partitions_in_constructor
        self.deepspeed_config = generate(strategy, train, batch, device_type)
        # Beside weights in half precision a rank keeps the float32 gradients of its own elements alone.
        self.keeps_uneven_gradients = self.stage < 3 and train.precision is Precision.fp32
        self._train = train
        share = 1.0 / topology.data
        self.fractions = ShardFractions(
            weights=share if self.stage >= 3 else 1.0, gradients=share if self.stage >= 2 else 1.0, optimizer=share
        )

    def training_arguments(self) -> dict[str, object]:
        """Add DeepSpeed's config. TrainingArguments made of it let ZeRO-3 partition each model in its constructor."""
        return super().training_arguments() | {"deepspeed": self.deepspeed_config}

    def agreed_arguments(self) -> dict[str, object]:
        """Give the fields of TrainingArguments for which DeepSpeed's config has keys, with the values there."""
        return {
            "max_grad_norm": self._train.max_grad_norm,
            "bf16": self._train.precision is Precision.bf16,
            "fp16": self._train.precision is Precision.fp16,
        }

    def traffic(self, sizes: StepSizes) -> list[Sent]:
        """Give what a rank sends in a step. In half precision DeepSpeed sends weights and gradients in that type."""
        is_half = self._train.precision in (Precision.bf16, Precision.fp16)
        return super().traffic(replace(sizes, weight_bytes=2) if is_half else sizes)

    def _state_traffic(self, axes: Axes) -> Iterator[Sent]:
        if self.stage == 3:
            most = self.deepspeed_config["zero_optimization"].get("stage3_max_live_parameters", LIVE_ELEMENTS)
            return gather_weights(axes, most_live=most)
        # ZeRO-1 accumulates gradients where they are, ZeRO-2 on their owners.
        times = self.batch.num_microbatches if self.stage == 2 else 1
        return reduce_to_owners(axes, microbatches=times, hidden_by=Phase.backward)

    def _whole_traffic(self, axes: Axes) -> Iterator[Sent]:
        whole = axes.sizes.stepped_whole
        num_elements = sum(whole) if self.stage == 3 else cut_elements(whole, axes.topology.data)
        return axes.gather_runs(num_elements)

    @classmethod
    def held(cls, sizes: RankSizes) -> Iterator[tuple[Phase, MemoryUse]]:
        """Give the moments of a step at which a rank may hold most, with DeepSpeed's buckets."""
        return hold_in_step(sizes, STAGE[sizes.layout.sharding])

    @classmethod
    def copied(cls, sizes: RankSizes) -> Copied:
        """Give the bytes that DeepSpeed copies in a step. ZeRO-1 reduces gradients once, before the optimizer."""
        copied = copied_in_step(sizes)
        if STAGE[sizes.layout.sharding] == 1:
            return Copied(super().copied(sizes).backward, copied.optimizer + copied.backward)
        return copied

    def start(self) -> None:
        """Let DeepSpeed take over the process group: ZeRO-3's partitioning during construction asks it for the size."""
        start_deepspeed()

    def gathered(self, parameters: Iterable[nn.Parameter], *, writes: bool) -> AbstractContextManager[object]:
        """Hold parameters whole meanwhile, under ZeRO-3 by an all-gather. A collective there.

        `writes`: whether rank 0 changes them, and all ranks keep its values.
        """
        if not self.partitions_in_constructor or not (listed := list(parameters)):
            return nullcontext()
        import deepspeed

        return deepspeed.zero.GatheredParameters(listed, modifier_rank=0 if writes else None)

    @contextmanager
    def without_partitioning(self, arguments: TrainingArguments) -> Iterator[None]:
        """Let models made meanwhile stay whole: transformers' constructors find no DeepSpeed config."""
        hf_deepspeed.unset_hf_deepspeed_config()
        try:
            yield
        finally:
            hf_deepspeed.set_hf_deepspeed_config(arguments.hf_deepspeed_config)

    def build(self, model: nn.Module) -> ZeroEngine:
        """Take the model: accelerate hands it to DeepSpeed.

        Raises:
            ConfigError: a parameter that DeepSpeed cannot send.
        """
        check_no_scalars(model, "DeepSpeed")
        self._partition_once(model)
        if self.stage == 3:
            gather_experts_together(model)
        return ZeroEngine(model)
