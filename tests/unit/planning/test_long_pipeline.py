"""A pipeline whose trace would take minutes is planned by formulas, and they say about what a trace does."""

from dataclasses import replace
from math import inf

import pytest

from hfdist.config.composition.compose import compose_config
from hfdist.config.hardware import read_hardware
from hfdist.errors import ConfigError
from hfdist.planning import make_plan as module
from hfdist.planning.describe import describe_plan
from hfdist.planning.searching.evaluate import Machines

LAYOUT = (
    "model=tiny", "model.config.num_hidden_layers=8", "model.config.hidden_size=256", "model.config.vocab_size=512",
    "data.sequence_length=128", "strategy=pipeline", "strategy.pipeline=4", "train.global_batch_size=8",
    "train.micro_batch_size=1", "data.lanes=8",
)  # fmt: skip


def test_a_long_pipeline_is_planned_by_formulas_near_its_trace(monkeypatch):
    config, hardware = compose_config(LAYOUT), read_hardware("h100_80gb")
    machines = Machines(hardware=hardware, usable_bytes=inf)
    traced = module.make_plan(config, machines, 4)
    # 3 places of 2 blocks, each with one micro batch at the least.
    monkeypatch.setattr(module, "_MOST_PASSES", 5)
    by_formulas = module.make_plan(config, replace(machines, usable_bytes=1.0), 4)
    assert traced.is_traced
    assert not by_formulas.is_traced
    assert not by_formulas.fits
    assert "in the backward, by formulas" in describe_plan(by_formulas)
    assert by_formulas.memory.use.total == pytest.approx(traced.memory.use.total, rel=0.15)
    # Of so small a model most of the time is that of starts, which formulas share out evenly.
    assert by_formulas.time.seconds == pytest.approx(traced.time.seconds, rel=0.3)


def measure_once(monkeypatch):
    """What is measured of a model does not depend on its stages."""
    measure, kept = module.measure, []

    def measure_if_new(*arguments, **named):
        kept.extend([] if kept else [measure(*arguments, **named)])
        return kept[0]

    monkeypatch.setattr(module, "measure", measure_if_new)


def test_formulas_plan_the_stages_that_are_asked_for(monkeypatch):
    def plan(*stages):
        # The parameters of so large a vocabulary leave the first and the last rank fewer blocks.
        config = compose_config([*LAYOUT, "model.config.vocab_size=6000", *stages])
        return module.make_plan(config, Machines(hardware=read_hardware("h100_80gb"), usable_bytes=inf), 4)

    uneven = "strategy.blocks_per_stage=[5,1,1,1]"
    traced = plan(uneven)
    monkeypatch.setattr(module, "_MOST_PASSES", 5)
    measure_once(monkeypatch)
    found = plan(uneven)
    assert not found.is_traced
    assert found.memory.use.total == pytest.approx(traced.memory.use.total, rel=0.15)
    even = plan()
    assert plan("strategy.balance=parameters") == plan("strategy.blocks_per_stage=[1,3,3,1]") != even
    # Nothing is timed.
    assert plan("strategy.balance=measured") == even


def test_formulas_refuse_the_stages_that_a_run_refuses(monkeypatch):
    monkeypatch.setattr(module, "_MOST_PASSES", 5)
    config = compose_config([*LAYOUT, "strategy.blocks_per_stage=[1,1,1,1]"])
    with pytest.raises(ConfigError) as refused:
        module.make_plan(config, Machines(hardware=read_hardware("h100_80gb"), usable_bytes=inf), 4)
    assert refused.value.where == "strategy.blocks_per_stage"
