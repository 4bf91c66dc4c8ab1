"""Generators and ranks of other machines, over real connections: who is let in, what is lost, and what is fetched."""

import logging
import secrets
import socket
import threading
import time
from contextlib import suppress

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from hfdist.config.run import RunConfig
from hfdist.errors import ConfigError, PeerError, ResourceError
from hfdist.launch.address import LOOPBACK, listen
from hfdist.messages.door import SECRET
from hfdist.messages.message import Message, NotAMessageError, RefusedError
from hfdist.topology import Topology
from hfdist.trainer.generation.limits import GenerationLimits
from hfdist.tune.generators import chunks, gates, remote_files, served_files
from hfdist.tune.generators.answer_check import AnswerCheck
from hfdist.tune.generators.broker import Broker
from hfdist.tune.generators.dispatcher import Dispatcher
from hfdist.tune.generators.gates import GeneratorGate, RankGate
from hfdist.tune.generators.generators import Generators
from hfdist.tune.generators.link import TcpLink
from hfdist.tune.generators.messages import RANK, pack, unpack
from hfdist.tune.generators.policy_files import PolicyFiles
from hfdist.tune.generators.processes import MOST_RESTARTS, Processes
from hfdist.tune.generators.remote import FetchedPolicy, RemoteGenerator
from hfdist.tune.generators.remote_files import RemoteFiles, use_own
from hfdist.tune.generators.served_files import MODEL, POLICY, ServedFiles
from hfdist.tune.generators.settings import Settings
from hfdist.tune.generators.sockets import connect, make_folder, open_broker
from hfdist.version import __version__

SECONDS = 10
KNOWN = "a secret"
HELLO = {"hfdist": __version__, "is": "generator"}
READER = HELLO | {"is": "files"}
ANSWER = {"completions": [[1, 2]], "log_probabilities": [[-0.5, -1.0]]}
CHUNK = 64


class Run:
    """The broker and the gate of a run, without processes of its own."""

    def __init__(self, folder, model, *processes):
        self.folder, self.sockets = folder, make_folder()
        self.policy = PolicyFiles(folder / "policy")
        self.served = ServedFiles({MODEL: model}, self.policy)
        limits = {"dispatcher": Dispatcher(max_staleness=0, answer_seconds=30.0), "most_prompts": 1}
        check = AnswerCheck(num_generations=1, max_new_tokens=4, vocabulary=9)
        own = Processes(len(processes), processes, folder / "logs", are_all=False)
        self.broker = Broker(open_broker(self.sockets), own, self.policy, check=check, **limits)
        self.gate, self.port, self.start = None, None, secrets.token_hex(4)
        self.open()

    def open(self):
        listener = listen(LOOPBACK, 0)
        self.port = listener.getsockname()[1]
        welcome, more = {"start": self.start}, {"files": self.served, "most_bytes": 4096}
        self.gate = GeneratorGate(listener, self.sockets, secret=KNOWN, welcome=welcome, **more)

    def join(self, hello=HELLO, secret=KNOWN):
        return TcpLink((LOOPBACK, self.port), secret, hello, SECONDS)

    def files(self, port=None, wait_seconds=SECONDS):
        def connect_reader():
            return TcpLink((LOOPBACK, port or self.port), KNOWN, READER, SECONDS)

        return RemoteFiles(connect_reader, self.start, wait_seconds, self.folder)

    def ask(self, *numbers):
        """As rank 0 does at a step."""
        rank = connect(self.sockets, f"{RANK}0")
        rank.send(pack({"kind": "publish", "version": 0}))
        rank.send(pack({"kind": "want", "prompts": [{"number": number, "step": 0} for number in numbers]}))
        rank.send(pack({"kind": "need", "step": 0, "numbers": list(numbers), "first": 0}))
        return rank

    def close(self):
        self.gate.close(is_end=True)
        self.broker.stop()


@pytest.fixture
def run(tmp_path, monkeypatch):
    for module in (chunks, served_files, remote_files):
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(remote_files, "RETRY_SECONDS", 0.01)
    model = {}
    for name, content in (("config.json", b"{}" * 100), ("model.safetensors", secrets.token_bytes(5 * CHUNK + 1))):
        (tmp_path / name).write_bytes(content)
        model[name] = tmp_path / name
    made = Run(tmp_path, model)
    yield made
    made.close()


def generator_of(run, folder, own=None):
    made = folder / "kept", folder / "scratch"
    for one in made:
        one.mkdir(exist_ok=True)
    return RemoteGenerator((LOOPBACK, run.port), KNOWN, *made, own=own, wait_seconds=1, say=print)


