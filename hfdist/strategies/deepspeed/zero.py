"""DeepSpeed ZeRO: optimizer state (1), gradients (2) and parameters (3) partitioned over the data ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel, TrainingArguments
from transformers.integrations import deepspeed as hf_deepspeed

from hfdist.checkpoint.piece import Piece
from hfdist.collectives import device_of
from hfdist.config.batch import BatchPlan
from hfdist.config.strategy import Offload, StrategyConfig
from hfdist.config.train import Precision, TrainConfig
from hfdist.errors import ConfigError
from hfdist.models.partitioning import whole_shape
from hfdist.optim.probe import Reach, moving_options
from hfdist.sent_bytes import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from hfdist.strategies.base import Strategy, check_no_scalars
from hfdist.strategies.deepspeed import pieces_zero
from hfdist.strategies.deepspeed.buckets import bucket_elements, fit_buckets
from hfdist.strategies.deepspeed.deepspeed_config import STAGE, generate
from hfdist.strategies.deepspeed.expert_modules import gather_experts_together, let_gradients_reach
from hfdist.strategies.deepspeed.flat_buffers import stepped_buffers
from hfdist.strategies.deepspeed.step_hooks import hook_steps
from hfdist.strategies.engine import Engine
from hfdist.strategies.held import have_room, is_partitioned, state_tensors, storage_bytes
from hfdist.strategies.step_memory import MemoryUse, RankSizes, ShardFractions
from hfdist.strategies.traffic import DATA, Axes, Phase, Sent, StepSizes, cut_elements
from hfdist.topology import Topology

if TYPE_CHECKING:
    from accelerate.optimizer import AcceleratedOptimizer
    from deepspeed import DeepSpeedEngine

    from hfdist.strategies.deepspeed.flat_buffers import ZeroOptimizer

_GENERATION = object()
"""Stands among the modules that use a parameter."""
_LIVE_ELEMENTS = 1e9
"""The most elements of weights that ZeRO-3 gathers and keeps at a time: `stage3_max_live_parameters`."""
_SPLIT = 1 / 3
"""Share of a block's parameters whose gradients a rank of ZeRO-1 and 2 keeps whole, though it steps only a part."""
_COPIES_OF_GRADIENTS, _COPIES_OF_STATE = 7, 6
"""How often DeepSpeed reads or writes each gradient more than autograd does, on its way through a bucket to its owner,
and each element of a rank's own part more than the optimizer does: by traces of ZeRO-1, -2 and -3."""
_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
"""Counters of a DeepSpeed engine that go on at a resume."""
_MOVING = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""What steps change in a loss scaler."""


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
        """Add the DeepSpeed config. Under ZeRO-3, models made after it are partitioned while they are made."""
        return super().training_arguments() | {"deepspeed": self.deepspeed_config}

    def agreed_arguments(self) -> dict[str, object]:
        """Give those for which DeepSpeed has keys of its own."""
        return {
            "max_grad_norm": self._train.max_grad_norm,
            "bf16": self._train.precision is Precision.bf16,
            "fp16": self._train.precision is Precision.fp16,
        }

    def traffic(self, sizes: StepSizes) -> list[Sent]:
        """As of the base class. In half precision DeepSpeed's weights and gradients are of that type."""
        is_half = self._train.precision in (Precision.bf16, Precision.fp16)
        return super().traffic(replace(sizes, weight_bytes=2) if is_half else sizes)

    def _state_traffic(self, axes: Axes) -> Iterator[Sent]:
        num_microbatches = self.batch.num_microbatches
        if self.stage < 3:
            # ZeRO-1 accumulates gradients where they are, ZeRO-2 on their owners.
            times = num_microbatches if self.stage == 2 else 1
            yield from reduce_to_owners(axes, microbatches=times, hidden_by=Phase.backward)
            return
        held, num_blocks = axes.held(), axes.sizes.num_blocks
        small = axes.sizes.small
        large = held - small
        # What it may keep between a forward and its backward.
        most = self.deepspeed_config["zero_optimization"].get("stage3_max_live_parameters", _LIVE_ELEMENTS)
        again = max(0.0, large - most)
        reduce = partial(axes.reduce, calls=num_blocks * num_microbatches, microbatches=num_microbatches)
        of_step = num_microbatches * large, num_microbatches * again
        yield from reduce(ALL_GATHER, DATA, of_step[0], is_gradient=False, hidden_by=Phase.forward)
        yield from reduce(ALL_GATHER, DATA, of_step[1], is_gradient=False, hidden_by=Phase.backward)
        yield from reduce(REDUCE_SCATTER, DATA, num_microbatches * held, hidden_by=Phase.backward)
        yield from axes.reduce(ALL_GATHER, DATA, small, calls=1)

    def _whole_traffic(self, axes: Axes) -> Iterator[Sent]:
        whole = axes.sizes.stepped_whole
        num_elements = sum(whole) if self.stage == 3 else cut_elements(whole, axes.topology.data)
        return axes.gather_runs(num_elements)

    @classmethod
    def held(cls, sizes: RankSizes) -> Iterator[tuple[Phase, MemoryUse]]:
        """See the base class. Gradients go through buckets, and autocast makes no copies of weights in its own type."""
        half, weight_bytes = sizes.half_bytes or sizes.gradient_bytes, sizes.half_bytes or sizes.weight_bytes
        use = with_master_weights(replace(sizes, weight_bytes=weight_bytes)).state()
        use = use if sizes.half_bytes is None else replace(use, activations=sizes.kept)
        in_forward, in_backward = use.activations + sizes.of_head, use.activations + sizes.working
        bucket = bucket_elements(sizes.trained, sizes.trained_end)
        share, is_here = sizes.stepped, sizes.layout.offload is Offload.none
        stepped, stage = share * 4.0 * is_here, STAGE[sizes.layout.sharding]
        if stage == 3:
            # Gradients have a place that stays.
            buffers = (min(sizes.elements, _LIVE_ELEMENTS) + bucket) * half
            yield Phase.forward, replace(use, activations=in_forward, buffers=buffers)
            yield Phase.backward, replace(use, activations=in_backward, buffers=buffers + bucket * half)
            yield Phase.optimizer, replace(use, activations=0.0, buffers=bucket * half + stepped)
            return
        own = stepped
        if sizes.half_bytes is None and sizes.fractions.optimizer < 1 and share:
            # A rank keeps gradients whole, also of what it steps in part; where the largest one ends, it keeps it with
            # the rest of its own part.
            whole = share * max(1, math.ceil(sizes.trained_end / share))
            own = (whole + _SPLIT * sizes.trained_block) * 4.0 * is_here
        # ZeRO-1 of bfloat16 has none.
        buckets = 0.0 if stage == 1 and sizes.half_bytes is not None else 2 * bucket * half
        accumulates = sizes.layout.num_microbatches > 1
        before = (sizes.trained * 4.0 if stage == 1 else own) * accumulates
        # ZeRO-1 lets its buckets go after the last micro batch only.
        waiting = buckets * (stage == 1 and accumulates)
        yield Phase.forward, replace(use, gradients=before, activations=in_forward, buffers=waiting)
        yield Phase.backward, replace(use, gradients=before, activations=in_backward, buffers=buckets)
        at_end, sent = own if stage == 1 else before + own, buckets + min(bucket, share) * half
        yield Phase.backward, replace(use, gradients=at_end, activations=sizes.working, buffers=sent)
        yield Phase.optimizer, replace(use, gradients=own, activations=0.0, buffers=stepped)

    @classmethod
    def copied(cls, sizes: RankSizes) -> tuple[float, float]:
        """See the base class. ZeRO-1 reduces gradients of all micro batches at once."""
        gradients = _COPIES_OF_GRADIENTS * sizes.trained * (sizes.half_bytes or sizes.gradient_bytes)
        state = _COPIES_OF_STATE * sizes.stepped * sizes.gradient_bytes
        if STAGE[sizes.layout.sharding] == 1:
            return super().copied(sizes)[0], state + gradients
        return gradients, state

    def start(self) -> None:
        """Let DeepSpeed take over the process group: ZeRO-3's partitioning during construction asks it for the size."""
        start_deepspeed()

    def gathered(self, parameters: Iterable[nn.Parameter], *, writes: bool) -> AbstractContextManager[object]:
        """All-gather under ZeRO-3."""
        if not self.partitions_in_constructor or not (listed := list(parameters)):
            return nullcontext()
        import deepspeed

        return deepspeed.zero.GatheredParameters(listed, modifier_rank=0 if writes else None)

    @contextmanager
    def without_partitioning(self, arguments: TrainingArguments) -> Iterator[None]:
        """Take away the DeepSpeed config that transformers' constructors look for."""
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


