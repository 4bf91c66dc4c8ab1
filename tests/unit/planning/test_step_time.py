"""Seconds of a step from costs, hardware and traffic: limits, what is hidden, schedules, and fitted factors."""

import json
import math
from dataclasses import replace
from functools import partial

import pytest

from hfdist.config.hardware import Hardware, Tflops
from hfdist.config.strategy import ONE_F_ONE_B, Offload, Schedule, Sharding
from hfdist.config.train import Compile, Precision, TrainConfig
from hfdist.pipeline.schedule import bubble_fraction, stages_per_rank
from hfdist.pipeline.simulate import StageSeconds, simulate
from hfdist.planning.costs import AxisTraffic, OpCosts, RankCosts, StageCosts
from hfdist.planning.timing.calibration import Factors, TimedStep, calibrate, default_factors, read_steps, write_step
from hfdist.planning.timing.step_time import _Clock, step_parts, step_time
from hfdist.sent_bytes import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, SEND
from hfdist.strategies.traffic import Phase
from tests.unit.planning.layouts import make_layout

# One TFLOP, and one GB of memory traffic, a second; a link of 0.1 GB.
GPU = Hardware(
    name="gpu",
    tflops=Tflops(fp32=1.0),
    memory_gb_per_second=1.0,
    link_gb_per_second=0.1,
    link_latency_us=0.0,
    network_gb_per_second=0.01,
    network_latency_us=0.0,
    kernel_us=1.0,
)
CPU = replace(GPU, name="cpu")
PLAIN = Factors(compute=1.0, memory=1.0, kernels=1.0, link=1.0, spread=1.5)
ONE, TWICE = StageSeconds(1.0, 2.0, 1.0, 1.0), StageSeconds(2.0, 4.0, 2.0, 2.0)
FP32 = TrainConfig(precision=Precision.fp32, compile=Compile.none)


def layout(num_microbatches=1, world_size=1, **keys):
    return make_layout(world_size, FP32, num_microbatches=num_microbatches, **keys)


def costs(forward=1.0, backward=2.0, *, traffic=(), num_stages=1, kernels=0):
    """Seconds of arithmetic on a device of a TFLOP a second."""
    ops = [OpCosts(flops=seconds * 1e12, kernels=kernels) for seconds in (forward, backward)]
    stage = StageCosts(forward=ops[0], backward=ops[1])
    return RankCosts(stages=(stage,) * num_stages, optimizer=OpCosts(), traffic=traffic)


def sent(seconds, *, calls=10, **more):
    fields = {"axis": "data", "kind": ALL_REDUCE, "size": 2, "crosses_machines": False} | more
    return AxisTraffic(sent_bytes=seconds * 1e8, calls=calls, **fields)


def seconds(ranks, strategy, hardware=GPU, train=FP32, factors=PLAIN):
    return step_time(ranks, strategy, hardware, train, factors)


about = partial(pytest.approx, rel=1e-3)
"""Calls of collectives start in microseconds, and take seconds here."""


def test_a_phase_takes_its_arithmetic_and_its_memory_traffic():
    ops = OpCosts(flops=3e12, moved_bytes=2e9, kernels=100)
    rank = RankCosts(stages=(StageCosts(forward=ops, backward=OpCosts()),), optimizer=OpCosts(moved_bytes=5e8))
    assert seconds(rank, layout(4)).seconds == pytest.approx(4 * 5 + 0.5)
    slower = replace(PLAIN, compute=2.0, memory=3.0)
    assert seconds(rank, layout(4), factors=slower).seconds == pytest.approx(4 * 12 + 1.5)
    half = replace(GPU, tflops=Tflops(fp32=1.0, bf16=4.0))
    assert seconds(rank, layout(), half, replace(FP32, precision=Precision.bf16)).seconds == pytest.approx(0.75 + 2.5)