def hear(link):
    return unpack(link.recv())


def answer(link, asked, text):
    answers = [{"number": one["number"], "text": text, **ANSWER} for one in asked["prompts"]]
    link.send(pack({"kind": "answers", "rollback": asked["rollback"], "version": asked["version"], "answers": answers}))


def texts(rank, count):
    found = []
    for _ in range(count):
        assert rank.poll(1000 * SECONDS)
        found.append(unpack(rank.recv())["text"])
    return found


def until(condition):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---- who comes in ----


def test_who_does_not_know_the_secret_gets_nothing(run):
    with socket.create_connection((LOOPBACK, run.port), SECONDS) as stranger:
        stranger.sendall(b'{"hfdist": "x", "is": "files", "start": ""}\n')
        said = stranger.makefile().read()
    assert "this server asks for the secret" in said
    for wrong in ("", "another"):
        with pytest.raises(RefusedError) as caught:
            run.join(secret=wrong)
        assert caught.value.answer["key"] == SECRET
    link, rank = run.join(), run.ask(0)
    link.send(pack({"kind": "ready"}))
    answer(link, hear(link), "after them")
    assert texts(rank, 1) == ["after them"]


def test_another_version_is_refused_and_both_sides_say_so_once(run, tmp_path, caplog):
    generator = generator_of(run, tmp_path)
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr("hfdist.tune.generators.remote.__version__", "0.0.1")
        for _ in range(2):
            with pytest.raises(ConfigError) as caught:
                generator.run()
    assert (caught.value.found, caught.value.allowed, caught.value.exit_code) == ("0.0.1", __version__, 2)
    said = [line for line in caplog.messages if "0.0.1" in line]
    assert said == [f"refused: a generator of {LOOPBACK} has hfdist 0.0.1, not {__version__}"]


def test_there_is_a_limit_to_connections(run, monkeypatch):
    monkeypatch.setattr(gates, "MOST_CONNECTIONS", 2)
    links = [run.join(), run.join(READER)]
    with pytest.raises(RefusedError, match="connections of generators already"):
        run.join()
    links[0].close()
    until(lambda: run.gate._num_connections == 1)
    run.join()


def test_a_machine_without_the_runs_environment_does_not_join_and_both_sides_say_so(run, tmp_path, caplog, monkeypatch):
    config = RunConfig()
    config.task.environment = "guess"
    limits = GenerationLimits(max_new_tokens=4, end_ids=frozenset(), most_tokens=None)
    told = Settings(config=config, vocabulary=9, limits=limits)
    run.gate._welcome |= {"settings": {}}
    monkeypatch.setattr(Settings, "from_message", lambda message: told)
    for name, tools, what in (("rooms", [], "no installed package offers"), ("guess", [{}], "offers other tools")):
        config.task.environment, told.tools[:] = name, tools
        with pytest.raises(ConfigError, match=what) as caught:
            generator_of(run, tmp_path).run()
        assert (caught.value.where, caught.value.exit_code) == ("task.environment", 2)
        until(lambda name=name: any(f"not the environment {name} of the run" in line for line in caplog.messages))


# ---- who is lost ----


@pytest.mark.parametrize("moment", ["before it speaks", "with a prompt", "with half of an answer", "after its answer"])
def test_what_a_generator_had_that_is_gone_goes_to_others(run, moment):
    lost, other = run.join(), run.join()
    if moment != "before it speaks":
        lost.send(pack({"kind": "ready"}))
    rank = run.ask(0, 1)
    if moment == "before it speaks":
        lost.close()
    else:
        asked = hear(lost)
        if moment == "after its answer":
            answer(lost, asked, "of the lost one")
            hear(lost)
        elif moment == "with half of an answer":
            lost._socket.sendall(b'{"kind": "answers", "rollback": 0, "ver')
        lost.close()
    other.send(pack({"kind": "ready"}))
    for _ in range(1 if moment == "after its answer" else 2):
        answer(other, hear(other), "of the other")
    before = ["of the lost one"] if moment == "after its answer" else []
    assert sorted(texts(rank, 2)) == sorted([*before, *["of the other"] * (2 - len(before))])
    assert run.broker.num_thrown_away == 0


