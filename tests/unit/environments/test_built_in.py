"""The environments that hfdist has: games, programs in the sandbox, data sets of a package, and a server elsewhere."""

import json
import sys
import threading
import types

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import serve

from hfdist.config.task import TaskConfig
from hfdist.environments import Row, Step
from hfdist.environments.crew import Crew
from hfdist.environments.player import Player
from hfdist.environments.reasoning_gym import _scorer
from hfdist.environments.registry import GROUP, check_environment, load_environment
from hfdist.errors import ConfigError
from hfdist.messages.message import NotAMessageError
from tests.packages import install_package


def make(name, **more):
    return load_environment(TaskConfig(environment=name, **more)).factory()


def row(reference="", **columns):
    return Row(prompt="q", reference=reference, columns=columns, seed=7)


def test_a_number_is_guessed():
    game = make("guess")
    game.reset(row(" -12"))
    assert game.step("I say 5, no: -40") == ("higher", 0.0, False)
    assert game.step("7") == ("lower", 0.0, False)
    assert game.step("I give up") == ("a number, please", 0.0, False)
    assert game.step("9" * 400) == ("a number, please", 0.0, False)
    assert game.step("-12") == (None, 1.0, True)


def test_a_program_is_mended():
    environment = make("code")
    environment.reset(row("assert twice(2) == 4\nassert twice('a') == 'aa'"))
    assert environment.step("def twice(x):\n    return 4") == (
        "50% of the tests pass. Write the whole program again.",
        0.5,
        False,
    )
    # A worse one takes nothing back.
    assert environment.step("import os\nos._exit(0)")[1:] == (0.0, False)
    assert environment.step("```python\ndef twice(x):\n    return x + x\n```") == (None, 0.5, True)


def test_the_calculator_is_a_tool():
    factory, tools = load_environment(TaskConfig(environment="calculator"))
    schemas = {schema["function"]["name"]: schema for schema in tools}
    assert schemas["calculator"]["function"]["parameters"]["required"] == ["expression"]
    player = Player(factory, row(), schemas)
    player.begin()
    calls = [types.SimpleNamespace(name="calculator", arguments={"expression": e}) for e in ("6*7", "1/0")]
    reply = player.take("", calls)
    assert [turn.text for turn in reply.said] == ["42", "error: division by zero"]
    assert (reply.done, reply.num_calls) == (False, 2)
    flood = player.take("", calls[:1] * 40)
    assert (len(flood.said), flood.said[-1].text) == (17, "error: only the first 16 calls were done")
    assert player.take("42", []).done


GYM = """
class Legs:
    def score_answer(self, answer, entry):
        int(answer)
        return 1.0 if answer == entry["answer"] else 0.25 * (entry["metadata"]["legs"] == 4)


def get_score_answer_fn(name):
    if name != "legs":
        raise ValueError(name)
    return Legs().score_answer
"""
"""What reasoning-gym has by these names."""


@pytest.fixture
def gym(tmp_path, monkeypatch):
    """A package with the two functions of reasoning-gym that are called; the tests do without the package itself."""
    _scorer.cache_clear()
    (tmp_path / "reasoning_gym.py").write_text(GYM)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "reasoning_gym", raising=False)
    yield tmp_path
    sys.modules.pop("reasoning_gym", None)
    _scorer.cache_clear()


def test_answers_of_reasoning_gym_are_scored_by_it(gym):
    environment = make("reasoning_gym")
    environment.reset(row("4", metadata={"source_dataset": "legs", "legs": 4}))
    assert environment.step(" 4\n") == (None, 1.0, True)
    assert environment.step("5") == (None, 0.25, True)
    assert environment.step("four") == (None, 0.0, True)


@pytest.mark.parametrize(
    ("metadata", "why"),
    [(None, "does not say"), ({"source_dataset": "wings"}, "no such data set"), ({"source_dataset": "legs"}, "eval")],
)
def test_rows_that_are_none_of_reasoning_gym_are_named(gym, metadata, why):
    if why == "eval":
        (gym / "reasoning_gym.py").write_text(GYM.replace("1.0 if answer ==", "1.0 if eval(answer) =="))
    with pytest.raises(Exception, match=why):
        make("reasoning_gym").reset(row("4", metadata=metadata))