def with_master_weights(sizes: RankSizes) -> RankSizes:
    """DeepSpeed steps float32 copies, with float32 gradients."""
    return replace(sizes, gradient_bytes=4.0, optimizer_bytes=sizes.optimizer_bytes + 4.0)


def reduce_to_owners(axes: Axes, *, microbatches: int, hidden_by: Phase | None) -> Iterator[Sent]:
    """ZeRO-1 and 2: gradients to the ranks that step them, and the weights back to all."""
    held = axes.held()
    # See `use_multi_rank_bucket_allreduce` in deepspeed_config.py.
    kind = ALL_REDUCE if axes.sizes.is_gpu else "reduce"
    calls = axes.sizes.num_blocks * microbatches
    yield from axes.reduce(kind, DATA, held * microbatches, calls=calls, hidden_by=hidden_by, microbatches=microbatches)
    yield from axes.reduce(ALL_GATHER, DATA, held, calls=1)


def start_deepspeed() -> None:
    """Let DeepSpeed take over the process group, or make one of this process alone."""
    import deepspeed

    if not torch.cuda.is_available():
        # On a CPU, DeepSpeed compiles a shared-memory all-reduce for half a minute, which only its inference
        # calls, and leaves its 66 MiB a rank in /dev/shm. An empty table of what could be compiled also
        # spares the trial compilations that would fill it.
        deepspeed.ops.__compatible_ops__ = {}
    if not dist.is_initialized():
        # One process without a launcher: DeepSpeed would look for MPI, and for the launcher's LOCAL_RANK.
        os.environ.setdefault("LOCAL_RANK", "0")
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]  # not in its stubs
    deepspeed.init_distributed(verbose=False)


