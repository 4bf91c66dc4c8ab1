"""What does not go with generators, and hints that work."""

import importlib.util

import pytest

from hfdist.config.checks.preflight import check_run
from hfdist.config.checks.task import check_task
from hfdist.config.composition.compose import compose_config
from hfdist.config.composition.config_text import to_values
from hfdist.config.composition.diff import find_changes
from hfdist.config.task import NO_SERVER
from hfdist.errors import ConfigError
from hfdist.messages.door import SECRET

REWARDS = "task.rewards={arithmetic: 1.0}"
SERVED = ("task.server=sglang", "task.server_addresses=[http://127.0.0.1:30000]")
TUNE = ("data.sources.files.path=sums.jsonl", "model=tiny")


@pytest.mark.parametrize(
    ("task", "overrides", "key"),
    [
        ("grpo", (REWARDS, "task.generators=1", "task.max_staleness=1", "task.sync_every=3"), "task.sync_every"),
        ("grpo", (REWARDS, "task.generators_port=29700", "task.sync_every=3"), "task.sync_every"),
        ("grpo", (REWARDS, "task.generators_host=10.0.0.1"), "task.generators_port"),
        (
            "grpo",
            (REWARDS, "task.environment=calculator", "task.generators=1", "task.answer_seconds=30"),
            "task.answer_seconds",
        ),
        ("dpo", ("task.generators=1",), "task.generators"),
        ("grpo", (REWARDS, "task.server=sglang"), "task.server_addresses"),
        ("grpo", (REWARDS, *SERVED, "task.sync_every=3"), "task.sync_every"),
        ("grpo", (REWARDS, *SERVED, "task.server_key_variable=AWS_SECRET_ACCESS_KEY"), "task.server_key_variable"),
        ("dpo", ("task.server=vllm",), "task.server"),
        ("dpo", ("task.generators_port=29700",), "task.generators_port"),
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


@pytest.mark.parametrize(
    ("host", "secret", "is_refused"),
    [
        (None, "", False),
        ("127.0.0.1", "", False),
        ("10.0.0.1", "known", False),
        ("10.0.0.1", "", True),
        ("::", "", True),
    ],
)
def test_other_machines_are_let_in_with_a_secret_alone(tmp_path, monkeypatch, host, secret, is_refused):
    (tmp_path / "sums.jsonl").write_text('{"prompt": "1+1=", "completion": "2"}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(SECRET, secret)
    given = [] if host is None else [f"task.generators_host='{host}'"]
    config = compose_config([*TUNE, REWARDS, "task=grpo", "task.generators_port=29700", *given], name="tune")
    if not is_refused:
        check_run(config)
        return
    with pytest.raises(ConfigError) as caught:
        check_run(config)
    assert (caught.value.where, caught.value.found) == ("task.generators_host", f"{host}, without {SECRET}")


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:8000",
        "ftp://127.0.0.1:8000",
        "http://127.0.0.1",
        "http://127.0.0.1:8000/v1",
        "http://127.0.0.1:8000?x=1",
        "http://me:secret@127.0.0.1:8000",
        "http://127.0.0.1:99999",
        "http://[::1:8000",
        "http://a b:8000",
        "http://a..b:8000",
        f"http://{'a' * 64}:8000",
        "http://127.0.0.1:8000\\n",
    ],
)
def test_an_address_has_a_host_and_a_port_alone(address):
    with pytest.raises(ConfigError) as caught:
        compose_config(
            [*TUNE, REWARDS, "task=grpo", "task.server=vllm", f"task.server_addresses=['{address}']"], name="tune"
        )
    assert "secret" not in str(caught.value)


def test_a_run_of_servers_goes_on_without_them_as_messages_say():
    served = (*SERVED, "task.server_key_variable=VLLM_API_KEY")
    task = compose_config([*TUNE, REWARDS, "task=grpo", *served, *NO_SERVER.split()], name="tune").task
    assert not task.uses_generators


def test_code_of_a_model_does_not_travel():
    config = compose_config([*TUNE, REWARDS, "task=grpo", "task.generators_port=29700"], name="tune")
    config.model.trust_remote_code = True
    with pytest.raises(ConfigError) as caught:
        check_task(config)
    assert caught.value.where == "model.trust_remote_code"


@pytest.mark.parametrize(
    ("before", "after", "is_safe"),
    [
        ((), ("task.generators_port=29701",), False),
        (("task.generators=1",), ("task.generators=1", "task.generators_port=29700"), True),
        (("task.generators_port=29700",), ("task.generators_port=29701", "task.generators_host=10.0.0.1"), True),
        (("task.generators_port=29700",), (), False),
        (SERVED, ("task.server=sglang", "task.server_addresses=[http://127.0.0.1:30001]"), True),
        (SERVED, ("task.server=vllm", SERVED[1]), False),
    ],
)
def test_a_run_goes_on_at_another_port(before, after, is_safe):
    """But not with generators where there were none."""
    values = [to_values(compose_config([*TUNE, REWARDS, "task=grpo", *own], name="tune")) for own in (before, after)]
    assert all(change.is_safe for change in find_changes(*values)) is is_safe
