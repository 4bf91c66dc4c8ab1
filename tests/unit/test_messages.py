"""Messages that nobody of hfdist would send, to each socket: their senders are dropped, and all others go on.

`python -m tests.unit.test_messages 5000` sends so many to each, and prints how many were sent and what became of them.
"""

import asyncio
import copy
import json
import random
import socket
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest
import zmq

from hfdist.config.islands import Codec
from hfdist.config.optimizer import OptimizerConfig
from hfdist.config.plain_values import plain
from hfdist.islands.rendezvous_messages import Arrival
from hfdist.islands.transport import AbortedError, Transport
from hfdist.launch.address import listen
from hfdist.messages.door import SECRET, knock, read_line
from hfdist.messages.message import MOST_BYTES, Message, NotAMessageError, RefusedError, read_message
from hfdist.tools.doctor.rendezvous import Rendezvous
from hfdist.tune.generators.answer_check import AnswerCheck
from hfdist.tune.generators.broker import Broker
from hfdist.tune.generators.dispatcher import Dispatcher
from hfdist.tune.generators.gates import GeneratorGate
from hfdist.tune.generators.link import TcpLink
from hfdist.tune.generators.messages import pack, unpack
from hfdist.tune.generators.policy_files import PolicyFiles
from hfdist.tune.generators.processes import Processes
from hfdist.tune.generators.served_files import ServedFiles
from hfdist.tune.generators.sockets import connect, open_broker
from hfdist.version import __version__
from hfdist.watch.heartbeat import Heartbeat
from hfdist.watch.store import HostedStore, JoinedStore, Report
from hfdist.watch.tree import Below, Digest, find_parents
from tests.unit.islands.servers import JOB, at, member, served, together

FEW = 200
ODD = (
    None, True, -1, 0, 1, 2**53, 2**63, 10**400, 1.5, -0.0, float("nan"), float("inf"), "", "x", "1", "\ud800", "\x00",
    "${oc.env:HOME}", "tcp://127.0.0.1:1", "a" * 5000, [], [[]], [None] * 300, {}, {"": {}}, {"0": 1},
)  # fmt: skip
RAW = (
    b"", b"\n", b"GET / HTTP/1.1\r\n\r\n", b"\xff\xfe\n", b"\x16\x03\x01\x02\n", b"[" * 5000 + b"\n",
    b'{"a":' * 500 + b"\n", b'{"bytes": 1e999}\n', b'{"bytes": -1}\n', b'{"bytes": 9223372036854775807}\n', b"null\n",
    b"[]\n", b'"x"\n', b"{}\n", b"1" * 5000 + b"\n", b'{"a": NaN}\n', b'{"a": 1, "a": 2}\n', b"\xef\xbb\xbf{}\n",
    "{}\n".encode("utf-16"), b"{} {}\n",
)  # fmt: skip


def hostile(rng, messages, odd=ODD):
    """Bytes: a message with an odd value somewhere, half of one, or none at all."""
    kind = rng.random()
    if kind < 0.25:
        return rng.choice(RAW)
    message = copy.deepcopy(rng.choice(messages))
    place = message
    while True:
        keys = list(place) if isinstance(place, dict) else range(len(place))
        key = rng.choice(list(keys))
        if isinstance(place[key], (dict, list)) and place[key] and rng.random() < 0.6:
            place = place[key]
            continue
        if rng.random() < 0.2:
            del place[key]
        else:
            place[key] = rng.choice(odd)
        break
    line = json.dumps(message).encode() + b"\n"
    if kind < 0.4:
        line = line[: rng.randrange(len(line))]
    elif kind < 0.5:
        line = bytes(rng.randrange(256) if rng.random() < 0.02 else one for one in line)
    return line


def throw(connection, *contents):
    """Send what the other side may refuse to take, and end."""
    with connection, suppress(OSError):
        for content in contents:
            connection.sendall(content)
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(20)
        while connection.recv(65536):
            pass


# ---- each socket ----


