"""Formulas of memory and costs: against traces of the same layouts, and in what the search relies on."""

import functools
from dataclasses import replace

import pytest

from hfdist.config.composition.compose import compose_config
from hfdist.config.hardware import read_hardware
from hfdist.config.layout import Layout
from hfdist.config.strategy import Offload, Schedule, Sharding
from hfdist.config.train import Recompute
from hfdist.errors import ConfigError
from hfdist.models.architecture import find_architecture
from hfdist.pipeline.instructions import Operation, list_instructions
from hfdist.pipeline.schedule import live_microbatches, rank_of_stage, stages_per_rank
from hfdist.planning.searching.constants import MODES
from hfdist.planning.searching.evaluate import Evaluator, Machines
from hfdist.planning.searching.formulas import even_loads, peak, rank_costs, rank_sizes
from hfdist.planning.searching.search import measure
from hfdist.planning.tracing.memory import trace_rank
from hfdist.strategies.base import Strategy
from hfdist.strategies.deepspeed.zero import ZeroStrategy
from hfdist.strategies.fsdp import FsdpStrategy
from hfdist.strategies.step_memory import ShardFractions
from tests.marks import many
from tests.unit.planning.models import BLOCK, make_constants
from tests.worst_rank import worst_rank

FP32 = (
    "model=tiny",
    # As formulas have it.
    "model.loss=chunked",
    "data.sequence_length=128",
    "model.config={hidden_size: 128, intermediate_size: 352, num_hidden_layers: 4, num_attention_heads: 8, "
    "num_key_value_heads: 4, vocab_size: 1024, max_position_embeddings: 512}",
    "train.global_batch_size=16",
    "train.micro_batch_size=2",
    "data.lanes=16",
)
SINGLE = Layout()


def peak_bytes(model, layout, fractions, loads, strategy=Strategy):
    return peak(strategy, rank_sizes(model, layout, strategy, fractions, loads))[1].total


def live_by_actions(schedule, num_ranks, per_rank, num_microbatches):
    """The most that each rank holds, counted in the schedule's own list of actions."""
    most = []
    for instructions in list_instructions(schedule, rank_of_stage(schedule, num_ranks, per_rank), num_microbatches):
        now = highest = 0
        for one in instructions:
            now += one.operation is Operation.forward
            highest = max(highest, now)
            now -= one.operation in (Operation.backward, Operation.backward_weight)
        most.append(highest)
    return most


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("schedule", Schedule)
def test_live_micro_batches_are_those_of_the_schedules_own_actions(schedule, num_ranks):
    per_rank = stages_per_rank(schedule, None)
    for number in (2 * num_ranks, 4 * num_ranks):
        layout = Layout(
            pipeline=num_ranks,
            schedule=schedule,
            stages_per_rank=per_rank,
            num_microbatches=number,
        )
        found = [live_microbatches(layout, rank) for rank in range(num_ranks)]
        assert found == live_by_actions(schedule, num_ranks, per_rank, number)


def test_state_is_counted_in_the_bytes_of_adamw():
    model = make_constants(2)
    least = peak_bytes(model, SINGLE, ShardFractions(), even_loads(model, SINGLE))
    assert least >= 16 * model.parameters
    fourth = ShardFractions(weights=0.25, gradients=0.25, optimizer=0.25)
    layout = Layout(data=4, sharding=Sharding.fsdp2)
    assert peak_bytes(model, layout, fourth, even_loads(model, SINGLE), FsdpStrategy) < least


def bytes_of(layout):
    model = make_constants()
    return peak_bytes(model, layout, ShardFractions(), even_loads(model, layout))


def test_memory_grows_with_micro_batches_and_falls_with_what_is_computed_again():
    sizes = [bytes_of(replace(SINGLE, micro_batch_size=size)) for size in (1, 2, 4, 8)]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == 4
    modes = [bytes_of(replace(SINGLE, micro_batch_size=8, recompute=mode)) for mode in MODES]
    assert modes == sorted(modes, reverse=True)


@pytest.mark.parametrize("axis", ["tensor", "context", "pipeline"])
def test_memory_falls_with_each_degree(axis):
    found = [bytes_of(Layout(**{axis: n}, micro_batch_size=4, num_microbatches=1)) for n in (1, 2, 4)]
    assert found == sorted(found, reverse=True)
    assert len(set(found)) == 3


@pytest.mark.parametrize("recompute", [None, Recompute.all])
def test_memory_falls_where_tensor_ranks_share_tokens(recompute):
    whole = Layout(tensor=4, micro_batch_size=4, recompute=recompute)
    assert bytes_of(replace(whole, sequence=True)) < bytes_of(whole)


