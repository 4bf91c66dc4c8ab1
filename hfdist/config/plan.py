"""Where this process stands among the others, and what share of a step it takes: one place for every recipe."""

from __future__ import annotations

from hfdist.config.batch import BatchPlan, plan_batch
from hfdist.config.run import RunConfig
from hfdist.topology import Topology


def plan_run(config: RunConfig, *, world_size: int | None = None) -> tuple[Topology, BatchPlan]:
    """Find this process's place and the batch arithmetic.

    Args:
        config: of the run.
        world_size: of processes that are still to be started, seen from the first; None: the launcher's.

    Raises:
        ConfigError: too few processes, or sizes that do not divide.
    """
    degrees = config.strategy.degrees
    topology = Topology.from_environment(degrees) if world_size is None else Topology.of(degrees, world_size=world_size)
    batch = plan_batch(
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch_size,
        data_size=topology.data_size,
        sequence_length=config.data.sequence_length,
        lanes=config.data.lanes,
    )
    return topology, batch