def _check_counts_nothing(optimizer: torch.optim.Optimizer) -> None:
    # DeepSpeed steps the optimizer once for each flat buffer, and takes these out of the groups in between.
    counted = moving_options(optimizer)
    if counted:
        raise ConfigError(
            "ZeRO-3 steps the parameters of a group one part after the other, and this optimizer counts steps by group",
            where="strategy.sharding",
            found=f"zero3, with {type(optimizer).__name__}, which changes {', '.join(counted)} of its groups",
            allowed="none, zero1, zero2",
            hint="strategy.sharding=zero2",
        )


class ZeroEngine(Engine):
    """DeepSpeed reduces, clips and steps inside the last backward; state is found where it keeps it.

    Under ZeRO-3 every forward is a collective, in evaluation too.
    """

    optimizer_sees = Reach.parameter
    steps_other_tensors = True
    clips_stepped = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._engine: DeepSpeedEngine | None = None

    def setup(
        self, prepared: nn.Module, optimizer: AcceleratedOptimizer, scaler: torch.amp.GradScaler | None
    ) -> AcceleratedOptimizer:
        """Keep the DeepSpeed engine that accelerate made.

        Raises:
            ConfigError: under ZeRO-3, an optimizer that counts in its groups.
        """
        self._engine = prepared
        own: ZeroOptimizer = prepared.optimizer
        if hasattr(own, "fp32_partitioned_groups_flat"):
            _check_counts_nothing(own.optimizer)
            let_gradients_reach(self.model)
        loss_scaler = getattr(own, "loss_scaler", None)
        if loss_scaler is not None and hasattr(loss_scaler, "raise_error_at_min_scale"):
            # The trainer counts skipped steps, and says what to do about them.
            loss_scaler.raise_error_at_min_scale = False
        self._whole_steps = hook_steps(self.model, cast(PreTrainedModel, self.model), own)
        fit_buckets(own, self.model.parameters())
        return optimizer

    def whole_shape(self, parameter: torch.Tensor) -> tuple[int, ...]:
        """Under ZeRO-3, which partitions parameters, as DeepSpeed notes it."""
        return whole_shape(parameter)

    def whole_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Working weights; under ZeRO-3 the small ones, which stay whole on every rank between steps."""
        return pieces_zero.whole_parameters(self.model)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """See the base class. Under ZeRO-3 weights are gathered in the type that the model computes in."""
        partitioned: list[Any] = [p for p in self.model.parameters() if is_partitioned(p)]
        num_bytes = sum(p.ds_numel * p.element_size() for p in partitioned)
        if not partitioned or not have_room(num_bytes, device_of(None)):
            yield
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters(partitioned):
            # DeepSpeed frees what a module has used, unless another one still uses it.
            for parameter in partitioned:
                parameter.ds_active_sub_modules.add(_GENERATION)
            try:
                yield
            finally:
                for parameter in partitioned:
                    parameter.ds_active_sub_modules.discard(_GENERATION)

    def pieces(self) -> Iterable[Piece]:
        """This rank's runs of the flattened parameters, and their optimizer state."""
        return pieces_zero.list_pieces(self.model, self._engine, self._whole_steps)

    def weights(self) -> Iterable[Piece]:
        """This rank's part of the weights that the model computes with; under ZeRO-1 and 2 all of them."""
        return pieces_zero.list_weights(self.model)

    def held_bytes(self, device: torch.device) -> dict[str, int]:
        """Give the bytes of weights, and of what the optimizer steps with its state, without DeepSpeed's buckets."""
        weights = [getattr(parameter, "ds_tensor", parameter) for parameter in self.model.parameters()]
        found = {"weights": storage_bytes([*weights, *self.model.buffers()], device)}
        if self._engine is None:
            return found
        zero = self._engine.optimizer
        in_weights = {tensor.untyped_storage().data_ptr() for tensor in weights}
        stepped = [flat for flat in stepped_buffers(zero) if flat.untyped_storage().data_ptr() not in in_weights]
        return found | {"optimizer": storage_bytes([*stepped, *state_tensors(zero.optimizer)], device)}

    def extra_state(self) -> dict[str, dict[str, float]]:
        """DeepSpeed's counters, and the state of its loss scale under fp16."""
        assert self._engine is not None
        scaler = getattr(self._engine.optimizer, "loss_scaler", None)
        fields = {} if scaler is None else vars(scaler)
        scale = {name: value for name, value in fields.items() if isinstance(value, (int, float))}
        return {"counters": {name: getattr(self._engine, name) for name in _COUNTERS}, "loss_scaler": scale}

    def load_extra_state(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Set DeepSpeed's counters and loss scale."""
        assert self._engine is not None
        for name in _COUNTERS:
            if name in state.get("counters", {}):
                setattr(self._engine, name, state["counters"][name])
        scaler, saved = getattr(self._engine.optimizer, "loss_scaler", None), state.get("loss_scaler", {})
        # The rest is settings, which may be others now: a scale that is fixed, too.
        if getattr(scaler, "dynamic", False) and saved.get("dynamic"):
            for name in _MOVING:
                setattr(scaler, name, saved[name])

    def after_load(self) -> None:
        """Copy the float32 masters that were read into the weights that the model computes with."""
        pieces_zero.after_load(self.model, self._engine)