def test_offloaded_state_is_not_on_the_device():
    model, layout = make_constants(), Layout(data=8, num_microbatches=2, sharding=Sharding.fsdp2)
    share = ShardFractions(weights=1 / 8, gradients=1 / 8, optimizer=1 / 8)
    here, away = (
        peak_bytes(model, replace(layout, offload=offload), share, even_loads(model, layout), FsdpStrategy)
        for offload in Offload
    )
    assert here - away == pytest.approx(16 * model.parameters / 8)


def test_arithmetic_is_shared_out_and_computed_again():
    model = make_constants()

    def flops(layout):
        loads = even_loads(model, layout)
        stages = rank_costs(model, Strategy, rank_sizes(model, layout, Strategy, ShardFractions(), loads), loads).stages
        return sum(stage.forward.flops + stage.backward.flops for stage in stages)

    whole = flops(SINGLE)
    assert whole == pytest.approx(model.flops_per_sequence)
    for axis in ("tensor", "context", "pipeline"):
        assert flops(Layout(**{axis: 4})) == pytest.approx(whole / 4)
    again = flops(replace(SINGLE, recompute=Recompute.all))
    assert again - whole == pytest.approx(16 * 2 * BLOCK * model.sequence_length)


@pytest.mark.parametrize(("degrees", "share"), [({}, 1.0), ({"data": 4}, 0.25), ({"data": 4, "pipeline": 2}, 0.5)])
def test_each_micro_batch_is_added_to_the_gradients_of_those_before(degrees, share):
    """To all gradients of a pipeline's rank, also where the layout shards them after the step."""
    model = make_constants()

    def moved(number):
        layout = Layout(**degrees, num_microbatches=number)
        loads, held = even_loads(model, layout), 1 / layout.data
        fractions = ShardFractions(weights=held, gradients=held, optimizer=held)
        costs = rank_costs(model, Strategy, rank_sizes(model, layout, Strategy, fractions, loads), loads)
        return number * sum(stage.backward.moved_bytes for stage in costs.stages)

    assert moved(4) - 4 * moved(1) == pytest.approx(3 * 4 * 3 * share * model.parameters)


def test_what_zero_copies_costs_more_than_its_smaller_step_saves():
    """Two ranks: ddp steps all of the state, ZeRO half of it, but copies gradients through buckets."""
    model = make_constants()

    def moved(sharding, number):
        layout = Layout(data=2, num_microbatches=number, sharding=sharding)
        share = ShardFractions(optimizer=1.0 if sharding is Sharding.none else 0.5)
        strategy, loads = Strategy if sharding is Sharding.none else ZeroStrategy, even_loads(model, layout)
        costs = rank_costs(model, strategy, rank_sizes(model, layout, strategy, share, loads), loads)
        return costs.optimizer.moved_bytes + number * sum(stage.backward.moved_bytes for stage in costs.stages)

    assert moved(Sharding.none, 4) < moved(Sharding.zero1, 4) < moved(Sharding.zero2, 4)


@pytest.fixture(scope="module")
def measured():
    """A config, its architecture, and its constants, on CPUs."""
    config = compose_config(FP32)
    architecture = find_architecture(config.model, sequence_length=128)
    hardware = replace(read_hardware("h100_80gb"), name="cpu")
    machines = Machines(hardware=hardware, usable_bytes=hardware.memory_bytes)
    return architecture, measure(config, architecture, machines), machines


LAYOUTS = {
    "strategy=single": 0.06,
    "strategy=ddp": 0.06,
    "strategy=fsdp2": 0.12,
    "strategy=fsdp2 train.gradient_checkpointing=true": 0.15,
    "strategy=fsdp2 strategy.tensor=2": 0.12,
    "strategy=fsdp2 strategy.tensor=2 strategy.sequence=true": 0.12,
    "strategy=fsdp2 strategy.tensor=4 strategy.sequence=true train.gradient_checkpointing=true": 0.12,
    "strategy=fsdp2 strategy.context=2": 0.12,
}


# One process, and each axis that divides or gathers. The memory of other layouts is compared below.
USUAL = (
    "strategy=single",
    "strategy=fsdp2 strategy.context=2",
    "strategy=fsdp2 strategy.tensor=4 strategy.sequence=true train.gradient_checkpointing=true",
)


@pytest.mark.parametrize(("overrides", "error"), [one if one[0] in USUAL else many(*one) for one in LAYOUTS.items()])
def test_formulas_come_near_to_a_trace(measured, overrides, error):
    architecture, model, machines = measured
    config = compose_config([*FP32, *overrides.split()])
    processes = 1 if "single" in overrides else 8
    layout = Layout.of(config, processes, 1)
    found = Evaluator(config, model, machines).evaluate(layout)
    trace = trace_rank(config, architecture, world_size=processes, rank=0)
    wanted = trace.peak.use.total - trace.peak.use.runtime
    assert found.memory.use.total == pytest.approx(wanted, rel=error)
    strategy = Evaluator(config, model, machines).strategy(layout)
    loads = even_loads(model, layout)
    [own] = rank_costs(model, strategy, rank_sizes(model, layout, strategy, strategy.fractions, loads), loads).stages
    [traced] = trace.costs.stages
    assert own.forward.flops + own.backward.flops == pytest.approx(
        traced.forward.flops + traced.backward.flops, rel=0.01
    )


