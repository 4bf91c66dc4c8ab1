"""The engine of DeepSpeed's ZeRO: what the trainer may ask of a model that accelerate has handed to DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from hfdist.checkpoint.piece import Piece
from hfdist.collectives import device_of
from hfdist.errors import ConfigError
from hfdist.models.partitioning import whole_shape
from hfdist.optim.probe import Reach, moving_options
from hfdist.strategies.deepspeed import pieces_zero
from hfdist.strategies.deepspeed.buckets import fit_buckets
from hfdist.strategies.deepspeed.expert_modules import let_gradients_reach
from hfdist.strategies.deepspeed.flat_buffers import stepped_buffers
from hfdist.strategies.deepspeed.step_hooks import hook_steps
from hfdist.strategies.engine import Engine
from hfdist.strategies.held import have_room, is_partitioned, state_tensors, storage_bytes

if TYPE_CHECKING:
    from accelerate.optimizer import AcceleratedOptimizer
    from deepspeed import DeepSpeedEngine

    from hfdist.strategies.deepspeed.flat_buffers import ZeroOptimizer

_GENERATION = object()
"""Stands among the modules that use a parameter, so that DeepSpeed keeps it gathered."""
COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
"""Counters of a DeepSpeed engine that go on at a resume."""
_MOVING = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""What steps change in a loss scaler."""


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
        zero: ZeroOptimizer = prepared.optimizer
        if hasattr(zero, "fp32_partitioned_groups_flat"):
            _check_counts_nothing(zero.optimizer)
            let_gradients_reach(self.model)
        loss_scaler = getattr(zero, "loss_scaler", None)
        if loss_scaler is not None and hasattr(loss_scaler, "raise_error_at_min_scale"):
            # The trainer counts skipped steps, and says what to do about them.
            loss_scaler.raise_error_at_min_scale = False
        self._whole_steps = hook_steps(self.model, cast(PreTrainedModel, self.model), zero)
        fit_buckets(zero, self.model.parameters())
        return optimizer

    def whole_shape(self, parameter: torch.Tensor) -> tuple[int, ...]:
        """Under ZeRO-3, which partitions parameters, as DeepSpeed notes it."""
        return whole_shape(parameter)

    def whole_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Working weights; under ZeRO-3 the small ones, which stay whole on every rank between steps."""
        return pieces_zero.whole_parameters(self.model)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Make weights whole for a while; under ZeRO-3 they are gathered in the type that the model computes in."""
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
        return {"counters": {name: getattr(self._engine, name) for name in COUNTERS}, "loss_scaler": scale}

    def load_extra_state(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Set DeepSpeed's counters and loss scale."""
        assert self._engine is not None
        for name in COUNTERS:
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


def _check_counts_nothing(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that counts in its groups: ConfigError."""
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