def to_server(count, seed=0, secret=""):
    """As a stranger, and as an island of its own that says odd things once it is in."""
    rng = random.Random(seed)
    hello = {"island": 7, "rank": 0, "start": "x", "job": dict(JOB), "addresses": [at(7)]}
    said = [
        {"at": [10, 0, "a", 1.0, False, {"lanes": [1]}]},
        {"done": 1, "ok": True, "bad": {"0": "why"}},
        {"beat": 1},
        {"segments": [["w", [2], 0, 0, 0, 2]], "bytes": 8},
        {"push": 1, "targets": 1.0, "bytes": 8},
        {"bye": 1},
    ]
    with served(least=2, secret=secret) as (address, lines):
        host, port = address.split(":")
        honest = [member(address, index, secret=secret) for index in (0, 1)]
        for _ in range(count):
            if secret or rng.random() < 0.5:
                nonce = {"nonce": "1" * 32, "proof": "2" * 64} if secret else {}
                throw(socket.create_connection((host, int(port)), 20), hostile(rng, [hello | nonce]))
            else:
                line = json.dumps(hello | {"island": rng.randrange(2, 99), "start": f"{rng.random()}"}).encode() + b"\n"
                with socket.create_connection((host, int(port)), 20) as made:
                    made.sendall(line)
                    with suppress(OSError):
                        made.recv(1000)
                        throw(made, *(hostile(rng, said) for _ in range(rng.randrange(1, 4))))
        begin = time.monotonic()
        arrival = Arrival(step=10, outer_step=0, digest="a")
        answers = together(*(lambda one=one: one.arrive(arrival) for one in honest))
        assert all(answer is not None for answer in answers)
        assert sorted(map(int, answers[0]["members"])) == [0, 1]
        assert time.monotonic() - begin < 10
        for one in honest:
            one.leave()
    assert not [line for line in lines if "Traceback" in line]
    return lines


def to_parameter_server(count, seed=0):
    """Of an island that is in: what it begins with, pushes and asks for."""
    rng = random.Random(seed)
    job = {
        "islands.method": "parameter_server", "islands.count": 1, "islands.codec": "fp32", "islands.staleness": None,
        "train.max_grad_norm": 1.0, "train.max_steps": 10, "optimizer": plain(OptimizerConfig()),
    }  # fmt: skip
    begin = {"segments": [["w", [2], 0, 0, 0, 2]], "step": 0, "updates": 0, "state": {}, "may_begin": True}
    push = {"push": 1, "targets": 1.0, "state": {"step": 1}, "bytes": 8}
    with served(least=1) as (address, lines):
        # It loads torch and transformers.
        honest = member(address, 0, job=job, seconds=250)
        weights = bytes(24)
        honest.send(begin, weights)
        assert honest.wait_for("weights")["payload"] == weights
        host, port = address.split(":")
        for number in range(count):
            hello = {"island": 1, "rank": 0, "start": f"{number}", "job": job, "addresses": ["rank 0"]}
            if rng.random() < 0.1:
                throw(socket.create_connection((host, int(port)), 20), hostile(rng, [hello]))
                continue
            made = socket.create_connection((host, int(port)), 20)
            made.sendall(json.dumps(hello).encode() + b"\n")
            made.recv(1000)
            first = json.dumps(begin | {"bytes": 24}).encode() + b"\n" + weights
            odd = [hostile(rng, [push, begin | {"bytes": 24}, {"pull": 1}]), rng.randbytes(rng.choice((0, 8, 24)))]
            throw(made, *([first] if rng.random() < 0.7 else []), *odd)
        honest.send({"pull": 1})
        found = honest.wait_for("weights")
        assert found is not None
        assert len(found["payload"]) == 24
        honest.leave()
    assert not [line for line in lines if "Traceback" in line]
    return lines


def to_rank(count, seed=0):
    """To the port at which a rank of an island listens: of strangers, and of a member."""
    rng = random.Random(seed)
    one, two = (Transport("127.0.0.1", Codec.fp32) for _ in range(2))
    for transport in (one, two):
        transport.begin("known")
    host, _, port = one.address.removeprefix("tcp://").rpartition(":")
    message = {"rendezvous": 1, "kind": "part 0", "sizes": [4, 4]}
    for _ in range(count):
        if rng.random() < 0.3:
            line = hostile(rng, [{"address": at(1), "nonce": "1" * 32}, {"proof": "2" * 64}])
            throw(socket.create_connection((host, int(port)), 20), line)
        else:
            made, _ = knock((host, int(port)), "known", {"address": at(1)}, {}, 20)
            throw(made, *(hostile(rng, [message]) + rng.randbytes(8) for _ in range(rng.randrange(1, 12))))
    two.send(one.address, 1, "part 0", b"1234", b"")
    until = time.monotonic() + 20
    assert one.receive(two.address, 1, "part 0", lambda: time.monotonic() > until) == [b"1234", b""]
    for transport in (one, two):
        transport.close()


