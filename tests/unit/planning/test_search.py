"""The search: all that it gives can be run, nothing better is missed, and it takes seconds."""

import time
from dataclasses import replace

import pytest

from hfdist.config.checks.preflight import plan_run
from hfdist.config.composition.compose import compose_config
from hfdist.config.hardware import read_hardware
from hfdist.config.layout import Layout
from hfdist.config.strategy import Offload, Schedule
from hfdist.errors import ResourceError
from hfdist.planning import advise as advising
from hfdist.planning.searching import evaluate, fewest, search
from hfdist.planning.searching.constants import ShareOfParts
from hfdist.planning.searching.evaluate import Evaluator, Machines
from hfdist.planning.searching.layout_space import Space, divisors
from hfdist.strategies.select import select_strategy
from tests.unit.planning.models import make_constants
from tests.unit.planning.plans import PLAN, TOO_LARGE

GIB = 2**30
BASE = ("model=tiny", "data.sequence_length=1024", "train.global_batch_size=64", "train.precision=fp32")
MODEL = make_constants()


def machines(gib):
    """Of eight devices each, with so much memory."""
    return Machines(hardware=read_hardware("h100_80gb"), usable_bytes=gib * GIB)


def searched(overrides=(), *, processes=8, gib=20.0, best=10):
    return search.search_layouts(
        compose_config([*BASE, *overrides]), MODEL, machines(gib), processes=processes, best=best
    )


@pytest.mark.parametrize(("asked", "gib"), [("strategy=single", 3.0), ("strategy=hsdp", 20.0)])
def test_every_line_of_overrides_composes_and_gives_that_layout(asked, gib):
    found = searched([asked], gib=gib, best=6).candidates
    assert len(found) == 6
    for one in found:
        config = compose_config([*BASE, asked, *one.overrides])
        assert config == one.config
        topology, batch = plan_run(config, world_size=8)
        assert topology.degrees["tensor"] == one.layout.tensor
        assert (topology.data, batch.num_microbatches) == (one.layout.data, one.layout.num_microbatches)
        # It has checks of its own.
        select_strategy(config.strategy, config.train, topology=topology, batch=batch, device_type="cuda")


@pytest.mark.parametrize("gib", [1.2, 60.0])
def test_no_faster_layout_is_missed(gib):
    config, where, model = compose_config([*BASE, "train.global_batch_size=8"]), machines(gib), make_constants(4)
    evaluator = Evaluator(config, model, where)
    layouts = list(Space(config, model, 4, where.per_machine).layouts())
    every = [one for layout in layouts if (one := evaluator.evaluate(layout)) is not None]
    found = search.search_layouts(config, model, where, processes=4)
    assert len(layouts) > 500
    assert found.candidates[0].time.seconds == min(one.time.seconds for one in every)
    assert found.num_evaluated < len(layouts) / 2
    assert all(one.memory.use.total <= where.usable_bytes for one in found.candidates)


@pytest.mark.parametrize(("kind_of_block", "gib"), [((0, 1, 1, 0), 1.5), ((0,) * 9, 60.0)])
def test_no_faster_pipeline_is_missed(kind_of_block, gib):
    """Blocks in the middle keep more than those at the ends, or are no multiple of the stages."""
    config, where, model = compose_config([*BASE, "train.global_batch_size=7"]), machines(gib), make_constants(4)
    block = MODEL.kinds[0]
    wide = replace(
        block,
        kept={mode: replace(one, whole=8 * one.whole, divided=8 * one.divided) for mode, one in block.kept.items()},
    )
    balance = make_constants(len(kind_of_block)).balance
    # Four processes have no other layout: seven sequences, which they cannot share, and nothing that is divided.
    model = replace(
        model,
        balance=balance,
        kinds=(block, wide),
        kind_of_block=kind_of_block,
        shares={(1, 1): ShareOfParts(kinds=(1.0, 1.0))},
        shares_tokens=False,
    )
    evaluator = Evaluator(config, model, where)
    every = [evaluator.evaluate(layout) for layout in Space(config, model, 4, where.per_machine).layouts()]
    best = search.search_layouts(config, model, where, processes=4, best=1).candidates
    assert [one.time.seconds for one in best] == [min(one.time.seconds for one in every if one is not None)]


