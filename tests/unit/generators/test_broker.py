"""Ranks, a broker and generators over real sockets: who is silent or dies, and when a run ends for it."""

import shutil
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import save_file
from torch import nn

from hfdist.errors import PeerError
from hfdist.tune.generators import broker
from hfdist.tune.generators.answer_check import AnswerCheck
from hfdist.tune.generators.broker import Broker
from hfdist.tune.generators.dispatcher import Dispatcher
from hfdist.tune.generators.messages import pack, unpack
from hfdist.tune.generators.policy_files import PolicyFiles
from hfdist.tune.generators.processes import MOST_RESTARTS, Processes
from hfdist.tune.generators.sockets import connect, make_folder, open_broker

SECONDS = 10


class Peer:
    """A rank or a generator."""

    def __init__(self, folder, name):
        self.socket = connect(folder, name)

    def send(self, kind, rollback=0, **message):
        self.socket.send(pack({"kind": kind, "rollback": rollback, **message}))

    def receive(self):
        assert self.socket.poll(1000 * SECONDS)
        return unpack(self.socket.recv())

    def answer(self, asked, text):
        given = {"completions": [[1, 2]], "log_probabilities": [[-0.5, -1.0]], "text": text}
        answers = [{"number": one["number"], **given} for one in asked["prompts"]]
        self.send("answers", rollback=asked["rollback"], version=asked["version"], answers=answers)


@pytest.fixture
def begin(tmp_path):
    """Begins a broker whose processes run a line of Python."""
    brokers = []

    def start(line, answer_seconds=30.0, invitation=None):
        processes = Processes(2, [sys.executable, "-c", line], tmp_path / "logs")
        check = AnswerCheck(num_generations=1, max_new_tokens=4, vocabulary=9)
        dispatcher = Dispatcher(max_staleness=0, answer_seconds=answer_seconds)
        limits = {"dispatcher": dispatcher, "most_prompts": 1, "check": check, "invitation": invitation}
        files = PolicyFiles(tmp_path / "policy")
        brokers.append(Broker(open_broker(tmp_path), processes, files, **limits))
        return brokers[-1]

    yield start
    for made in brokers:
        made.stop()


