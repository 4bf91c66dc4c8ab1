"""Rank arithmetic and batch arithmetic, and what happens when processes or numbers do not fit."""

import itertools

import pytest

from hfdist.config.batch import plan_batch
from hfdist.config.strategy import StrategyConfig
from hfdist.errors import ConfigError
from hfdist.topology import read_launcher


def test_tensor_is_the_fastest_axis_and_pipeline_the_slowest():
    places = [StrategyConfig(pipeline=2, tensor=2).topology(8, rank=rank) for rank in range(8)]
    assert [place.pipeline_rank for place in places] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [place.data_rank for place in places] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert places[0].mesh_shape == {"pipeline": 2, "replicate": 1, "shard": 2, "context": 1, "tensor": 2}


@pytest.mark.parametrize(("pipeline", "context", "tensor", "data"), itertools.product((1, 2), (1, 2), (1, 3), (1, 4)))
def test_each_replica_reads_one_share_and_all_shares_are_read(pipeline, context, tensor, data):
    degrees = StrategyConfig(pipeline=pipeline, context=context, tensor=tensor)
    world_size = data * degrees.mesh.model
    places = [degrees.topology(world_size, rank=rank) for rank in range(world_size)]
    assert all(place.data == data for place in places)
    shares = [sum(place.data_rank == share for place in places) for share in range(data)]
    assert shares == [degrees.mesh.model] * data


def test_a_degree_that_is_not_given_is_one_and_data_is_what_is_left():
    assert StrategyConfig().topology(6).data == 6
    assert StrategyConfig(pipeline=3).topology(6).data == 2


@pytest.mark.parametrize(
    ("degrees", "world_size", "needed"),
    [
        (StrategyConfig(data=2), 1, "exactly 2"),
        (StrategyConfig(data=1), 2, "exactly 1"),
        (StrategyConfig(min_data=2), 1, "2 or more"),
        (StrategyConfig(pipeline=2), 3, "multiple of 2"),
        (StrategyConfig(data=2, pipeline=2), 2, "exactly 4"),
    ],
)
def test_processes_that_do_not_fit_are_an_error_that_tells_how_to_launch(degrees, world_size, needed):
    with pytest.raises(ConfigError) as caught:
        degrees.topology(world_size)
    message = str(caught.value)
    assert needed in message
    assert f"found:   {world_size} process" in message
    assert "launch.processes=" in message or "without a launcher" in message


def test_experts_spread_over_data_ranks_of_one_replica():
    degrees = StrategyConfig(expert=2, replicate=2, tensor=2)
    shape = {"pipeline": 1, "replicate": 2, "expert_shard": 1, "expert": 2, "context": 1, "tensor": 2}
    assert degrees.topology(8).mesh_shape == shape
    for degrees, allowed in ((StrategyConfig(expert=3), "1, 2, 4"), (StrategyConfig(expert=4, replicate=2), "1, 2")):
        with pytest.raises(ConfigError, match="expert degree must divide") as caught:
            degrees.topology(4)
        assert caught.value.allowed == allowed


def test_the_launchers_environment():
    place = read_launcher({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"})
    assert (place.rank, place.world_size, place.local_rank) == (3, 4, 1)
    assert read_launcher({}).world_size == 1
    with pytest.raises(ConfigError, match="does not name a process"):
        read_launcher({"RANK": "4", "WORLD_SIZE": "4"})
    with pytest.raises(ConfigError, match="not a whole number"):
        read_launcher({"WORLD_SIZE": "four"})


def test_description():
    assert StrategyConfig().topology(1).describe() == "1 process"
    assert StrategyConfig(pipeline=2).topology(8).describe() == "8 processes: pipeline 2 x data 4"


def plan(global_batch_size=32, micro_batch_size=4, data_size=2, sequence_length=128, lanes=48):
    return plan_batch(
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        data_size=data_size,
        sequence_length=sequence_length,
        lanes=lanes,
    )


def test_the_number_of_processes_changes_only_the_accumulation():
    plans = [plan(data_size=size) for size in (1, 2, 4, 8)]
    assert [p.num_microbatches for p in plans] == [8, 4, 2, 1]
    assert {p.tokens_per_step for p in plans} == {32 * 128}


def test_a_global_batch_that_does_not_divide_proposes_the_nearest():
    with pytest.raises(ConfigError) as caught:
        plan(global_batch_size=30, micro_batch_size=4, data_size=2)
    message = str(caught.value)
    assert "train.global_batch_size" in message
    assert "nearest: 24 or 32" in message
    assert "train.micro_batch_size=3" in message
    with pytest.raises(ConfigError, match=r"train\.micro_batch_size=98304"):
        plan(global_batch_size=2**60 * 3, micro_batch_size=10**9, data_size=1)


def test_a_global_batch_smaller_than_one_micro_batch_proposes_only_what_is_possible():
    with pytest.raises(ConfigError, match="nearest: 8"):
        plan(global_batch_size=6, micro_batch_size=4, data_size=2)


def test_lanes_that_data_ranks_cannot_share_propose_the_next():
    with pytest.raises(ConfigError, match=r"data\.lanes=50"):
        plan(global_batch_size=40, data_size=5, lanes=48)