def test_others_go_on_where_all_of_the_runs_own_have_ended(tmp_path):
    made = Run(tmp_path, {}, "false")
    link = made.join()
    until(lambda: made.broker._processes._all[0].codes == [1] * (MOST_RESTARTS + 1))
    rank = made.ask(0)
    link.send(pack({"kind": "ready"}))
    answer(link, hear(link), "of another machine")
    assert texts(rank, 1) == ["of another machine"]
    made.close()


WRONG = [
    {"completions": [[1]], "log_probabilities": [[-0.5, -1.0]]},
    {"completions": [[1, 9]], "log_probabilities": [[-0.5, -1.0]]},
    {"completions": [[]], "log_probabilities": [[]]},
    {"completions": [[1] * 5], "log_probabilities": [[-1.0] * 5]},
    {"completions": [[1], [2]], "log_probabilities": [[-0.5], [-0.5]]},
    {"completions": [[1, 2]], "log_probabilities": [["a", None]]},
    {"completions": [[1, 2]], "log_probabilities": [[-0.5, float("nan")]]},
    {"completions": "12"},
]


@pytest.mark.parametrize("given", [b"no message", b'{"kind": "publish", "version": 3}', b"x" * 5000, *WRONG])
def test_a_member_that_says_nonsense_is_dropped_and_named(run, caplog, given):
    bad, good = run.join(), run.join()
    bad.send(pack({"kind": "ready"}))
    rank = run.ask(0)
    asked = hear(bad)
    if isinstance(given, dict):
        given = pack({"kind": "answers", "rollback": 0, "version": 0, "answers": [{"number": 0, **given}]})
    bad.send(given)
    with pytest.raises(OSError, match="ended"):
        bad.recv()
    good.send(pack({"kind": "ready"}))
    answer(good, hear(good), "right")
    assert texts(rank, 1) == ["right"]
    assert asked["prompts"][0]["number"] == 0
    assert [line for line in caplog.messages if f"generator 1 of {LOOPBACK} is not heard any more" in line]


def test_a_version_that_is_still_to_come_has_not_answered(run):
    link = run.join()
    link.send(pack({"kind": "ready"}))
    rank = run.ask(0)
    answer(link, hear(link) | {"version": 7}, "of the future")
    with pytest.raises(OSError, match="ended"):
        link.recv()
    assert not rank.poll(100)


def test_a_generator_does_not_speak_without_being_asked(run):
    link = run.join()
    for _ in range(2):
        link.send(pack({"kind": "ready"}))
    with pytest.raises(OSError, match="ended"):
        link.recv()


def test_generators_are_told_of_the_end(run):
    link = run.join()
    link.send(pack({"kind": "ready"}))
    run.gate.close(is_end=True)
    assert hear(link) == {"ended": 1}


# ---- files ----


def publish(run, version, value, pieces=1):
    """A version whose weights have this value."""
    folder = run.policy.path(0, version)
    folder.mkdir(parents=True)
    for piece in range(pieces):
        save_file({f"{piece}.weight": torch.full((10, 10), value)}, folder / f"{piece}.safetensors")
    return folder


def model_of(pieces=1):
    made = nn.ModuleDict({f"{piece}": nn.Linear(10, 10, bias=False) for piece in range(pieces)})
    for parameter in made.parameters():
        nn.init.zeros_(parameter)
    return made


def values(model):
    return {float(value) for parameter in model.parameters() for value in parameter.detach().flatten()}


class Wire:
    """What is between two machines: each connection breaks after so many bytes to the reader, but the last."""

    def __init__(self, port, breaks_after):
        self._port, self._breaks = port, list(breaks_after)
        self._listener = listen(LOOPBACK, 0)
        self.port, self.num_connections = self._listener.getsockname()[1], 0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self.num_connections += 1
                far = socket.create_connection((LOOPBACK, self._port))
                left = self._breaks.pop(0) if self._breaks else None
                for source, target, most in ((near, far, None), (far, near, left)):
                    threading.Thread(target=self._carry, args=(source, target, most), daemon=True).start()

    def _carry(self, source, target, most):
        carried = 0
        with suppress(OSError):
            while content := source.recv(50):
                content = content if most is None else content[: most - carried]
                target.sendall(content)
                carried += len(content)
                if carried == most:
                    break
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def test_a_version_comes_whole_through_a_connection_that_breaks(run, tmp_path):
    publish(run, 3, 3.0, pieces=2)
    # The third one lasts. Of the listing and its chunks, so many bytes arrive before.
    wire, model = Wire(run.port, breaks_after=(700, 900)), model_of(2)
    FetchedPolicy(tmp_path / "g", run.files(wire.port), print).read(0, 3, model)
    assert values(model) == {3.0}
    assert wire.num_connections == 3
    assert list((tmp_path / "g").iterdir()) == []