def speak(connection):
    """A counting game that speaks OpenEnv's protocol: the observation is the sum of what was said."""
    total = 0
    for text in connection:
        message = json.loads(text)
        kind, data = message["type"], message.get("data", {})
        if kind == "close":
            return
        if kind == "reset":
            total = data["seed"]
        elif "add" in data:
            total += data["add"]
        elif data["message"] == "hang":
            threading.Event().wait(2)
        elif data["message"] == "flood":
            connection.send("x" * 2**23)
        elif data["message"] == "lie":
            connection.send('{"type": "observation", "data": {"reward": "much", "done": 1}}')
        elif data["message"] == "leave":
            return
        else:
            answer = {"message": f"cannot do {data['message']}", "code": "EXECUTION_ERROR"}
            connection.send(json.dumps({"type": "error", "data": answer}))
            continue
        state = {"observation": {"total": total}, "reward": 0.5 if total > 9 else None, "done": total > 9}
        connection.send(json.dumps({"type": "observation", "data": state}))


@pytest.fixture(scope="module")
def server():
    with serve(speak, "127.0.0.1", 0) as made:
        thread = threading.Thread(target=made.serve_forever, daemon=True)
        thread.start()
        yield f"ws://127.0.0.1:{made.socket.getsockname()[1]}/ws"
        made.shutdown()


def test_a_server_of_openenv_is_played_with(server):
    environment = make("openenv", environment_url=server, environment_seconds=20.0)
    assert environment.reset(row()) == '{"total": 7}'
    assert environment.step('{"add": 2}') == Step('{"total": 9}', 0.0, False)
    assert environment.step('{"add": 3}') == Step('{"total": 12}', 0.5, True)
    environment.close()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("fly", NotAMessageError),
        ("lie", NotAMessageError),
        ("flood", ConnectionClosed),
        ("leave", ConnectionClosed),
        ("hang", TimeoutError),
    ],
)
def test_what_a_server_does_wrong_costs_the_episode(server, text, error):
    environment = make("openenv", environment_url=server, environment_seconds=0.5 if text == "hang" else 20.0)
    environment.reset(row())
    with pytest.raises(error):
        environment.step(text)
    environment.close()


def test_a_server_is_tried_before_a_run(server):
    check_environment(TaskConfig(environment="openenv", environment_url=server))
    with pytest.raises(ConfigError, match="does not answer: ConnectionRefusedError") as caught:
        check_environment(TaskConfig(environment="openenv", environment_url="ws://127.0.0.1:9/ws"))
    assert caught.value.where == "task.environment_url"


def test_episodes_of_a_server_do_not_mix(server):
    def play(number):
        environment = make("openenv", environment_url=server, environment_seconds=20.0)
        environment.reset(Row(prompt="q", reference="", seed=0))
        for _ in range(3):
            said = environment.step(json.dumps({"add": number}))
        environment.close()
        return said.observation

    crew = Crew[str](20.0, 3)
    for number in (1, 2, 3):
        crew.submit(number, lambda number=number: play(number))
    found = {}
    while crew.is_busy:
        found |= dict(crew.collect(1.0))
    crew.rest()
    assert found == {number: json.dumps({"total": 3 * number}) for number in (1, 2, 3)}


NO_ENVIRONMENT = """
from hfdist.environments import Environment


class Room:
    pass


class Broken:
    def __init__(self):
        raise OSError('no door')


class Bare(Environment):
    def tools(self):
        return None
"""


@pytest.mark.parametrize(
    ("name", "why"),
    [("gues", "no installed package"), ("room", "is no environment"), ("broken", "cannot be made: OSError: no door")],
)
def test_what_is_no_environment_is_refused(tmp_path, monkeypatch, name, why):
    install_package(tmp_path, monkeypatch, "rooms", NO_ENVIRONMENT, GROUP, room="Room", broken="Broken")
    with pytest.raises(ConfigError, match=why) as caught:
        make(name)
    assert caught.value.where == "task.environment"
    if name == "gues":
        assert caught.value.hint == "task.environment=guess"


def test_an_environment_that_gives_no_list_of_tools_is_refused(tmp_path, monkeypatch):
    install_package(tmp_path, monkeypatch, "bare_rooms", NO_ENVIRONMENT, GROUP, bare="Bare")
    with pytest.raises(ConfigError, match="no list of tools: TypeError") as caught:
        load_environment(TaskConfig(environment="bare"))
    assert caught.value.where == "task.environment"


COUNTED = """
from hfdist.environments import Environment

made = []


class Counted(Environment):
    def __init__(self):
        made.append(1)
"""


def test_an_environment_is_made_once_however_often_a_start_asks_for_it(tmp_path, monkeypatch):
    install_package(tmp_path, monkeypatch, "counted_rooms", COUNTED, GROUP, counted="Counted")
    task = TaskConfig(environment="counted")
    check_environment(task)
    assert load_environment(task) == load_environment(task)
    assert len(sys.modules["counted_rooms"].made) == 1


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        make("reasoning_gym")
    assert caught.value.hint == "pip install reasoning-gym"