_QLORA = ("adapter=lora", "adapter.quantization=nf4")
_TWO_BLOCKS = "num_hidden_layers: 2, num_attention_heads: 8, num_key_value_heads: 4, max_position_embeddings: 512"
SHAPES = {
    "activations": (128, 352, 1024, "data.sequence_length=128", "train.micro_batch_size=2"),
    "state": (256, 704, 4096, "data.sequence_length=32", "train.micro_batch_size=1"),
    "packed weights": (512, 1408, 512, "data.sequence_length=32", "train.micro_batch_size=1", *_QLORA),
}
"""Width, inner width, vocabulary and batch of a model, by what most of its memory is."""


@functools.cache
def measured_shape(name):
    """Overrides, the architecture, constants and machines."""
    width, inner, vocabulary, *batch = SHAPES[name]
    fields = f"hidden_size: {width}, intermediate_size: {inner}, vocab_size: {vocabulary}, {_TWO_BLOCKS}"
    overrides = ["model=tiny", f"model.config={{{fields}}}", "train.global_batch_size=16", "data.lanes=16", *batch]
    config = compose_config(overrides)
    architecture = find_architecture(config.model, sequence_length=config.data.sequence_length)
    hardware = replace(read_hardware("h100_80gb"), name="cpu")
    machines = Machines(hardware=hardware, usable_bytes=hardware.memory_bytes)
    return overrides, architecture, measure(config, architecture, machines), machines


STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp2", "tensor", "pipeline")


# Each layout but zero1 once, with one of the kinds of models.
@pytest.mark.parametrize(
    ("shape", "strategy"),
    [
        *(
            ("activations", one) if one in ("zero3", "tensor", "pipeline") else many("activations", one)
            for one in STRATEGIES
        ),
        ("packed weights", "ddp"),
        *(("state", one) if one in ("zero2", "fsdp2") else many("state", one) for one in STRATEGIES),
    ],
)
def test_formulas_and_traces_say_the_same_of_memory(shape, strategy):
    overrides, architecture, model, machines = measured_shape(shape)
    degrees = [f"strategy.{strategy}=2"] if strategy in ("tensor", "pipeline") else []
    config = compose_config([*overrides, f"strategy={strategy}", *degrees])
    found = Evaluator(config, model, machines).evaluate(Layout.of(config, 4, 1))
    traced = worst_rank(config, architecture, world_size=4)
    assert found.memory.use.total == pytest.approx(traced.peak.use.total, rel=0.1)


DEEP = (
    "model=tiny",
    "data.sequence_length=32",
    "model.config={hidden_size: 128, intermediate_size: 352, num_hidden_layers: 12, num_attention_heads: 8, "
    "num_key_value_heads: 4, vocab_size: 512, max_position_embeddings: 512}",
    "train.global_batch_size=64",
    "train.micro_batch_size=1",
    "data.lanes=64",
    "strategy=fsdp2",
)


def test_degrees_that_are_asked_for_are_measured_on_any_machine(measured):
    architecture, model, machines = measured
    assert (2, 1) in model.shares
    # Eight ranks have four heads of keys in another way.
    assert (8, 1) in model.shares
    assert model.sequence_degrees == {2, 4}
    alone = replace(machines, hardware=replace(machines.hardware, devices_per_machine=1))
    config = compose_config([*FP32, "strategy.tensor=2"])
    assert (2, 1) in measure(config, architecture, alone, as_asked=True).shares
    with pytest.raises(ConfigError) as caught:
        measure(compose_config([*FP32, "strategy=moe"]), architecture, alone, as_asked=True)
    assert caught.value.where == "strategy.expert"


def test_of_many_blocks_no_rank_of_fsdp2_holds_more_than_a_few():
    """Nor does a plan, by formulas and by a trace alike."""
    config, hardware = compose_config(DEEP), replace(read_hardware("h100_80gb"), name="cpu")
    machines = Machines(hardware=hardware, usable_bytes=hardware.memory_bytes)
    architecture = find_architecture(config.model, sequence_length=32)
    model = measure(config, architecture, machines)
    found = Evaluator(config, model, machines).evaluate(Layout.of(config, 64, 1)).memory.use.total
    traced = trace_rank(config, architecture, world_size=64, rank=0).peak.use.total
    assert found == pytest.approx(traced, rel=0.2)
    whole = 4 * sum(model.kinds[kind].parameters for kind in model.kind_of_block)
    assert traced < 0.9 * whole
