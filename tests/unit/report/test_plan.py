"""The part of a report about a run's plan: what was planned, and what came of it."""

import itertools
import json

import pytest

from hfdist.planning.grade import Held, Measured, grade_to_json
from tests.unit.planning.plans import GIB, PLAN
from tests.unit.report.folders import write_run
from tests.unit.report.test_page import HOSTILE, NASTY, html, read, text_of

MEASURED = Measured(held=Held(peak=21 * GIB, parts={"weights": 4 * GIB, "runtime": GIB}), step_seconds=5.0, steps=9)


def write(folder, *, plan=None, grade=None):
    write_run(folder)
    for name, content in (("plan", plan), ("grade", grade)):
        if content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_before_the_end_it_says_what_was_planned(tmp_path):
    words = " ".join(text_of(html(write(tmp_path, plan=PLAN.to_json()))).split())
    assert "4 processes: data 2 x tensor 2; sharding fsdp2; bf16, on h100_80gb. It fits" in words
    assert "activations 3.0 GiB" in words
    assert "compute of a step 3.0 s" in words
    assert "MFU 40 %" in words
    assert "Try train.micro_batch_size=4" in words


def test_at_the_end_it_compares(tmp_path):
    words = text_of(html(write(tmp_path, plan=PLAN.to_json(), grade=grade_to_json(PLAN, MEASURED))))
    words = " ".join(words.split())
    assert "peak memory 20.0 GiB 21.0 GiB -5 %" in words
    assert "step 4.0 s 5.0 s -20 %" in words
    assert "speed 2,000 tokens a second 1,600 tokens a second +25 %" in words


def test_a_run_without_a_plan_has_no_such_part(tmp_path):
    assert "<h2>Plan" not in html(write(tmp_path))


def test_a_page_that_is_served_hears_of_the_grade(tmp_path):
    run = read(write(tmp_path, plan=PLAN.to_json()))
    assert not run.read()
    write(tmp_path, grade=grade_to_json(PLAN, MEASURED))
    assert run.read()
    assert run.grade["items"]


@pytest.mark.parametrize("kind", ["plan", "grade"])
def test_no_value_of_the_files_breaks_it(tmp_path, kind):
    whole = PLAN.to_json() if kind == "plan" else grade_to_json(PLAN, MEASURED)
    items = [] if kind == "plan" else whole["items"]
    broken = [whole | {key: value} for key, value in itertools.product(whole, NASTY)]
    broken += [whole | {"items": [item | {key: value}]} for item in items[:1] for key in item for value in NASTY]
    broken += [[], None, "x"]
    for content in broken:
        assert "nan" not in text_of(html(write(tmp_path, **{kind: content})))


def test_texts_are_text_alone(tmp_path):
    hostile = {"layout": HOSTILE, "hardware": HOSTILE, "binds": HOSTILE, "advice": HOSTILE, "currency": HOSTILE}
    item = {"name": HOSTILE, "unit": HOSTILE, "predicted": 1.0, "measured": 2.0, "error": -0.5}
    for grade in (None, {"items": [item]}):
        content = html(write(tmp_path, plan=PLAN.to_json() | hostile, grade=grade))
        assert content.count("<script") == 1
        assert "<img" not in content
