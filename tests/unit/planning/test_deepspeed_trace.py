"""ZeRO in a plan: DeepSpeed's own engine on fake tensors, in each type and stage, and nothing of it left behind."""

import functools

import pytest
import torch.distributed as dist
from torch import nn

from hfdist.config.composition.compose import compose_config
from hfdist.errors import ConfigError
from hfdist.models import find_architecture
from hfdist.planning.tracing.memory import trace_rank
from hfdist.strategies.deepspeed.buckets import rank_with_most_gradients
from tests.marks import many
from tests.worst_rank import worst_rank


@functools.cache
def trace(*overrides, layers=1, world_size=2, device_type="cpu"):
    small = (
        "model=tiny",
        f"model.config.num_hidden_layers={layers}",
        "data.sequence_length=64",
        "train.micro_batch_size=1",
    )
    config = compose_config([*small, *overrides])
    architecture = find_architecture(config.model, sequence_length=64)
    return trace_rank(config, architecture, world_size=world_size, rank=0, device_type=device_type)


@pytest.fixture(scope="module")
def whole():
    return trace("strategy=ddp").state


def test_each_stage_shares_one_more_part_of_the_state(whole):
    linear = nn.functional.linear
    traces = [trace(f"strategy=zero{stage}", world_size=4) for stage in (1, 2, 3)]
    one, two, three = (traced.state for traced in traces)
    # A quarter of the float32 masters and of two moments.
    assert one.optimizer == pytest.approx(0.25 * 3 / 2 * whole.optimizer, rel=0.02)
    assert one.weights == pytest.approx(two.weights) == pytest.approx(whole.weights, rel=0.02)
    assert three.weights < 0.75 * whole.weights
    # DeepSpeed's own buckets hold 50M elements, of a model of a tenth of a million.
    assert all(traced.peak.use.buffers < 3 * whole.weights for traced in traces)
    assert not dist.is_initialized()
    assert nn.functional.linear is linear


def test_the_rank_with_most_gradients_is_planned():
    overrides = ["model=tiny", "strategy=zero2", "data.sequence_length=16", "train.micro_batch_size=1"]
    # The first rank's part ends within the MLP's first matrix, and two more of them are the second rank's.
    fields = "model.config={num_hidden_layers: 1, hidden_size: 64, intermediate_size: 176, vocab_size: 64}"
    config = compose_config([*overrides, fields])
    architecture = find_architecture(config.model, sequence_length=16)
    first = trace_rank(config, architecture, world_size=2, rank=0).peak
    worst = worst_rank(config, architecture, world_size=2).peak
    assert worst.rank == 1
    assert worst.use.total > 1.05 * first.use.total


def test_a_rank_keeps_whole_what_it_steps_in_part():
    # Parts of 10: 12, 16 and 18 elements.
    assert rank_with_most_gradients([[8, 4, 12, 6]], 3) == 2
    assert rank_with_most_gradients([[2, 2, 12, 8]], 3) == 0
    assert rank_with_most_gradients([[6], [], [0]], 64) == 0


@pytest.mark.parametrize("precision", ["bf16", many("fp16")])
def test_half_precision_halves_the_weights_of_zero(whole, precision):
    state = trace("strategy=zero2", f"train.precision={precision}").state
    assert state.weights == pytest.approx(whole.weights / 2, rel=0.02)


def test_many_ranks_hold_hardly_any_state(whole):
    traced = trace("strategy=zero3", "train.global_batch_size=64", "data.lanes=64", world_size=64)
    assert traced.state.optimizer < 0.03 * whole.optimizer


def test_on_a_gpu_offloaded_state_lies_on_the_host():
    state = trace("strategy=zero3_offload", world_size=1, device_type="cuda").state
    assert state.optimizer == 0
    assert state.weights > 0


def test_what_quantizes_on_gpus_only_has_a_plan_where_there_is_none():
    plus = "strategy.deepspeed={zero_optimization: {zero_quantized_weights: true, zero_quantized_gradients: true}}"
    with pytest.raises(ConfigError, match="on GPUs only"):
        trace("strategy=zero3", plus)
    whole, quantized = (trace("strategy=zero3", *more, device_type="cuda") for more in ((), (plus,)))
    assert quantized.state == whole.state


SMALL_ADAPTED = ("adapter.merge=false", "model.config.vocab_size=128")


def test_an_adapter_leaves_little_to_step(whole):
    state = trace("strategy=zero2", "adapter=lora", *SMALL_ADAPTED).state
    assert 0 < state.optimizer < 0.2 * whole.optimizer


def test_packed_weights_are_partitioned_as_others_are():
    all_of_them = "strategy.deepspeed={zero_optimization: {stage3_param_persistence_threshold: 0}}"
    qlora = ("adapter=qlora", *SMALL_ADAPTED)
    whole = trace("strategy=zero2", *qlora).state
    shared = trace("strategy=zero3", all_of_them, *qlora).state
    assert shared.weights == pytest.approx(whole.weights / 2, rel=1e-3)
    assert whole.weights < 0.5 * trace("strategy=zero2", "adapter=lora", *SMALL_ADAPTED).state.weights


def test_a_pipeline_shares_the_state_of_a_stage():
    whole = trace("strategy=ddp", layers=2).state
    state = trace("strategy=pipeline_zero1", layers=2, world_size=4).state
    # Half of the model, of which each of two data ranks has half of the float32 masters and of two moments.
    assert state.optimizer == pytest.approx(3 * state.weights / 2, rel=0.1)
    assert state.weights < whole.weights