def test_a_gpu_starts_operations_meanwhile_and_a_cpu_does_not():
    rank = costs(1.0, 0.0, kernels=10_000_000)
    assert seconds(rank, layout()).seconds == pytest.approx(10 + 10)
    assert seconds(rank, layout(), CPU).seconds == pytest.approx(11 + 10)
    assert seconds(costs(1.0, 2.0, kernels=10), layout()).seconds == pytest.approx(3)


def test_an_offloaded_optimizer_waits_for_the_memory_of_the_host():
    rank = replace(costs(), optimizer=OpCosts(moved_bytes=4e9))
    plain = seconds(rank, layout(world_size=2, sharding=Sharding.zero1), GPU)
    offloaded = seconds(
        rank, layout(world_size=2, sharding=Sharding.zero1, offload=Offload.cpu), replace(GPU, host_gb_per_second=0.5)
    )
    assert offloaded.seconds - plain.seconds == pytest.approx(8 - 4)


def test_compiled_blocks_move_less():
    ops = OpCosts(moved_bytes=1e9)
    rank = RankCosts(stages=(StageCosts(forward=ops, backward=OpCosts()),), optimizer=OpCosts())
    auto = replace(FP32, compile=Compile.auto)
    assert seconds(rank, layout(), train=auto).seconds == pytest.approx(0.67)
    # A pipeline's blocks are not compiled by themselves, and neither are those on a CPU.
    assert seconds(rank, layout(world_size=2, tensor=2), train=auto).seconds == pytest.approx(1.0)
    assert seconds(rank, layout(), CPU, auto).seconds == pytest.approx(1.0)


def test_what_travels_beside_the_last_backward_is_hidden():
    traffic = (sent(1.5, overlaps=Phase.backward),)
    strategy = layout(world_size=2)
    # All but its last message.
    assert seconds(costs(traffic=traffic), strategy).exposed["data"] == about(0.15)
    assert seconds(costs(traffic=traffic), strategy, CPU).exposed["data"] == about(1.5)
    # More micro batches have more backwards, and gradients travel beside the last one only.
    traffic = (sent(5.0, overlaps=Phase.backward),)
    assert seconds(costs(traffic=traffic), layout(8, world_size=2)).exposed["data"] == about(3.0)
    traffic = (sent(5.0, overlaps=Phase.backward, microbatches=8, calls=80),)
    assert seconds(costs(traffic=traffic), layout(8, world_size=2)).exposed["data"] == about(0.5)


def test_what_no_phase_hides_is_waited_for():
    time = seconds(costs(traffic=(sent(2.0, axis="tensor"), sent(1.0))), layout(world_size=2))
    assert time.exposed == about({"tensor": 2.0, "data": 1.0})
    assert time.seconds == about(6.0)
    assert (time.low, time.high) == (about(4.0), about(9.0))


def test_a_ring_leaves_a_machine_over_the_links_of_all_its_ranks():
    def waits(**place):
        traffic = (sent(1.0, size=16, crosses_machines=True, **place),)
        return seconds(costs(traffic=traffic), layout(world_size=2)).seconds - 3.0

    assert waits(machine_ranks=1) == about(10.0)
    assert waits(machine_ranks=8) == about(1.25)
    assert waits(machine_ranks=16) == about(1.0)


def test_more_calls_wait_for_more_hops():
    slow = replace(GPU, link_latency_us=1000.0)
    few = seconds(costs(traffic=(sent(1.0, calls=1),)), layout(world_size=2), slow).seconds
    many = seconds(costs(traffic=(sent(1.0, calls=100),)), layout(world_size=2), slow).seconds
    assert many - few == pytest.approx(99 * (2e-3 + 8.4e-6))