def to_watch(count, seed=0):
    """To the heartbeats of rank 0."""
    rng = random.Random(seed)
    heard = Below(0, [Heartbeat(number=0)] * 5, find_parents([[0, 1, 2], [3, 4]]), time.monotonic())
    said = {"beat": Heartbeat(number=1), "digest": Digest(), "each": [[4, Heartbeat(number=2), 0.5]]}
    host = HostedStore(heard, 5, "1" * 32)
    other = JoinedStore([("localhost", host.port)], host.token, 2, 1.0)
    for _ in range(count):
        if rng.random() < 0.3:
            throw(
                socket.create_connection(("localhost", host.port), 20), hostile(rng, [{"rank": 1, "nonce": "1" * 32}])
            )
        else:
            with suppress(RefusedError, OSError):
                made, _ = knock(
                    ("localhost", host.port), host.token, {"rank": rng.choice((1, 3, 3, 0, -1, 9, "x"))}, {}, 20
                )
                throw(made, hostile(rng, [said]))
    assert other.tell(Report(Heartbeat(number=7), Digest(), {})).beat == Heartbeat(number=0)
    states = heard.states(time.monotonic(), 1.0)
    assert states[2].beat.number == 7
    assert all(isinstance(one.beat, Heartbeat) and type(one.beat.number) is int for one in states.values())
    assert all(type(one.silent_seconds) is float for one in states.values())
    other.close()
    host.close()


