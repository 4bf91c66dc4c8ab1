"""One layout of a run as a value: degrees, sharding and division of a step; and the overrides that ask for it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hfdist.config.plain_values import override_value, plain
from hfdist.config.run import RunConfig
from hfdist.config.strategy import ONE_F_ONE_B, ContextMethod, Offload, Schedule, Sharding
from hfdist.config.train import Recompute, TrainConfig
from hfdist.topology import MODEL_AXES, Mesh


@dataclass(frozen=True, kw_only=True)
class Layout(Mesh):
    """How so many processes train one model."""

    sequence: bool = False
    """Whether tensor ranks share the tokens between attention and MLP."""
    sharding: Sharding = Sharding.none
    offload: Offload = Offload.none
    schedule: Schedule = ONE_F_ONE_B
    stages_per_rank: int = 1
    micro_batch_size: int = 1
    num_microbatches: int = 1
    """Micro batches of one data rank in a step."""
    recompute: Recompute | None = None
    """What the backward computes again; None: activations are kept."""

    @property
    def is_ddp(self) -> bool:
        """Whether DDP averages the gradients."""
        return self.sharding is Sharding.none and self.data * self.context > 1 and not self.divides_parameters

    @property
    def shares_of_sequences(self) -> float:
        """Sequences of a micro batch that one rank computes: less than one where ranks share a sequence."""
        return self.micro_batch_size / self.context

    def apply(self, config: RunConfig) -> RunConfig:
        """Give the config of a run in this layout; what belongs to another one gets its default."""
        strategy, train = config.strategy, config.train
        is_fsdp, has_pipeline = self.sharding is Sharding.fsdp2, self.pipeline > 1
        new_strategy = replace(
            strategy,
            sharding=self.sharding,
            data=None if strategy.data is None else self.data,
            min_data=min(strategy.min_data, self.data),
            **{axis: getattr(self, axis) for axis in ("replicate", *MODEL_AXES)},
            sequence=self.sequence,
            context_method=strategy.context_method if self.context > 1 else ContextMethod.auto,
            schedule=self.schedule if has_pipeline else strategy.schedule,
            stages_per_rank=self.stages_per_rank if has_pipeline and self.schedule is not Schedule.auto else None,
            blocks_per_stage=None,
            offload=self.offload,
            reshard=strategy.reshard if is_fsdp and not has_pipeline else None,
            prefetch=strategy.prefetch if is_fsdp and not has_pipeline else 0,
        )
        recomputes = self.recompute is not None
        new_train = replace(
            train,
            micro_batch_size=self.micro_batch_size,
            gradient_checkpointing=recomputes,
            recompute=self.recompute or Recompute.all,
            activation_offload=train.activation_offload and recomputes,
        )
        lanes, readers = config.data.lanes, self.data * config.islands.shares
        # The next multiple of the data ranks of all islands: a run that is planned has not begun to read.
        data = replace(config.data, lanes=-(-lanes // readers) * readers)
        return replace(config, strategy=new_strategy, train=new_train, data=data)

    def overrides(self, config: RunConfig) -> tuple[str, ...]:
        """Give what must be added to the command of `config` to run this layout."""
        new = self.apply(config)
        changed: list[str] = []
        for section in ("strategy", "train", "data"):
            before, after = plain(getattr(config, section)), plain(getattr(new, section))
            changed += [f"{section}.{key}={override_value(after[key])}" for key in after if after[key] != before[key]]
        return tuple(changed)

    @classmethod
    def of(cls, config: RunConfig, processes: int, stages_per_rank: int) -> Layout:
        """Give the layout that a config asks for; ConfigError: its degrees do not fit so many processes."""
        strategy, train = config.strategy, config.train
        topology = strategy.topology(processes)
        return cls(
            **{axis: getattr(topology, axis) for axis in ("data", "replicate", *MODEL_AXES)},
            sequence=strategy.sequence,
            sharding=strategy.sharding,
            offload=strategy.offload,
            schedule=strategy.schedule,
            stages_per_rank=stages_per_rank,
            micro_batch_size=train.micro_batch_size,
            num_microbatches=train.global_batch_size // (topology.data * train.micro_batch_size),
            recompute=recompute_of(train),
        )


def recompute_of(train: TrainConfig) -> Recompute | None:
    """What activation checkpointing computes again in this run; None: it is off."""
    return train.recompute if train.gradient_checkpointing else None