@pytest.mark.parametrize(
    ("kind", "place", "of_gpus", "of_cpus"),
    [
        # Milliseconds: 1 of a hop within a machine, 100 of one between two. A ring of 8 ranks has 7 hops.
        (ALL_GATHER, {"size": 8}, 7, 7),
        (REDUCE_SCATTER, {"size": 8}, 7, 7),
        (ALL_REDUCE, {"size": 8}, 14, 14),
        (ALL_TO_ALL, {"size": 8}, 1, 7),
        (SEND, {"size": 2}, 1, 1),
        # One of 64 ranks leaves each of 8 machines: 7 of its 63 hops. A tree over 8 machines is 3 deep, each way.
        (ALL_GATHER, {"size": 64, "crosses_machines": True, "machine_ranks": 8}, 756, 756),
        (ALL_REDUCE, {"size": 64, "crosses_machines": True, "machine_ranks": 8}, 614, 1512),
        (ALL_GATHER, {"size": 16, "crosses_machines": True, "machine_ranks": 1}, 1500, 1500),
        (ALL_REDUCE, {"size": 16, "crosses_machines": True, "machine_ranks": 1}, 800, 3000),
        (ALL_TO_ALL, {"size": 64, "crosses_machines": True, "machine_ranks": 8}, 100, 756),
        (SEND, {"size": 16, "crosses_machines": True, "machine_ranks": 1}, 100, 100),
    ],
)
def test_a_call_waits_for_its_hops(kind, place, of_gpus, of_cpus):
    fields = {"axis": "data", "crosses_machines": False} | place
    # Bytes that take no time; a pipeline has other rules for when messages are waited for.
    one = AxisTraffic(kind=kind, sent_bytes=0.0, calls=1, **fields)
    for device, expected in ((GPU, 1e-3 * of_gpus + 8.4e-6), (CPU, 1e-3 * of_cpus)):
        slow = replace(device, link_latency_us=1e3, network_latency_us=1e5)
        assert _Clock(slow, FP32, layout(world_size=2), PLAIN).send(one) == pytest.approx(expected)


def test_traffic_that_one_phase_hides_takes_turns_on_the_links():
    # Of each of 8 backwards of 2 s shards take 1.5 s, all but their last hundredth hidden, and so leave 0.5 s of the
    # last one to the replicas.
    shards = sent(12.0, overlaps=Phase.backward, microbatches=8, calls=800, axis="shard")
    replicas = sent(2.0, overlaps=Phase.backward, calls=100, axis="replicate")
    strategy = layout(8, world_size=4, sharding=Sharding.fsdp2, replicate=2)
    assert seconds(costs(traffic=(shards, replicas)), strategy).exposed["replicate"] == pytest.approx(1.49, abs=0.01)
    alone = seconds(costs(traffic=(replicas,)), strategy).exposed["replicate"]
    assert alone == pytest.approx(0.02, abs=0.001)


@pytest.mark.parametrize("schedule", Schedule)
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 4), (4, 8), (4, 16)])
def test_equal_stages_take_what_the_formula_of_the_schedule_says(schedule, num_ranks, num_microbatches):
    per_rank = stages_per_rank(schedule, None)
    taken = simulate(schedule, [[ONE] * per_rank] * num_ranks, num_microbatches)
    idle = bubble_fraction(schedule, num_ranks=num_ranks, stages_per_rank=per_rank, num_microbatches=num_microbatches)
    busy = 3.0 * per_rank * num_microbatches
    # The first stage of a schedule that splits backwards has all of it at the end.
    assert busy / taken == pytest.approx(1 - idle, rel=0.08)
    if schedule in (Schedule.gpipe, ONE_F_ONE_B, Schedule.interleaved_1f1b):
        assert busy / taken == pytest.approx(1 - idle)


def test_the_slowest_stage_sets_the_pace():
    even = simulate(ONE_F_ONE_B, [[ONE]] * 4, 32)
    uneven = simulate(ONE_F_ONE_B, [[ONE]] * 3 + [[TWICE]], 32)
    assert even == pytest.approx(3 * 32 + 9)
    assert uneven == pytest.approx(6 * 32 + 9)
    assert simulate(ONE_F_ONE_B, [[ONE]] * 4, 32, 0.1) > even


