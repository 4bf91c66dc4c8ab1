"""What varies: read as Hydra writes it, and refused where no run could take it."""

import json

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from hfdist.config.override_text import COMMAND_LINE, as_override
from hfdist.errors import ConfigError
from hfdist.tools.sweep.space import Dimension, Space, is_sweep, parse_dimension


def dimension(text):
    return parse_dimension(*text.split("=", 1), COMMAND_LINE)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("optimizer.lr=interval(0,1)", {"low": 0.0, "high": 1.0}),
        ("optimizer.lr=tag(log, interval(1e-5,1e-2))", {"low": 1e-5, "high": 1e-2, "is_log": True}),
        ("optimizer.warmup_steps=int(interval(1,8))", {"low": 1, "high": 8, "is_whole": True}),
        ("data.seed=range(1,7,2)", {"choices": (1, 3, 5)}),
        ("strategy=choice(ddp,zero1)", {"choices": ("ddp", "zero1")}),
        ("optimizer.lr=1e-3,3e-3", {"choices": (1e-3, 3e-3)}),
        ("model.name='a b','c'", {"choices": ("a b", "c")}),
        ("model.config.num_hidden_layers=2,4", {"choices": (2, 4)}),
        ("data.sources.mine.weight=1,2", {"choices": (1, 2)}),
        (
            "optimizer.weight_decay=interval(0.5,0.9) if optimizer.name=sgd",
            {"low": 0.5, "high": 0.9, "condition": ("optimizer.name", "sgd")},
        ),
    ],
)
def test_values_are_read(text, wanted):
    assert is_sweep(text)
    assert dimension(text) == Dimension(key=text.partition("=")[0], **wanted)


@pytest.mark.parametrize(
    ("text", "what", "hint"),
    [
        ("optimiser.lr=1e-3,1e-4", "there is no key", "optimizer.lr=1e-3,1e-4"),
        ("optimizer.lr=interval(1,0)", "this interval has no values", None),
        ("optimizer.lr=tag(log, interval(0,1))", "this interval has no values", None),
        ("run.name=a,b", "this key must not vary", None),
        ("train.max_steps=3", "these are no values of a sweep", None),
        ("optimizer.lr=interval(1", "these are no values of a sweep", None),
        ("optimizer.lr=1,2 if strategy", "this is no condition", None),
    ],
)
def test_what_no_run_could_take_is_refused(text, what, hint):
    with pytest.raises(ConfigError, match=what) as caught:
        dimension(text)
    assert hint is None or caught.value.hint == hint


def test_what_has_one_value_does_not_vary():
    assert not any(map(is_sweep, ("optimizer.lr=1e-3", "model=tiny", "data.lanes=[1,2]", "nonsense", "a=b if c=d")))


MOMENTUM = "optimizer.weight_decay=choice(0.5,0.9) if optimizer.name=sgd"


def test_a_grid_has_each_combination_once():
    space = Space([dimension(text) for text in (MOMENTUM, "optimizer.name=adamw,sgd", "optimizer.lr=1,2")])
    combinations = [tuple(values.values()) for values in space.grid()]
    assert combinations == [
        ("adamw", 1),
        ("adamw", 2),
        ("sgd", 1, 0.5),
        ("sgd", 1, 0.9),
        ("sgd", 2, 0.5),
        ("sgd", 2, 0.9),
    ]
    with pytest.raises(ConfigError, match="a grid takes choices"):
        Space([dimension("optimizer.lr=interval(0,1)")]).grid()


def test_of_a_grid_that_memory_does_not_hold_the_first_trials_are_made():
    keys = ("train.max_steps", "train.seed", "optimizer.lr", "optimizer.weight_decay", "optimizer.eps", "data.lanes")
    space = Space([dimension(f"{key}=range(1,101)") for key in keys])
    assert [tuple(values.values()) for values in space.grid(102)[-3:]] == [
        (1, 1, 1, 1, 1, 100), (1, 1, 1, 1, 2, 1), (1, 1, 1, 1, 2, 2)]  # fmt: skip


