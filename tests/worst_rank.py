"""The rank of a planned run with the most memory, traced."""

from transformers import PreTrainedConfig

from hfdist.config.checks.preflight import plan_run
from hfdist.config.run import RunConfig
from hfdist.planning.tracing.memory import RankTrace, fullest_pipeline, trace_rank
from hfdist.strategies.select import select_strategy


def worst_rank(
    config: RunConfig, architecture: PreTrainedConfig, *, world_size: int, device_type: str = "cpu"
) -> RankTrace:
    """Trace the rank with the most memory, among the stages of the `fullest_pipeline`.

    Raises:
        ConfigError: as of `trace_rank`.
    """
    topology, batch = plan_run(config, world_size=world_size)
    strategy = select_strategy(config.strategy, config.train, topology=topology, batch=batch, device_type=device_type)
    traces = [
        trace_rank(config, architecture, world_size=world_size, rank=rank, device_type=device_type)
        for rank in fullest_pipeline(config, architecture, strategy)
    ]
    return max(traces, key=lambda one: one.peak.use.total)