def test_a_run_that_waits_for_a_first_generator_says_how_one_joins(begin, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(broker, "_HINT_SECONDS", 0.2)
    made = begin("import time; time.sleep(60)", invitation="hfdist generate join=here:29700")
    time.sleep(0.5)
    # Nothing is needed yet.
    assert not caplog.messages
    # Kept: a socket that is collected drops what it has not sent.
    _rank = ask(tmp_path, 0)
    deadline = time.monotonic() + SECONDS
    while made._invitation is not None and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    said = "no generator has joined yet, and the run waits for one: hfdist generate join=here:29700"
    assert caplog.messages == [said]


def test_one_that_has_joined_needs_no_invitation(begin, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(broker, "_HINT_SECONDS", 0.2)
    begin("import time; time.sleep(60)", invitation="hfdist generate join=here:29700")
    one = Peer(tmp_path, "generator-0-0")
    one.send("ready")
    time.sleep(0.5)
    _rank = ask(tmp_path, 0)
    assert one.receive()["prompts"][0]["number"] == 0
    time.sleep(0.3)
    assert not caplog.messages


def ask(folder, *numbers, rollback=0):
    rank = Peer(folder, f"rank-0-{rollback}")
    rank.send("publish", rollback, version=0)
    rank.send("want", rollback, prompts=[{"number": number, "step": 0} for number in numbers])
    rank.send("need", rollback, step=0, numbers=list(numbers), first=0)
    return rank


def test_a_socket_has_a_name_of_any_length_of_temporary_folders(tmp_path_factory, monkeypatch):
    """Those of clusters and of tests are long, and a name may have 107 bytes."""
    base = tmp_path_factory.mktemp("a")
    for length in (60, 73, 74, 200):
        long = f"{base}/".ljust(length, "x")
        Path(long).mkdir(exist_ok=True)
        monkeypatch.setattr(tempfile, "tempdir", long)
        folder = make_folder()
        open_broker(folder).close()
        assert str(folder).startswith(long if len(long) < 74 else "/tmp/hfdist-generators-")
        shutil.rmtree(folder)


def test_a_silent_generator_costs_only_its_own_prompt(begin, tmp_path):
    broker = begin("import time; time.sleep(60)", answer_seconds=0.5)
    silent, other = Peer(tmp_path, "silent"), Peer(tmp_path, "other")
    silent.send("ready")
    rank = ask(tmp_path, 0, 1)
    late = silent.receive()
    other.send("ready")
    for _ in range(2):
        other.answer(other.receive(), "in time")
    given = [rank.receive() for _ in range(2)]
    assert sorted(one["number"] for one in given) == [0, 1]
    assert {one["text"] for one in given} == {"in time"}
    silent.answer(late, "late")
    while not broker.num_thrown_away:
        time.sleep(0.01)
    assert not rank.socket.poll(100)


def test_a_run_that_goes_back_gets_no_answer_of_weights_that_are_no_more(begin, tmp_path):
    begin("import time; time.sleep(60)")
    generator = Peer(tmp_path, "generator")
    generator.send("ready")
    before = ask(tmp_path, 0)
    asked = generator.receive()
    after = ask(tmp_path, 0, rollback=1)
    time.sleep(0.2)  # Nothing tells that the broker has heard it.
    generator.answer(asked, "before")
    generator.answer(generator.receive(), "after")
    assert after.receive()["text"] == "after"
    assert not before.socket.poll(100)


def test_seeds_are_whole_numbers_of_64_bits(begin, tmp_path):
    begin("import time; time.sleep(60)")
    generator, rank = Peer(tmp_path, "generator"), Peer(tmp_path, "rank-0")
    generator.send("ready")
    rank.send("publish", version=0)
    rank.send("want", prompts=[{"number": 0, "step": 0, "seeds": [2**64 - 1]}])
    assert generator.receive()["prompts"][0]["seeds"] == [2**64 - 1]


@pytest.mark.parametrize(
    "said", [{"kind": "need", "step": "x"}, {"kind": "need", "step": 0, "first": 0, "numbers": [5]}, {"kind": "x"}]
)
def test_a_rank_that_is_not_understood_is_told(begin, tmp_path, said):
    """It would wait for ever."""
    begin("import time; time.sleep(60)")
    rank = Peer(tmp_path, "rank-0")
    rank.send(**said)
    assert PeerError(**rank.receive()["error"]).exit_code == 6


def test_only_a_rank_asks_for_answers(begin, tmp_path):
    begin("import time; time.sleep(60)")
    stranger = Peer(tmp_path, "stranger")
    # Of a prompt that nobody has given.
    stranger.send("need", step=0, numbers=[3], first=0)
    rank, generator = ask(tmp_path, 1), Peer(tmp_path, "generator")
    generator.send("ready")
    generator.answer(generator.receive(), "an answer")
    assert rank.receive()["text"] == "an answer"


def test_silence_of_all_ends_the_wait(begin, tmp_path):
    begin("import time; time.sleep(60)", answer_seconds=0.2)
    error = ask(tmp_path, 0).receive()["error"]
    assert (error["where"], error["hint"]) == ("task.answer_seconds", "a longer time, as task.answer_seconds=0.4")


def test_a_generator_that_has_ended_gets_no_more_prompts(begin, tmp_path):
    """What it has sent before may come late."""
    begin("import sys, time; print(sys.argv[2], flush=True); sys.argv[2] == 'generator-0-0' or time.sleep(60)")
    dead, other = Peer(tmp_path, "generator-0-0"), Peer(tmp_path, "generator-1-0")
    deadline = time.monotonic() + SECONDS
    while "generator-0-1" not in (tmp_path / "logs" / "0.log").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    dead.send("ready")
    rank = ask(tmp_path, 0)
    assert not dead.socket.poll(300)
    other.send("ready")
    other.answer(other.receive(), "of one that lives")
    assert rank.receive()["text"] == "of one that lives"


def test_dead_generators_start_again_and_not_for_ever(begin, tmp_path):
    begin("import sys; print('why'); sys.exit(3)")
    error = PeerError(**ask(tmp_path, 0).receive()["error"])
    assert error.exit_code == 6
    assert error.found == "exit codes " + ", ".join(["3"] * (MOST_RESTARTS + 1)) + "; why"
    assert (tmp_path / "logs" / "0.log").read_text() == "why\n" * (MOST_RESTARTS + 1)
    assert error.where == str(tmp_path / "logs" / "0.log")


def test_a_generator_that_answers_between_its_ends_is_always_started_again(tmp_path):
    made = Processes(1, ["false"], tmp_path)
    for start in range(MOST_RESTARTS + 2):
        made.note_answers(f"generator-0-{start}")
        # Of an earlier start, whose answers come late.
        made.note_answers("generator-0-9")
        assert restart(made) == [f"generator-0-{start}"]
    for _ in range(MOST_RESTARTS - 1):
        restart(made)
    with pytest.raises(PeerError, match="without an answer"):
        restart(made)


def restart(processes):
    """Wait for the end of a generator."""
    deadline = time.monotonic() + SECONDS
    while not (dead := processes.restart_dead()):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return dead


def test_a_policy_that_is_being_removed_is_not_read_in_part(tmp_path, monkeypatch):
    files, model = PolicyFiles(tmp_path), nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    for version in (1, 2):
        (tmp_path / f"0-{version}").mkdir()
        for name, tensor in model.state_dict().items():
            save_file({name: tensor}, tmp_path / f"0-{version}" / f"{name}.safetensors")

    def stop_halfway(folder, **_):
        next(folder.glob("*.safetensors")).unlink()

    monkeypatch.setattr(shutil, "rmtree", stop_halfway)
    files.remove_others(0, [2])
    with pytest.raises(FileNotFoundError):
        files.read(0, 1, model)
    files.read(0, 2, model)


def test_one_that_cannot_be_started_leaves_none_of_the_others(tmp_path):
    before = psutil.Process().children()
    (tmp_path / "1.log").mkdir()
    with pytest.raises(IsADirectoryError):
        Processes(2, [sys.executable, "-c", "import time; time.sleep(600)"], tmp_path)
    assert psutil.Process().children() == before