def test_uneven_stages_wait_less_than_if_all_were_as_slow_as_the_slowest(monkeypatch):
    model, layout = make_constants(5), Layout(pipeline=4, micro_batch_size=8, num_microbatches=8)
    evaluator = Evaluator(compose_config(BASE), model, machines(60.0))
    played = evaluator.evaluate(layout).time
    # Two blocks on each rank.
    even = Evaluator(compose_config(BASE), make_constants(8), machines(60.0)).evaluate(layout).time
    monkeypatch.setattr(evaluate, "_MOST_PLAYED", 0)
    slowest = evaluator.evaluate(layout).time
    assert played.seconds < 0.95 * slowest.seconds
    assert slowest.seconds == pytest.approx(even.seconds, rel=0.25)


def test_a_pipelines_gradients_are_as_many_beside_packed_weights():
    """These count as fewer elements, in all parts alike."""

    def packed(part):
        return replace(part, parameters=part.parameters / 4)

    ends = {"prologue": packed(MODEL.prologue), "epilogue": packed(MODEL.epilogue)}
    of_4_bits = replace(MODEL, kinds=tuple(map(packed, MODEL.kinds)), **ends)
    layout = Layout(data=2, pipeline=2, num_microbatches=32)
    sent = [
        {
            one.axis: one.sent_bytes
            for one in Evaluator(compose_config([*BASE]), model, machines(60)).evaluate(layout).traffic
        }
        for model in (MODEL, of_4_bits)
    ]
    assert sent[0]["data"] == pytest.approx(sent[1]["data"])


def test_less_memory_is_never_faster():
    best = [searched(gib=gib, best=1).candidates[0].time.seconds for gib in (3.0, 60.0)]
    assert best == sorted(best, reverse=True)
    assert best[0] > best[-1]


def test_offloads_only_what_does_not_fit_otherwise():
    assert all(one.layout.offload is Offload.none for one in searched(gib=3.0).candidates)
    tight = searched(processes=2, gib=1.9).candidates
    assert tight
    assert all(one.layout.offload is Offload.cpu for one in tight)


def test_nothing_fits_into_nothing():
    assert searched(gib=0.1).candidates == ()


def test_deepspeeds_own_keys_leave_deepspeeds_layouts():
    keys = ["strategy=zero2", "+strategy.deepspeed.zero_optimization.reduce_bucket_size=1000000"]
    found = searched(keys).candidates
    assert found
    assert all(one.layout.sharding.is_deepspeed for one in found)


@pytest.mark.parametrize(
    ("overrides", "expected"), [("model.attention=flash_attention_2 train.micro_batch_size=1", 1), ("", 2)]
)
def test_flash_attention_has_micro_batches_of_one(overrides, expected):
    found = searched(overrides.split(), gib=60.0).candidates
    assert max(one.layout.micro_batch_size for one in found) >= expected
    if overrides:
        assert {one.layout.micro_batch_size for one in found} == {1}


def test_a_thousand_devices_are_searched_in_seconds():
    begin = time.process_time()
    found = searched(["train.global_batch_size=1024", "data.lanes=1024"], processes=1024, gib=0.8)
    assert found.num_pruned > 100
    assert time.process_time() - begin < 10


@pytest.mark.parametrize("gib", [1.95, 2.2, 2.35])
def test_no_layout_is_missed_where_only_recomputing_fits(gib):
    """A bound that fits says nothing: the strategy may hold more than the least of all."""
    config = compose_config([*BASE, "train.global_batch_size=8", "strategy.compression=fp16"])
    where, model = machines(gib), make_constants(4)
    evaluator = Evaluator(config, model, where)
    layouts = Space(config, model, 4, where.per_machine).layouts()
    every = [one.time.seconds for layout in layouts if (one := evaluator.evaluate(layout)) is not None]
    found = search.search_layouts(config, model, where, processes=4).candidates
    assert [one.time.seconds for one in found[:1]] == sorted(every)[:1]


def test_one_process_has_no_layout_with_compressed_gradients():
    assert searched(["strategy.compression=fp16"], processes=1).candidates == ()


def test_lanes_are_dealt_over_the_data_ranks_of_all_islands():
    config = compose_config(
        [
            *BASE,
            "islands=diloco",
            "islands.count=3",
            "islands.address=h:1",
            "data.lanes=48",
            "train.global_batch_size=96",
        ]
    )
    planned = Layout(data=32, num_microbatches=1).apply(config)
    assert planned.data.lanes == 96