def test_examples_have_each_extreme_and_each_choice():
    space = Space([dimension(t) for t in (MOMENTUM, "optimizer.name=adamw,sgd", "optimizer.lr=interval(0,1)")])
    examples = list(space.examples())
    assert {values["optimizer.name"] for values in examples} == {"adamw", "sgd"}
    assert {values["optimizer.lr"] for values in examples} == {0.0, 1.0}
    assert {values.get("optimizer.weight_decay") for values in examples if values["optimizer.name"] == "sgd"} >= {
        0.5,
        0.9,
    }
    assert not any("optimizer.weight_decay" in values for values in examples if values["optimizer.name"] == "adamw")


def test_a_condition_must_be_able_to_hold():
    with pytest.raises(ConfigError, match="the condition never holds") as caught:
        Space([dimension(MOMENTUM), dimension("optimizer.name=adamw,sgdx")])
    assert caught.value.hint == "optimizer.name=sgdx"
    with pytest.raises(ConfigError, match="on a key that is no choice"):
        Space([dimension(MOMENTUM)])
    with pytest.raises(ConfigError, match="nothing varies"):
        Space([])


def test_a_key_that_varies_twice_is_refused():
    with pytest.raises(ConfigError, match="varies twice") as caught:
        Space([dimension("optimizer.lr=1,2"), dimension("optimizer.lr=3,4")])
    assert caught.value.where == "optimizer.lr"


def test_values_are_written_as_overrides():
    texts = [as_override("a", value) for value in (True, None, 0.1 + 0.2, 1e-5, 3, "x", [1, 2])]
    assert texts == ["a=true", "a=null", "a=0.30000000000000004", "a=1e-05", "a=3", "a=x", "a=[1,2]"]


def test_what_is_written_is_what_was_chosen():
    lists = "0.12345678,0.12345679,[null,true,2],[null,'null','x y',' x'],{b:'1',c:[x, y]}"
    space = parse_dimension("model.config.x", f"choice({lists},'a,b.txt','x (1).txt','2','true',c d)", COMMAND_LINE)
    assert len(space.choices) == 10
    assert json.loads(json.dumps(space.choices)) == list(space.choices)
    for choice in space.choices:
        override = OverridesParser.create().parse_override(as_override("a", choice))
        assert override.value() == choice


WRITTEN = ("optimizer.lr=interval(1e-4,1e-2)", "optimizer.warmup_steps=int(interval(0,8))", "strategy=ddp,zero1",
           "adapter.targets=[q_proj,v_proj],[k_proj]", "optimizer.eps=1e-8,1e-6 if strategy=ddp")  # fmt: skip
TARGETS = ["q_proj", "v_proj"]
RIGHT = {"optimizer.lr": 1e-3, "optimizer.warmup_steps": 0, "strategy": "zero1", "adapter.targets": TARGETS}


def test_the_values_of_a_written_line_are_some_that_the_space_gives():
    space = Space([dimension(text) for text in WRITTEN])
    for values in (RIGHT, RIGHT | {"optimizer.lr": 0.01}, RIGHT | {"strategy": "ddp", "optimizer.eps": 1e-6}):
        space.check(json.loads(json.dumps(values)), "sweep.jsonl, line 3")
    for changed in (
        {"report.alert_command": "touch mark"},
        {"model.trust_remote_code": True},
        {"optimizer.lr": 3},
        {"optimizer.lr": "1e-3"},
        {"optimizer.lr": True},
        {"optimizer.lr": float("nan")},
        {"optimizer.lr": 10**400},
        {"optimizer.warmup_steps": 1.5},
        {"strategy": "zero1 report.alert_command=x"},
        {"strategy": {"zero1": 1}},
        {"strategy": None},
        {"adapter.targets": ["v_proj", "q_proj"]},
        {"strategy": "ddp"},
        {"optimizer.eps": 1e-6},
    ):
        with pytest.raises(ConfigError, match="no such trial") as caught:
            space.check(RIGHT | changed, "sweep.jsonl, line 3")
        assert caught.value.where == "sweep.jsonl, line 3"
