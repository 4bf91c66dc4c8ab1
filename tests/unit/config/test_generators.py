"""What does not go with generators, and hints that work."""

import importlib.util

import pytest

from hfdist.config.checks.preflight import check_run
from hfdist.config.composition.compose import compose_config
from hfdist.errors import ConfigError

REWARDS = "task.rewards={arithmetic: 1.0}"
TUNE = ("data.sources.files.path=sums.jsonl", "model=tiny")


@pytest.mark.parametrize(
    ("task", "overrides", "key"),
    [
        ("grpo", (REWARDS, "task.generators=1", "task.max_staleness=1", "task.sync_every=3"), "task.sync_every"),
        ("dpo", ("task.generators=1",), "task.generators"),
    ],
)
def test_a_refusal_names_the_key_and_its_hint_works(task, overrides, key):
    given = [*TUNE, f"task={task}", *overrides]
    with pytest.raises(ConfigError) as caught:
        compose_config(given, name="tune")
    assert (caught.value.where, caught.value.exit_code) == (key, 2)
    compose_config([*given, caught.value.hint], name="tune")


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    (tmp_path / "sums.jsonl").write_text('{"prompt": "1+1=", "completion": "2"}\n')
    monkeypatch.chdir(tmp_path)
    config = compose_config([*TUNE, REWARDS, "task=grpo", "task.generators=1"], name="tune")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "zmq" else find(name))
    with pytest.raises(ConfigError) as caught:
        check_run(config)
    assert (caught.value.where, caught.value.found) == ("task.generators", "1, without zmq")
    assert caught.value.hint == "pip install 'pyzmq>=26', or task.generators=0"
