"""Rewards by name, of hfdist or an installed package, and what is said of those that give something else."""

import subprocess
import sys

import pytest

import hfdist
from hfdist.errors import ConfigError, DataError
from hfdist.rewards import Generation, load_rewards
from hfdist.rewards.registry import GROUP
from tests.packages import install_package

SOURCE = """
def length(generations): return [len(one.text) for one in generations]
def whole(generations): return 1.0
def short(generations): return [1.0]
def words(generations): return ["1.0" for one in generations]
def endless(generations): return [float("inf") for one in generations]
def unknown(generations): return [float("nan") for one in generations]
def nothing(generations): return [None for one in generations]
def broken(generations): return [1 / 0 for one in generations]
def late(generations): yield 1 / 0
def steps(generations): return [[(len(one.text), 2)] for one in generations]
def falling(generations): return [[(1, 0.5), (1, 0.5)] for one in generations]
def beyond(generations): return [[(9, 0.5)] for one in generations]
def empty(generations): return [[(0, 0.5)] for one in generations]
def odd(generations): return [[1, 0.5] for one in generations]
"""
TWO = [Generation(prompt="1 + 1", text=text, reference="2") for text in ("2", "three")]


@pytest.fixture
def package(tmp_path, monkeypatch):
    names = ("length", "whole", "short", "words", "endless", "unknown", "nothing", "broken", "late")
    names += ("steps", "falling", "beyond", "empty", "odd")
    install_package(tmp_path, monkeypatch, "toyrewards", SOURCE, GROUP, **{name: name for name in names})


def test_rewards_of_a_package_stand_beside_those_of_hfdist(package):
    rewards = load_rewards({"arithmetic": 1, "length": -0.5})
    assert [(reward.name, reward.weight, reward(TWO)) for reward in rewards] == [
        ("arithmetic", 1.0, [1.0, 0.0]),
        ("length", -0.5, [1.0, 5.0]),
    ]
    assert all(type(score) is float for reward in rewards for score in reward(TWO))


def test_a_reward_may_score_steps(package):
    [reward] = load_rewards({"steps": 1.0})
    assert reward(TWO) == [[(1, 2.0)], [(5, 2.0)]]


@pytest.mark.parametrize(
    ("name", "what", "found"),
    [
        ("whole", "gives no list", "float"),
        ("short", "another number", 1),
        ("words", "score 0 of the reward is no finite number", "'1.0'"),
        ("endless", "score 0", "inf"),
        ("unknown", "score 0", "nan"),
        ("nothing", "score 0", "None"),
        ("broken", "the reward fails: ZeroDivisionError", None),
        ("late", "the reward fails: ZeroDivisionError", None),
        ("falling", "no list of steps", "[(1, 0.5), (1, 0.5)]"),
        ("beyond", "no list of steps", "[(9, 0.5)]"),
        ("empty", "no list of steps", "[(0, 0.5)]"),
        ("odd", "no list of steps", "[1, 0.5]"),
    ],
)
def test_what_is_no_score_is_said(package, name, what, found):
    [reward] = load_rewards({name: 1.0})
    with pytest.raises(DataError, match=what) as caught:
        reward(TWO)
    assert (caught.value.where, caught.value.found) == (f"reward {name}", found)


def test_a_name_that_nothing_has_is_said():
    with pytest.raises(ConfigError, match="no installed package offers this reward") as caught:
        load_rewards({"aritmetic": 1.0}, where="rl.rewards")
    assert caught.value.where == "rl.rewards"
    assert caught.value.hint == "'rl.rewards={arithmetic: 1.0}'"
    with pytest.raises(ConfigError, match="weight") as caught:
        load_rewards({"arithmetic": float("nan")})
    assert caught.value.where == "rewards.arithmetic"


@pytest.mark.parametrize(
    ("given", "what", "hint"),
    [
        ("arithmetic", "with their weights", "{'arithmetic': 1.0}"),
        (["arithmetic", "other"], "with their weights", "{'arithmetic': 1.0}"),
        (len, "with their weights", "{'len': 1.0}"),
        ({"arithmetic": "2.5"}, "is text", "{'arithmetic': 2.5}"),
        ({"arithmetic": "high"}, "is text", "{'arithmetic': 1.0}"),
        ({"arithmetic": "1.2.3"}, "is text", "{'arithmetic': 1.0}"),
    ],
)
def test_rewards_are_a_mapping_of_numbers(given, what, hint):
    with pytest.raises(ConfigError, match=what) as caught:
        load_rewards(given)
    assert caught.value.hint == hint


def test_the_room_loads_no_torch():
    program = "import sys, hfdist, hfdist.rewards; hfdist.Generation; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
    assert hfdist.Generation is Generation
