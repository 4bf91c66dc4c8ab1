"""A strategy refuses an axis of the mesh that it does not use: its ranks would train, each alone, on wrong numbers."""

import pytest

from hfdist.config.batch import plan_batch
from hfdist.config.strategy import Sharding, StrategyConfig
from hfdist.config.train import TrainConfig
from hfdist.errors import ConfigError
from hfdist.strategies.select import select_strategy
from hfdist.topology import MODEL_AXES, Topology

USED = {
    (Sharding.none, 1): ("context", "tensor", "expert"),
    (Sharding.fsdp2, 1): ("context", "tensor", "expert"),
    (Sharding.zero1, 1): (),
    (Sharding.zero3, 1): (),
    (Sharding.none, 2): ("pipeline", "context", "tensor", "expert"),
    (Sharding.zero1, 2): ("pipeline", "context"),
    (Sharding.fsdp2, 2): ("pipeline", "context", "tensor", "expert"),
}


@pytest.mark.parametrize(("sharding", "pipeline"), USED)
def test_axes_that_a_layout_does_not_use_are_refused(sharding, pipeline):
    batch = plan_batch(global_batch_size=8, micro_batch_size=1, data_size=2, sequence_length=8, lanes=2)
    for axis in MODEL_AXES:
        degrees = {"pipeline": pipeline, axis: 2}
        config = StrategyConfig(sharding=sharding, **degrees)
        # The choice follows the keys: here the mesh alone has another axis.
        config.pipeline = pipeline
        topology = Topology(data=2, **degrees)
        if axis in USED[sharding, pipeline]:
            assert select_strategy(config, TrainConfig(), topology=topology, batch=batch, device_type="cpu")
            continue
        with pytest.raises(ConfigError, match=rf"does not use this axis\n +where: +strategy.{axis}"):
            select_strategy(config, TrainConfig(), topology=topology, batch=batch, device_type="cpu")