def test_a_changed_byte_is_noticed(run, tmp_path, monkeypatch):
    publish(run, 3, 3.0)
    sent = run.served.find

    def find(asked):
        chunk = sent(asked)
        wrong = tmp_path / "wrong"
        wrong.write_bytes(bytes(byte ^ 1 for byte in chunk.path.read_bytes()))
        return chunk._replace(path=wrong)

    model, files = model_of(), run.files()
    with monkeypatch.context() as patch:
        patch.setattr(run.served, "find", find)
        with pytest.raises(PeerError, match="otherwise than it was listed"):
            FetchedPolicy(tmp_path / "g", files, print).read(0, 3, model)
    assert values(model) == {0.0}
    FetchedPolicy(tmp_path / "g", files, print).read(0, 3, model)
    assert values(model) == {3.0}


def test_a_version_that_is_removed_meanwhile_leaves_the_old_weights(run, tmp_path, monkeypatch):
    publish(run, 3, 3.0, pieces=2)
    publish(run, 4, 4.0, pieces=2)
    model, files = model_of(2), run.files()
    policy = FetchedPolicy(tmp_path / "g", files, print)
    policy.read(0, 3, model)
    find, num_found = run.served.find, 0

    def find_and_remove(asked):
        nonlocal num_found
        num_found += 1
        if num_found == 5:
            run.policy.remove_others(0, [5])
        return find(asked)

    monkeypatch.setattr(run.served, "find", find_and_remove)
    with pytest.raises(FileNotFoundError):
        policy.read(0, 4, model)
    assert values(model) == {3.0}
    with pytest.raises(FileNotFoundError):
        policy.read(0, 9, model)


def test_files_of_an_earlier_start_are_those_of_no_run(run, tmp_path):
    """Steps that a run repeats make other weights."""
    publish(run, 3, 3.0)
    files = run.files()
    run.gate.close(is_end=False)
    run.start, before = "another", run.port
    listener = listen(LOOPBACK, before)
    more = {"files": run.served, "most_bytes": 4096}
    run.gate = GeneratorGate(listener, run.sockets, secret=KNOWN, welcome={"start": "another"}, **more)
    with pytest.raises(FileNotFoundError):
        files.list(POLICY, rollback=0, version=3)


def test_a_run_that_is_gone_ends_the_wait(run):
    files = run.files(wait_seconds=0.1)
    run.gate.close(is_end=False)
    with pytest.raises(PeerError) as caught:
        files.list(MODEL)
    assert caught.value.exit_code == 6


def test_the_model_is_fetched_once_and_what_is_here_stays(run, tmp_path):
    own, files = tmp_path / "own", run.files()
    own.mkdir()
    (own / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes())
    listing = files.list(MODEL)
    assert use_own(own, listing, tmp_path / "g") == []
    for expected in (200, 0):
        before = files.num_bytes
        files.fetch(listing, tmp_path / "g", MODEL)
        assert files.num_bytes - before == expected
    for name in listing:
        assert (tmp_path / "g" / name).read_bytes() == (tmp_path / name).read_bytes()
    assert (tmp_path / "g" / "model.safetensors").resolve() == own / "model.safetensors"


def test_another_model_or_tokenizer_is_refused_and_both_sides_say_which_file(run, tmp_path, caplog):
    own = tmp_path / "own"
    own.mkdir()
    (own / "config.json").write_bytes(b"{}")
    generator = generator_of(run, tmp_path, own)
    files = run.files()
    with pytest.raises(ConfigError) as caught:
        generator._link_own(own, files.list(MODEL), files)
    assert caught.value.found == f"another config.json, in {own}"
    until(lambda: f"refused: a generator of {LOOPBACK} has another config.json" in caplog.messages)
    assert not (tmp_path / "scratch" / MODEL).exists()