def test_a_backward_in_two_halves_takes_longer():
    seconds = [[StageSeconds(1.0, 2.0, 1.5, 1.0)] * 2] * 2
    assert simulate(Schedule.zbv, seconds, 16) > simulate(Schedule.zbv, [[ONE] * 2] * 2, 16) + 0.2 * 16
    assert simulate(ONE_F_ONE_B, [[StageSeconds(1.0, 2.0, 1.5, 1.0)]] * 2, 16) == simulate(ONE_F_ONE_B, [[ONE]] * 2, 16)


@pytest.mark.parametrize(
    ("schedule", "least"), [("1f1b", 0), ("zbv", 8), ("interleaved_zero_bubble", 8), ("dualpipev", 1)]
)
def test_two_halves_of_a_backward_move_more_by_list_and_by_formula(schedule, least):
    strategy = layout(8, world_size=2, pipeline=2, schedule=Schedule[schedule])
    num_stages = stages_per_rank(strategy.config.schedule, None)
    computing = costs(1.0, 3.0, num_stages=num_stages)
    moving = StageCosts(forward=OpCosts(flops=1e12), backward=OpCosts(flops=2e12, moved_bytes=1e9))
    moving = replace(computing, stages=(moving,) * num_stages)
    by_formula = seconds(moving, strategy).bubble - seconds(computing, strategy).bubble
    by_list = seconds([moving] * 2, strategy).bubble - seconds([computing] * 2, strategy).bubble
    # Half a second for each backward in two halves.
    assert by_formula >= 0.5 * least
    assert (by_formula > 0.1, by_list > 0.1) == (least > 0,) * 2
    for whole in (replace(FP32, gradient_checkpointing=True), replace(FP32, compile=Compile.blocks)):
        assert seconds(moving, strategy, CPU, whole) == seconds(computing, strategy, CPU, whole)


def test_a_pipeline_is_timed_stage_by_stage_or_by_its_formula():
    strategy = layout(8, world_size=2, pipeline=2)
    traffic = (sent(0.16, axis="pipeline", kind=SEND, calls=16),)
    rank = costs(traffic=traffic)
    by_list, by_formula = seconds([rank, rank], strategy), seconds(rank, strategy)
    assert by_list.compute == about(24.0)
    assert by_list.bubble == about(3.0)
    assert by_formula.seconds == about(by_list.seconds, rel=0.01)
    assert 0 < by_list.exposed["pipeline"] < 0.16
    # What tensor ranks wait for stretches each stage, and so the bubble.
    waiting = replace(rank, traffic=(*traffic, sent(2.4, axis="tensor")))
    stretched = seconds([waiting, waiting], strategy)
    assert stretched.compute == about(24.0)
    assert stretched.exposed["tensor"] == about(2.4)
    assert stretched.bubble == about(3.3)


def test_ranks_that_share_cores_leave_them_to_others_while_they_wait():
    rank = costs()
    for num_microbatches, bubble in ((1, 3.0), (3, 3.0)):
        strategy = layout(num_microbatches, world_size=2, pipeline=2, schedule=Schedule.gpipe)
        for own in ([rank, rank], rank):
            assert seconds(own, strategy, CPU).bubble == pytest.approx(bubble)
            # Both on one core: there is always one that computes.
            assert seconds(own, strategy, replace(CPU, core_share=0.5)).bubble == pytest.approx(0.0)
    # Three ranks on two cores, one micro batch: one computes at a time, and one core has nothing to do.
    alone = seconds(rank, layout(1, world_size=3, pipeline=3, schedule=Schedule.gpipe), replace(CPU, core_share=2 / 3))
    assert alone.bubble == pytest.approx(3 * 3.0 * 2 / 3 - 3.0)


