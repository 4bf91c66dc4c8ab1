"""Traces of pipelines: each schedule runs on fake tensors, and holds as many micro batches as it keeps alive."""

import functools

import pytest

from hfdist.config.composition.compose import compose_config
from hfdist.config.strategy import ONE_F_ONE_B, Schedule
from hfdist.models import find_architecture
from hfdist.pipeline.schedule import rank_of_stage, stages_per_rank
from hfdist.planning.tracing.memory import trace_rank
from hfdist.planning.tracing.pipeline_trace import most_held
from tests.image_models import make_model, make_processor
from tests.marks import many

_WIDTH = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}


@functools.cache
def _trace(schedule, *, rank=0, sequences=4, world_size=2, overrides=()):
    config = compose_config(
        [
            "model=tiny",
            "strategy=pipeline",
            "strategy.pipeline=2",
            f"strategy.schedule={schedule.value}",
            "data.sequence_length=128",
            "train.micro_batch_size=1",
            f"train.global_batch_size={sequences}",
            *overrides,
        ]
    )
    config.model.type, config.model.config = "llama", {**_WIDTH, "vocab_size": 256}
    architecture = find_architecture(config.model, sequence_length=128)
    return trace_rank(config, architecture, world_size=world_size, rank=rank)


USUAL = (Schedule.auto, Schedule.interleaved_zero_bubble, Schedule.dualpipev)


@pytest.mark.parametrize(
    "schedule", [one if one in USUAL else many(one) for one in Schedule], ids=lambda schedule: schedule.value
)
def test_each_schedule_gives_the_costs_of_each_stage(schedule):
    trace = _trace(schedule)
    assert len(trace.costs.stages) == stages_per_rank(schedule, None)
    assert all(stage.backward.flops > stage.forward.flops > 0 for stage in trace.costs.stages[:1])
    assert trace.costs.optimizer.moved_bytes > 0


def test_gpipe_keeps_all_micro_batches_and_1f1b_as_many_as_ranks():
    gpipe = [_trace(Schedule.gpipe, sequences=number).peak.use.total for number in (4, 8, 16)]
    assert gpipe[2] - gpipe[1] == pytest.approx(2 * (gpipe[1] - gpipe[0]), rel=0.01)
    few, more = (_trace(ONE_F_ONE_B, sequences=number).peak.use.total for number in (4, 16))
    assert few == more < gpipe[0]


def test_fsdp2_shards_the_state_of_stages():
    whole = _trace(ONE_F_ONE_B).state
    sharded = _trace(ONE_F_ONE_B, world_size=4, sequences=8, overrides=("strategy.sharding=fsdp2",)).state
    assert sharded.optimizer == pytest.approx(whole.optimizer / 2, rel=0.05)


def test_the_last_rank_of_1f1b_holds_one_micro_batch():
    held = most_held(ONE_F_ONE_B, rank_of_stage(ONE_F_ONE_B, 4, 1), 16)
    assert [max(moment[0] for moment in moments) for moments in held] == [4, 3, 2, 1]


def test_the_first_stage_has_what_reads_images():
    model = make_model("llava", make_processor("llava"))
    own = ["strategy=pipeline", "strategy.blocks_per_stage=[1,1]", "data.images.used=true", "train.global_batch_size=4"]
    config = compose_config(["model=tiny", "data.sequence_length=64", "train.micro_batch_size=1", *own])
    held = [trace_rank(config, model.config, world_size=2, rank=rank).state.weights / 4 for rank in range(2)]
    language, blocks = model.model.language_model, model.model.language_model.layers
    last = sum(p.numel() for part in (blocks[1], language.norm, model.lm_head) for p in part.parameters())
    # Both have the rotary frequencies and the tower's positions, which are int64.
    buffers = sum(buffer.nbytes for buffer in model.buffers()) / 4
    assert held == [model.num_parameters() - last + buffers, last + buffers]