def test_what_this_machine_or_the_run_cannot_do_ends_a_generator(run, tmp_path, monkeypatch):
    """It is not tried for ever, as a connection that has ended is."""
    run.gate._welcome |= {"settings": {}}
    generator = generator_of(run, tmp_path)
    limits = GenerationLimits(max_new_tokens=4, end_ids=frozenset(), most_tokens=None)
    monkeypatch.setattr(
        Settings, "from_message", lambda message: Settings(config=RunConfig(), vocabulary=9, limits=limits)
    )
    (tmp_path / "kept").rmdir()
    (tmp_path / "kept").write_text("no folder")
    with pytest.raises(ResourceError, match="cannot be kept or read here"):
        generator.run()
    monkeypatch.setattr(gates, "MOST_BYTES_OF_LINE", 10)
    with pytest.raises(ConfigError, match="too many files to send"):
        generator.run()
    monkeypatch.setattr(gates, "MOST_CONNECTIONS", 1)
    with pytest.raises(ConfigError, match="connections of generators already"):
        generator.run()


@pytest.mark.parametrize(
    "listing",
    [
        {"../x.json": [0, []]},
        {"/etc/x.json": [0, []]},
        {".hidden.json": [0, []]},
        {"a/b/c.json": [0, []]},
        {"code.py": [0, []]},
        {"weights.bin": [0, []]},
        {"x.json": [9, []]},
        {"x.json": [CHUNK + 1, ["0" * 64]]},
        {"x.json": [1, ["0"]]},
        {"x.json": [-1, []]},
        {"x.json": 1},
    ],
)
def test_a_listing_leads_nowhere_else_and_holds_no_code(run, listing):
    with pytest.raises(NotAMessageError):
        chunks.read_listing(Message(listing))


def test_a_reader_gets_only_what_is_listed(run, tmp_path):
    publish(run, 3, 3.0)
    (tmp_path / "policy" / "private.safetensors").write_bytes(b"private")
    link = run.join(READER)
    for asked in (
        {"of": MODEL, "file": "../policy/private.safetensors", "chunk": 0},
        {"of": POLICY, "rollback": 0, "version": 3, "file": "../private.safetensors", "chunk": 0},
        {"of": "..", "file": "x", "chunk": 0},
        {"of": MODEL, "file": "config.json", "chunk": 99},
    ):
        link.send(pack({"start": run.start, **asked}))
        assert hear(link) == {"gone": 1}
    link.send(b"[1]")
    with pytest.raises(OSError, match="ended"):
        link.recv()


# ---- ranks ----


def test_a_rank_of_another_machine_speaks_to_the_broker_and_nobody_else_does(run):
    gate = RankGate(listener := listen(LOOPBACK, 0), run.sockets)
    port = listener.getsockname()[1]
    with pytest.raises(RefusedError):
        TcpLink((LOOPBACK, port), "a guess", {"rank": 1}, SECONDS)
    rank, generator = TcpLink((LOOPBACK, port), gate.secret, {"rank": 1}, SECONDS), run.join()
    first = run.ask(0)
    rank.send(pack({"kind": "want", "prompts": [{"number": 1, "step": 0, "tokens": [1] * 10_000}]}))
    rank.send(pack({"kind": "need", "step": 0, "numbers": [1], "first": 0}))
    generator.send(pack({"kind": "ready"}))
    for _ in range(2):
        asked = hear(generator)
        answer(generator, asked, f"to {asked['prompts'][0]['number']}")
    assert hear(rank)["text"] == "to 1"
    assert texts(first, 1) == ["to 0"]
    gate.close()


def test_files_without_versions_are_listed_once(tmp_path):
    """Whatever versions are asked for: each list would be made, and kept."""
    path = tmp_path / "config.json"
    path.write_text("{}")
    served = ServedFiles({MODEL: {path.name: path}}, PolicyFiles(tmp_path / "policy"))
    lists = [served.list(Message({"of": MODEL, "version": version})) for version in range(3)]
    assert lists[0] == lists[1] == lists[2]
    assert len(served._listed) == 1


@pytest.mark.parametrize("error", [RefusedError(refused="too many"), NotAMessageError("?"), OSError()])
def test_a_run_that_does_not_hear_why_does_not_hide_it(tmp_path, error):
    def connect_reader():
        raise error

    RemoteFiles(connect_reader, "start", 1.0, tmp_path).refuse("another model")


def test_a_rank_that_has_lost_the_broker_says_so_whether_it_speaks_or_hears():
    ours, theirs = socket.socketpair()
    link = TcpLink.__new__(TcpLink)
    link._socket, link._answers = ours, ours.makefile("rb")
    rank = Generators.__new__(Generators)
    rank._link, rank._rollback, rank._topology = link, 0, Topology(rank=3, data=4)
    theirs.close()
    for action in (lambda: rank._send(kind="want", prompts=[]), rank._hear):
        with pytest.raises(PeerError, match="rank 3 has lost the broker"):
            action()
    link.close()