def test_auto_is_planned_as_1f1b(monkeypatch):
    monkeypatch.setattr(fewest, "measure", lambda *_, **__: MODEL)
    monkeypatch.setattr(fewest, "confirm", lambda found, *_, **__: found)
    configs = [
        compose_config([*BASE, "strategy=pipeline", "train.micro_batch_size=1", f"strategy.schedule={schedule}"])
        for schedule in ("auto", "1f1b")
    ]
    auto, other = (fewest.fewest_processes(config, None, machines(60.0), searches=False) for config in configs)
    assert (auto.time, auto.memory) == (other.time, other.memory)
    assert auto.layout.schedule is Schedule.auto
    assert not any("stages_per_rank" in override for override in auto.overrides)


def test_fewest_processes_are_the_first_that_fit(monkeypatch):
    monkeypatch.setattr(fewest, "measure", lambda *_, **__: MODEL)
    monkeypatch.setattr(fewest, "confirm", lambda found, *_, **__: found)
    config = compose_config([*BASE, "strategy=fsdp2", "train.micro_batch_size=1"])

    def count(gib, *, searches=False):
        return fewest.fewest_processes(config, None, machines(gib), searches=searches).layout.world_size

    counts = [count(gib) for gib in (60.0, 4.0, 2.8)]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]
    assert all(count(gib, searches=True) <= asked for gib, asked in zip((60.0, 4.0, 2.8), counts, strict=True))
    with pytest.raises(ResourceError, match="no number of processes"):
        count(0.1)
    # More data ranks than sequences would be needed.
    config = compose_config([*BASE, "strategy=fsdp2", "train.micro_batch_size=1", "train.global_batch_size=2"])
    with pytest.raises(ResourceError, match="no number of processes"):
        count(2.8)


def test_counts_are_shares_of_a_machine_or_whole_machines():
    counts = [count for count in fewest._numbers_of_processes(8) if count <= 256]
    assert counts == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256]
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


def test_an_asked_layout_is_read_from_its_config():
    config = compose_config([*BASE, "strategy=pipeline", "strategy.schedule=zbv", "train.micro_batch_size=2"])
    layout = Layout.of(config, 8, 2)
    assert (layout.data, layout.pipeline, layout.stages_per_rank, layout.num_microbatches) == (4, 2, 2, 8)
    assert layout.apply(config).strategy.pipeline == 2


def test_a_layout_that_the_model_does_not_go_with_is_none():
    evaluator = Evaluator(compose_config(BASE), replace(MODEL, shares_tokens=False), machines(60.0))
    layouts = [Layout(data=2, num_microbatches=32), Layout(tensor=16), Layout(data=3, expert=3), Layout(context=2)]
    assert [evaluator.evaluate(layout) is not None for layout in layouts] == [True, False, False, False]


def test_tensor_ranks_share_tokens_where_the_plan_for_the_model_divides_them():
    config, where = compose_config(BASE), machines(60.0)
    for degrees in (frozenset({2, 4}), frozenset({2}), frozenset()):
        model = replace(make_constants(4), sequence_degrees=degrees)
        assert {one.tensor for one in Space(config, model, 4, where.per_machine).layouts() if one.sequence} == degrees
        shared = Evaluator(config, model, where).evaluate(Layout(tensor=4, sequence=True, num_microbatches=64))
        assert (shared is not None) == (4 in degrees)


def test_advice_is_faster_also_where_a_trace_alone_says_that_the_layout_fits(monkeypatch):
    monkeypatch.setattr(advising, "measure", lambda *_, **__: MODEL)
    config = compose_config([*BASE, "strategy=ddp", "train.micro_batch_size=1"])
    fitting, tight = (advising.advise(PLAN, config, None, machines(gib)) for gib in (60.0, 3.5))
    assert (fitting, tight) == (None, None)
    assert advising.advise(TOO_LARGE, config, None, machines(3.5)) is not None


@pytest.mark.parametrize("asked", [("strategy=hsdp", "strategy.replicate=4"), ("strategy=moe", "strategy.expert=4")])
def test_advice_leaves_out_layouts_that_a_run_refuses(monkeypatch, asked):
    monkeypatch.setattr(advising, "measure", lambda *_, **__: MODEL)
    config = compose_config([*BASE, *asked])
    words = advising.advise(replace(TOO_LARGE, processes=4), config, None, machines(20.0))
    assert words is None or "=2" not in words, "half of the data ranks hold no whole replica, or not all experts"


def test_advice_keeps_tensor_ranks_within_a_machine(monkeypatch):
    monkeypatch.setattr(advising, "measure", lambda *_, **__: MODEL)
    config = compose_config([*BASE, "strategy=tensor", "strategy.tensor=8"])
    words = advising.advise(replace(TOO_LARGE, processes=16), config, None, machines(20.0))
    assert words is not None
    assert "strategy.tensor=16" not in words