def to_broker(count, seed=0):
    """To the broker of the generators."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = Processes(1, [sys.executable, "-c", "import time; time.sleep(600)"], folder / "logs")
        check = AnswerCheck(num_generations=1, max_new_tokens=4, vocabulary=9)
        limits = {"dispatcher": Dispatcher(max_staleness=0, answer_seconds=60.0), "most_prompts": 1, "check": check}
        broker = Broker(open_broker(folder), processes, PolicyFiles(folder / "policy"), **limits)
        answer = {"completions": [[1, 2]], "log_probabilities": [[-0.5, -1.0]]}
        said = [
            {"kind": "ready"},
            {"kind": "answers", "rollback": 0, "version": 0, "answers": [{"number": 3, **answer}]},
            {"kind": "gone"},
            {"kind": "want", "rollback": 0, "prompts": [{"number": 3, "step": 0}]},
            {"kind": "need", "rollback": 0, "step": 0, "numbers": [3], "first": 0},
        ]
        for number in range(count):
            stranger = connect(folder, f"stranger-{number}")
            # What a rank might say, as another number would be, is no odd message.
            message = hostile(rng, said, [one for one in ODD if type(one) is not int])
            with suppress(NotAMessageError):
                found = read_message(message)
                if found.get("kind") in ("ready", "answers"):
                    message = json.dumps(found | {"rollback": rng.choice(ODD[7:])}).encode()
            stranger.send_multipart([message, *[b"x"] * (rng.random() < 0.1)])
            stranger.setsockopt(zmq.LINGER, 1000)
            stranger.close()
        rank, generator = connect(folder, "rank-0"), connect(folder, "generator")
        rank.send(pack({"kind": "publish", "rollback": 0, "version": 0}))
        rank.send(pack({"kind": "want", "rollback": 0, "prompts": [{"number": 0, "step": 0}]}))
        rank.send(pack({"kind": "need", "rollback": 0, "step": 0, "numbers": [0], "first": 0}))
        generator.send(pack({"kind": "ready", "rollback": 0}))
        while True:
            assert generator.poll(20_000)
            asked = unpack(generator.recv())
            answers = [{"number": one["number"], **answer} for one in asked["prompts"]]
            generator.send(pack({"kind": "answers", "rollback": 0, "version": asked["version"], "answers": answers}))
            if any(one["number"] == 0 for one in asked["prompts"]):
                break
        assert rank.poll(20_000)
        assert unpack(rank.recv())["completions"] == [[1, 2]]
        broker.stop()
        for one in (rank, generator):
            one.close()


def to_gate(count, seed=0):
    """To the gate for generators of other machines: of strangers, of generators, and of readers of files."""
    rng, secret = random.Random(seed), "1" * 32
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_bytes(b"{}")
        policy, listener = PolicyFiles(folder / "policy"), listen("127.0.0.1", 0)
        address = listener.getsockname()
        check = AnswerCheck(num_generations=1, max_new_tokens=4, vocabulary=9)
        limits = {"dispatcher": Dispatcher(max_staleness=0, answer_seconds=60.0), "most_prompts": 1, "check": check}
        none = Processes(0, [], folder / "logs", are_all=False)
        broker = Broker(open_broker(folder), none, policy, **limits)
        files = ServedFiles({"model": {"config.json": folder / "config.json"}}, policy)
        own = {"secret": secret, "welcome": {"start": "x"}, "files": files, "most_bytes": 4096}
        gate = GeneratorGate(listener, folder, **own)
        hello = {"hfdist": __version__, "is": "generator"}
        answers = [{"number": 0, "completions": [[1, 2]], "log_probabilities": [[-0.5, -1.0]]}]
        said = [{"kind": "ready"}, {"kind": "answers", "rollback": 0, "version": 0, "answers": answers}]
        asked = [
            {"start": "x", "of": "model"},
            {"start": "x", "of": "model", "file": "config.json", "chunk": 0},
            {"start": "x", "of": "policy", "rollback": 0, "version": 1},
            {"differs": "x"},
        ]
        for _ in range(count):
            if rng.random() < 0.3:
                throw(socket.create_connection(address, 20), hostile(rng, [hello | {"nonce": "1" * 32}]))
                continue
            is_reader = rng.random() < 0.5
            with suppress(RefusedError, NotAMessageError, OSError):
                odd = hello if rng.random() < 0.8 else hello | {rng.choice(list(hello)): rng.choice(ODD)}
                made, _ = knock(address, secret, {}, odd | ({"is": "files"} if is_reader else {}), 20)
                lines = [hostile(rng, asked if is_reader else said) for _ in range(rng.randrange(1, 4))]
                throw(made, *lines)
        rank, generator = connect(folder, "rank-0"), TcpLink(address, secret, hello, 20)
        rank.send(pack({"kind": "publish", "rollback": 0, "version": 0}))
        rank.send(pack({"kind": "want", "rollback": 0, "prompts": [{"number": 0, "step": 0}]}))
        rank.send(pack({"kind": "need", "rollback": 0, "step": 0, "numbers": [0], "first": 0}))
        generator.send(pack({"kind": "ready", "rollback": 0}))
        generator.recv()
        generator.send(pack({"kind": "answers", "rollback": 0, "version": 0, "answers": answers}))
        assert rank.poll(20_000)
        assert unpack(rank.recv())["completions"] == [[1, 2]]
        gate.close(is_end=True)
        broker.stop()
        rank.close()


def to_doctor(count, seed=0):
    """What another rank leaves in the store of an examination."""
    rng = random.Random(seed)

    class Store:
        def wait(self, keys, limit):
            pass

        def get(self, key):
            return hostile(rng, [{"at": ["127.0.0.1", 1]}])

    rendezvous = object.__new__(Rendezvous)
    rendezvous._store = Store()
    for _ in range(count):
        rendezvous.hear("at", 1, 1.0)


SOCKETS = (to_server, to_parameter_server, to_rank, to_watch, to_broker, to_gate, to_doctor)


@pytest.mark.parametrize("send", SOCKETS, ids=[one.__name__ for one in SOCKETS])
def test_what_is_no_message_ends_its_sender_alone(send):
    send(FEW)


def test_a_server_with_a_secret_hears_no_stranger():
    lines = to_server(FEW, secret="known")
    assert not [line for line in lines if "island 7" in line]


# ---- the reader ----


@pytest.mark.parametrize("content", [*RAW, b'{"a": "\\ud800"}', b'{"\\ud800": 1}', b'{"a": 18446744073709551616}'])
def test_what_is_no_message_is_refused(content):
    with suppress(KeyError):
        try:
            message = read_message(content.strip(b"\n"))
        except NotAMessageError:
            return
        # The reader takes any number; who takes it says which.
        with pytest.raises(NotAMessageError):
            message.integer("bytes") if "bytes" in message else message.number("a", least=3)


def test_a_message_is_as_long_and_as_deep_as_it_may_be():
    deep = b'{"a": ' + b"[" * 29 + b"]" * 29 + b"}"
    assert read_message(deep)
    with pytest.raises(NotAMessageError, match="deeper"):
        read_message(deep.replace(b"[", b"[[[").replace(b"]", b"]]]"))
    long = b'{"a": "' + b"x" * (MOST_BYTES - 9) + b'"}'
    assert len(read_message(long)["a"]) == MOST_BYTES - 9
    with pytest.raises(NotAMessageError, match="longer"):
        read_message(long.replace(b"x", b"xx", 1))


def test_values_are_taken_by_their_kinds():
    message = Message(a=1, b=1.5, c="x", d=True, e=[1], f={"1": 2})
    assert (message.integer("a"), message.number("a"), message.number("b"), message.text("c")) == (1, 1.0, 1.5, "x")
    assert (message.flag("d"), message.list("e"), message.mapping("f"), message.by_number("f")) == (
        True, [1], {"1": 2}, {1: 2},
    )  # fmt: skip
    assert message.integer("z", default=4) == 4
    wrong = (
        lambda: message.integer("b"), lambda: message.integer("d"), lambda: message.integer("a", most=0),
        lambda: message.number("d"), lambda: message.number("c"), lambda: message.text("a"),
        lambda: message.text("c", most=0), lambda: message.flag("a"), lambda: message.list("f"),
        lambda: message.mapping("e"), lambda: message.integer("z"), lambda: Message(a={"x": 1}).by_number("a"),
        *(lambda name=name: Message(a={name: 1}).by_number("a") for name in ("01", " 1", "1_0", "-1", "9" * 20)),
    )  # fmt: skip
    for take in wrong:
        with pytest.raises(NotAMessageError):
            take()


@pytest.mark.parametrize(("size", "most"), [(10, 9), (60_000, 4096), (200_000, 4096), (200_000, 199_999)])
def test_a_line_is_as_long_as_it_may_be(size, most):
    async def read(most_bytes):
        reader = asyncio.StreamReader(limit=2**16)
        reader.feed_data(b"x" * (size - 1) + b"\nmore\n")
        return await read_line(reader, most_bytes), await read_line(reader, most_bytes)

    assert asyncio.run(read(size)) == (b"x" * (size - 1) + b"\n", b"more\n")
    with pytest.raises(NotAMessageError, match="longer"):
        asyncio.run(read(most))


def test_a_refusal_may_have_any_key():
    assert RefusedError(**{"self": 1, "refused": "x", "key": SECRET}).answer["self"] == 1


def test_of_members_that_send_what_nobody_asked_for_a_rank_keeps_little():
    one = Transport("127.0.0.1", Codec.fp32)
    one.begin("known")
    host, _, port = one.address.removeprefix("tcp://").rpartition(":")
    made, _ = knock((host, int(port)), "known", {"address": at(1)}, {}, 20)
    content = bytes(1000)
    with pytest.raises(OSError):  # noqa: PT011  as the system has it
        for number in range(100_000):
            made.sendall(json.dumps({"rendezvous": number, "kind": "x", "sizes": [1000]}).encode() + b"\n" + content)
    assert sum(len(part) for contents in one._waiting.values() for part in contents) < 10_000
    with pytest.raises(AbortedError):
        one.receive(at(1), 99_999, "x", lambda: True)
    one.close()


if __name__ == "__main__":
    for one in SOCKETS:
        begin = time.monotonic()
        one(int(sys.argv[1]), seed=1)
        sys.stdout.write(f"{one.__name__}: {sys.argv[1]} messages in {time.monotonic() - begin:.0f} s, crashes 0\n")