def test_components_with_their_factors_are_the_step():
    ops = OpCosts(flops=3e12, moved_bytes=2e9, kernels=100)
    traffic = (sent(1.5, overlaps=Phase.backward), sent(0.5, axis="tensor"))
    stage = StageCosts(forward=ops, backward=ops)
    rank = RankCosts(stages=(stage,), optimizer=OpCosts(moved_bytes=1e9), traffic=traffic)
    factors = Factors(compute=1.6, memory=1.3, kernels=1.0, link=1.2, spread=1.5)
    for hardware in (GPU, CPU):
        parts = step_parts(rank, layout(4, world_size=2), hardware, FP32, factors)
        assert factors.apply(parts.ideal) == pytest.approx(parts.time.seconds)
        assert parts.time.low < parts.time.seconds < parts.time.high


def timed(factors, **ideal):
    step = {"compute": 0.0, "memory": 0.0, "kernels": 0.0, "link": 0.0} | ideal
    return TimedStep(hardware="cpu", layout="any", ideal=step, step_seconds=factors.apply(step))


def test_factors_are_found_again():
    true = Factors(compute=2.0, memory=1.5, kernels=1.0, link=3.0, spread=1.0)
    steps = [
        timed(true, compute=1.0, memory=0.2),
        timed(true, compute=0.01, memory=0.08),
        timed(true, compute=0.5, memory=0.2, link=0.7),
        timed(true, compute=10.0, memory=2.0, link=1.0),
    ]
    found = calibrate(steps, CPU)
    assert [found.compute, found.memory, found.link] == pytest.approx([2.0, 1.5, 3.0], rel=0.1)
    assert all(found.apply(step.ideal) == pytest.approx(step.step_seconds, rel=0.02) for step in steps)
    assert found.spread < default_factors(CPU).spread
    assert found.num_steps == 4
    # Of a run that waited for something else.
    spoilt = [*steps, replace(steps[0], step_seconds=20 * steps[0].step_seconds)]
    robust = calibrate(spoilt, CPU)
    assert [robust.compute, robust.memory] == pytest.approx([2.0, 1.5], rel=0.25)
    assert robust.spread > found.spread


def test_what_no_step_tells_stays_near_its_default():
    assert calibrate([], GPU) == default_factors(GPU)
    true = replace(default_factors(GPU), compute=3.0)
    found = calibrate([timed(true, compute=1.0)], GPU)
    assert found.compute == pytest.approx(3.0, rel=0.02)
    assert found.link == pytest.approx(default_factors(GPU).link)


def test_lines_of_timed_steps(tmp_path):
    path = tmp_path / "cache" / "steps.jsonl"
    assert read_steps(path, "cpu") == []
    step = timed(PLAIN, compute=1.0)
    write_step(step, path)
    other = replace(step, hardware="h100_80gb", cpu_seconds=0.5)
    write_step(other, path)
    right = {"hardware": "cpu", "layout": "", "ideal": {"compute": 1.0}, "step_seconds": 1.0, "version": step.version}
    wrong = [{"version": 0}, {"ideal": {}}, {"step_seconds": math.inf}, {"step_seconds": None}]
    unversioned = {key: value for key, value in right.items() if key != "version"}
    lines = [{"hardware": "cpu"}, [], None, unversioned, *(right | change for change in wrong)]
    with path.open("a") as file:
        file.write("\n".join([*map(json.dumps, lines), "{", ""]))
    with path.open("ab") as file:
        file.write(b"\xff, of a disk that was full")
    assert read_steps(path, "cpu") == [step]
    assert read_steps(path, "h100_80gb") == [other]
    write_step(TimedStep(**right), path)
    assert len(read_steps(path, "cpu")) == 2


def test_all_figures_are_finite_for_a_step_of_nothing():
    rank = RankCosts(stages=(StageCosts(forward=OpCosts(), backward=OpCosts()),), optimizer=OpCosts())
    parts = step_parts(rank, layout(), GPU, FP32)
    assert parts.time.seconds == 0
    assert all(math.isfinite(value) for value in parts.ideal.values())
