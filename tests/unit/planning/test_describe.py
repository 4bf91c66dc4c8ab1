"""A plan's page, its verdict, and its grade."""

import json
from dataclasses import replace

import pytest

from hfdist.config.islands import Codec, IslandMethod, IslandsConfig
from hfdist.planning.costs import bytes_by_axis
from hfdist.planning.describe import describe_plan, describe_shortly, verdict
from hfdist.planning.grade import Held, Measured, grade, grade_to_json
from hfdist.planning.island_traffic import island_traffic
from hfdist.strategies.traffic import Phase
from tests.unit.planning.plans import GIB, PLAN, TOO_LARGE

HELD = Held(peak=21 * GIB, parts={"weights": 4 * GIB, "gradients": 5 * GIB, "optimizer": 8 * GIB, "runtime": GIB})


def lines_of(plan):
    return {line.split()[0]: line for line in describe_plan(plan).splitlines() if line.startswith("  ")}


def test_a_page_has_each_part_and_its_share():
    lines = lines_of(PLAN)
    assert "8.0 GiB" in lines["optimizer"]
    assert "20.0 GiB" in describe_plan(PLAN).partition("\n")[0]
    assert lines["compute"].split()[1:] == ["3.0", "s", "75", "%"]
    assert "within a machine; 12 % of the step waits" in lines["tensor"]
    assert "beside the backward; no one waits" in lines["data"]
    assert describe_plan(PLAN).count("rank 3") == 1
    assert "900 steps, 1 h 0 min, 10 USD, 2 kWh" in describe_plan(PLAN)
    assert lines["try"].endswith("train.micro_batch_size=4")


def test_what_is_not_known_is_left_out():
    plan = replace(PLAN, max_steps=None, cost=None, kwh=None, mfu=None, advice=None, traffic=())
    words = describe_plan(plan)
    assert not [word for word in ("MFU", "USD", "\n  try", "sends") if word in words]
    assert "not known here" in words


def test_what_travels_between_islands_is_said_for_its_period():
    def words(**keys):
        return describe_plan(replace(PLAN, islands=island_traffic(IslandsConfig(**keys), GIB // 4)))

    rounds = words(method=IslandMethod.diloco, count=4, every=20)
    assert "between 4 islands, in a round of 20 steps" in rounds
    assert "an island sends  1.5 GiB" in rounds
    assert "the server" not in rounds
    server = words(method=IslandMethod.parameter_server, count=3, codec=Codec.bf16)
    assert "between 3 islands and their server, in a step" in server
    assert "the server sends  3.0 GiB" in server
    assert "the server takes  1.5 GiB" in server
    shards = words(method=IslandMethod.parameter_server, count=3, codec=Codec.bf16, server_shards=4)
    assert "a shard of the server sends  768 MiB" in shards
    # Half of the clients train in a round.
    assert "between 2 islands" in words(method=IslandMethod.federated, count=4, participation=0.5)
    assert words() == describe_plan(PLAN)


def test_the_verdict_names_both_sizes_and_says_where_it_is_close():
    assert verdict(PLAN) == "fits: a rank needs 20.0 GiB of 24.0 GiB"
    assert verdict(replace(PLAN, usable_bytes=21 * GIB)) == "fits, barely: a rank needs 20.0 GiB of 21.0 GiB"
    assert verdict(TOO_LARGE) == "does not fit: a rank needs 20.0 GiB, and may use 16.0 GiB"
    assert not TOO_LARGE.fits


def test_the_line_of_a_run_has_activations_and_seconds():
    assert "activations 3.0 GiB" in describe_shortly(PLAN)
    assert describe_shortly(PLAN).endswith("4.0 s a step, 1 h 0 min in all for 10 USD")


def test_a_grade_compares_what_was_measured_and_nothing_else():
    measured = Measured(held=HELD, step_seconds=5.0, steps=90, sent_bytes={"data": GIB / 2, "pipeline": 1.0}, kwh=0.4)
    items = {item.name: item for item in grade(PLAN, measured)}
    assert items["peak memory"].error == pytest.approx(20 / 21 - 1)
    assert items["optimizer"].error == 0
    # In the backward, some of the gradients are there.
    assert items["gradients and activations and buffers"].measured == 8 * GIB
    assert items["step"].error == pytest.approx(-0.2)
    assert items["speed"].measured == 1600
    assert items["MFU"].measured == pytest.approx(0.32)
    assert items["sent along data"].error == pytest.approx(1.0)
    assert items["energy"].predicted == pytest.approx(0.2)
    assert not items.keys() & {"cost", "sent along tensor", "sent along pipeline"}


def test_gradients_are_graded_apart_where_all_are_there():
    memory = replace(PLAN.memory, phase=Phase.optimizer)
    items = {item.name: item for item in grade(replace(PLAN, memory=memory), Measured(held=HELD))}
    assert items["gradients"].error == pytest.approx(-0.2)
    assert items["activations and buffers"].measured == 3 * GIB


def test_a_peak_of_a_gpu_is_compared_without_the_runtime():
    parts = {name: value for name, value in HELD.parts.items() if name != "runtime"}
    (peak, *_) = grade(PLAN, Measured(held=Held(peak=19 * GIB, parts=parts)))
    assert (peak.predicted, peak.error) == (19 * GIB, 0)


def test_a_layout_that_does_not_tell_its_gradients_is_graded_on_the_rest():
    parts = {"weights": 4 * GIB, "optimizer": 8 * GIB, "runtime": GIB}
    items = {item.name: item for item in grade(PLAN, Measured(held=Held(peak=20 * GIB, parts=parts)))}
    assert items["gradients and activations and buffers"].error == 0


def test_a_run_that_has_measured_nothing_has_a_grade_without_items():
    content = json.loads(json.dumps(grade_to_json(PLAN, Measured())))
    assert content["items"] == []
    assert content["hardware"] == "h100_80gb"


def test_bytes_of_all_kinds_along_an_axis_add_up():
    assert bytes_by_axis([*PLAN.traffic, *PLAN.traffic]) == {"tensor": 4 * GIB, "data": 2 * GIB}
