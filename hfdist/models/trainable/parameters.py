"""What of a model a run trains: all of it, an adapter, or what patterns of names say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import nn
from transformers import PreTrainedModel

from hfdist.config.adapter import AdapterConfig
from hfdist.config.model import ModelConfig
from hfdist.config.run import RunConfig
from hfdist.models.trainable.adapter import add_adapter
from hfdist.models.trainable.adapter_config import reads_weights
from hfdist.models.trainable.freeze import freeze_by_name


@dataclass(frozen=True, kw_only=True)
class TrainableParameters:
    """`adapter.*`, `train.freeze` and `train.train_only`, as `build_model` needs them."""

    base: ModelConfig = field(default_factory=ModelConfig)
    """As the user named it, not where it lies on this machine: an adapter says what it belongs to."""
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    freeze: tuple[str, ...] = ()
    train_only: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: RunConfig) -> TrainableParameters:
        """Take the keys out of a config."""
        train = config.train
        return cls(
            base=config.model,
            adapter=config.adapter,
            freeze=tuple(train.freeze),
            train_only=tuple(train.train_only),
        )

    @property
    def reads_weights(self) -> bool:
        """Whether the model's weights must have their final values and type when `choose` is called."""
        return reads_weights(self.adapter)

    def choose(self, model: PreTrainedModel, *, seed: int) -> None:
        """Put the adapter in, and freeze what is not trained; in place, and before the model is cut.

        Args:
            model: whole, or cut by ZeRO-3.
            seed: of the adapter's weights.

        Raises:
            ConfigError: what the model does not have, or nothing that is left to train.
        """
        if self.adapter.is_used:
            add_adapter(model, self.adapter, self.base, seed=seed)
        freeze_by_name(model, freeze=self.freeze, train_only=self.train_only)

    @contextmanager
    def kept_in_float32(self, model: nn.Module) -> Iterator[None]:
        """Let a change of type pass by what an adapter trains: small updates vanish in half precision."""
        kept = []
        if self.adapter.is_used:
            kept = [(p, p.data.float()) for p in model.parameters() if p.requires_grad and p.is_floating_point()]
        yield
        for parameter, value in kept:
            parameter.data = value
