"""A parameter server in shards does what one alone does, bit for bit, whatever comes or goes between two shards."""

import asyncio
import math
import re
import socket
from collections import Counter
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from hfdist.config.islands import CUT_ELEMENTS, IslandMethod, IslandsConfig
from hfdist.config.optimizer import OptimizerConfig, Schedule
from hfdist.config.plain_values import plain
from hfdist.errors import ConfigError, PeerError
from hfdist.islands import server, server_connection, shard_process
from hfdist.islands.membership import Connection
from hfdist.islands.parameter_shard import ParameterShard
from hfdist.islands.shard_members import ShardMembers
from hfdist.islands.shard_process import ShardProcess
from hfdist.messages.door import knock
from hfdist.messages.message import Message, write_message
from hfdist.planning.island_traffic import island_traffic
from tests.unit.islands.servers import in_thread, member, served, together, until
from tests.unit.islands.test_parameter_server import job

ADAM = plain(OptimizerConfig(fused=False, lr=0.5, schedule=Schedule.constant))
TENSORS = {"a": 700, "b": 300, "c": 200}
PLACES = {"a": ["t", [1000, 1], 0], "b": ["t", [1000, 1], 700], "c": ["c", [200, 1], 0]}
"""Tensor, shape and start of each: `a` and `b` are parts of one tensor, which two shards share."""
PARTS = {1: ["abc"], 2: ["a", "bc"], 3: ["a", "b", "c"]}
"""What each shard has, by the number of shards."""


def numbers(seed):
    """Values of each tensor."""
    random = np.random.default_rng(seed)
    return {name: random.normal(size=size).astype(np.float32) for name, size in TENSORS.items()}


START = numbers(0)


@contextmanager
def sharded(number, **options):
    """The address of a server with further shards, its lines, and functions that end one of these."""
    with served(**options) as (address, lines), ExitStack() as stack:
        ends = [stack.enter_context(shard_of(address, options.get("secret", ""))) for _ in range(number - 1)]
        until(lambda: sum("a shard is there" in line for line in lines) == number - 1)
        yield address, lines, ends


@contextmanager
def shard_of(address, secret=""):
    """A shard in a thread; gives a function that ends it."""
    listener = socket.create_server(("127.0.0.1", 0))
    own = f"127.0.0.1:{listener.getsockname()[1]}"
    with ExitStack() as stack:
        stack.enter_context(in_thread(lambda: ShardProcess(listener, own, server=address, secret=secret, say=print)))
        yield stack.close


class Island:
    """An island of one rank, at a server of some shards."""

    def __init__(self, address, index, shards, *, start="1", secret="", staleness=0):
        self.parts = PARTS[shards]
        keys = {"optimizer": ADAM, "train.max_grad_norm": 0.5, "islands.server_shards": shards}
        given = job(staleness, **keys)
        self.first = member(address, index, job=given, start=start, secret=secret, seconds=60.0)
        self.members = ShardMembers(self.first)
        self.step = 0

    def begin(self):
        self.members.connect()
        segments = [[[*PLACES[name], 0, 0, TENSORS[name]] for name in part] for part in self.parts]
        first, *others = [{"segments": own} for own in segments]
        first |= {"step": 0, "updates": 0, "state": {}, "may_begin": True}
        zeros = [np.zeros(sum(TENSORS[name] for name in part), np.float32) for part in self.parts]
        contents = [
            b"".join([*(START[name].tobytes() for name in part), zero.tobytes(), zero.tobytes()])
            for part, zero in zip(self.parts, zeros, strict=True)
        ]
        return self.weights(self.members.ask([first, *others], contents))

    def messages(self, targets):
        return [{"push": self.step, "targets": targets, "state": {}}, *[{"push": 1}] * (len(self.parts) - 1)]

    def push(self, gradients, targets=1.0):
        self.step += 1
        contents = [b"".join(gradients[name].tobytes() for name in part) for part in self.parts]
        return self.weights(self.members.ask(self.messages(targets), contents))

    def pull(self):
        return self.weights(self.members.ask([{"pull": 1}], [b""]))

    def weights(self, answers):
        """What was answered, by tensor: of shape [weights, or weights and slots, elements]."""
        assert answers is not None
        found = {}
        for part, answer in zip(self.parts, answers, strict=True):
            sizes = [TENSORS[name] for name in part]
            values = np.frombuffer(answer["payload"], np.float32).reshape(-1, sum(sizes))
            found |= zip(part, np.split(values, np.cumsum(sizes)[:-1], axis=1), strict=True)
        return found


def same(found, wanted):
    return found.keys() == wanted.keys() and all(np.array_equal(found[name], wanted[name]) for name in wanted)


def begin_both(address, shards, **more):
    islands = [Island(address, index, shards, **more) for index in range(2)]
    for found in together(*(island.begin for island in islands)):
        assert all(np.array_equal(found[name][0], START[name]) for name in TENSORS)
    return islands


def bad_in(name):
    """Gradients that are not finite in one tensor alone."""
    found = numbers(9)
    found[name][-1] = math.nan
    return found


def train(shards, secret):
    """What two islands get in six steps, of which two have numbers that are not finite."""
    with sharded(shards, secret=secret) as (address, lines, _):
        one, two = begin_both(address, shards, secret=secret)
        found = []
        for step in range(1, 5):
            given = bad_in("c") if step == 2 else bad_in("a") if step == 3 else numbers(step)
            found += together(lambda given=given: one.push(given, 3.0), lambda step=step: two.push(numbers(20 + step)))
        found.append(one.pull())
        assert len([line for line in lines if line.startswith("island 0 is left out of a step")]) == 2
        assert not [line for line in lines if "Traceback" in line]
        for island in (one, two):
            island.members.leave()
    return found


def test_three_shards_step_as_one_server():
    """Clipped by the norm of all, and without an island of which a part is not finite, bit for bit."""
    of_one, of_three = train(1, ""), train(3, "what all islands know")
    assert len(of_one) == len(of_three) == 9
    assert all(same(found, wanted) for found, wanted in zip(of_three, of_one, strict=True))
    # What Adam keeps of the squares says that gradients were clipped.
    assert 0 < math.sqrt(sum(value[2].sum() for value in of_one[-1].values())) < 0.5


def test_a_large_tensor_is_no_larger_share_than_its_parts():
    config = IslandsConfig(method=IslandMethod.parameter_server, count=2, server_shards=4)
    plan = island_traffic(config, 10 * CUT_ELEMENTS, largest=6 * CUT_ELEMENTS)
    assert plan.server_taken_bytes == 2 * 4 * 10 * CUT_ELEMENTS / 4


def train_asynchronously(shards):
    """What two islands get whose every push is a step; one pulls while the other pushes."""
    with sharded(shards) as (address, _lines, _ends):
        one, two = begin_both(address, shards, staleness=None)
        found = [one.push(numbers(1)), two.pull(), one.push(numbers(2)), two.push(numbers(3)), one.pull()]
        pulls, _ = together(lambda: [one.pull() for _ in range(20)], lambda: [two.push(numbers(n)) for n in range(5)])
        assert len(pulls) == 20
        found.append(one.pull())
        for island in (one, two):
            island.members.leave()
    return found


def test_asynchronous_islands_get_one_version_of_all_shards():
    """Else `ask` would give nothing: it compares the numbers of steps."""
    of_one, of_three = train_asynchronously(1), train_asynchronously(3)
    assert all(same(found, wanted) for found, wanted in zip(of_three, of_one, strict=True))


def test_who_dies_between_its_pushes_is_left_out_on_all_shards():
    with sharded(3) as (address, lines, _):
        one, two = begin_both(address, 3)
        two.step += 1
        two.first.send(two.messages(1.0)[0], numbers(5)["a"].tobytes())
        two.members._others[1].send({"push": 1}, numbers(5)["c"].tobytes())
        two.first.close()
        found = one.push(numbers(1))
        back = Island(address, 1, 3, start="2")
        assert same({name: value[:1] for name, value in back.begin().items()}, found)
        one.members.leave()
        back.members.leave()
        assert not [line for line in lines if "Traceback" in line]
    with served(least=1) as (address, _):
        alone = Island(address, 0, 1)
        alone.begin()
        assert same(alone.push(numbers(1)), found)
        alone.members.leave()


def test_an_island_whose_connection_to_a_shard_ends_comes_back(monkeypatch):
    """It beats no more, so that its server lets it go."""
    # Ten times in what is silence: a machine may be busy.
    for module in (server_connection, server, shard_process):
        monkeypatch.setattr(module, "BEAT_SECONDS", 0.2)
    with sharded(2, silent_seconds=2.0) as (address, lines, _):
        one, two = begin_both(address, 2)
        one.members._others[0]._connection._socket.shutdown(socket.SHUT_RDWR)
        until(one.first._connection.is_broken.is_set)
        assert same(one.begin(), two.pull())
        assert any("island 0 has left: rank 0 is silent" in line for line in lines)
        for island in (one, two):
            island.members.leave()


def test_a_shard_that_ends_ends_all_islands_and_another_job_begins_without_it():
    with sharded(2) as (address, lines, (end,)):
        one, two = begin_both(address, 2)
        end()
        for notice in (one.members.connect, two.members.hear_why):
            with pytest.raises(PeerError, match="has ended this island") as error:
                notice()
            assert re.fullmatch(r"shard 2 of the server, at 127.0.0.1:\d+, has ended", error.value.found)
        with pytest.raises(ConfigError) as refused:
            member(address, 0, job=job(0, **{"islands.server_shards": 2}), seconds=2.0)
        assert "the server has 1 of the shards" in str(refused.value)
        assert "hfdist serve of=HOST:29600" in str(refused.value)
        with shard_of(address):
            # It comes while this one waits, and serves a second job after the first.
            for start in ("2", "3"):
                for island in begin_both(address, 2, start=start):
                    island.members.leave()
        assert not [line for line in lines if "Traceback" in line]


@pytest.mark.parametrize(
    ("message", "content", "why"),
    [
        ({"push": 1}, b"123", "not a message: 3 bytes follow, and 1200 should"),
        ({"pull": 1}, b"", "not a message: no rank says that here"),
        ({"segments": [["b", [300], 0, 0, 0, 2**40]]}, b"1234", "not a message: 4 bytes follow"),
    ],
)
def test_what_no_rank_sends_to_a_shard_ends_its_island(message, content, why):
    with sharded(3) as (address, lines, _):
        one, two = begin_both(address, 3)
        host, port = one.first.welcome["shards"][1].split(":")
        hello = {"rank": 1}, {"ticket": one.first.welcome["ticket"]}
        _, answers = knock((host, int(port)), "", *hello, 10.0)
        # Before it is let in, nothing of it could be closed.
        assert b"welcome" in answers.readline()
        one.members._others[0].send(message, content)
        with pytest.raises(PeerError) as error:
            one.members.connect()
        assert why in error.value.found
        assert two.push(numbers(1)).keys() == TENSORS.keys()
        # No shard keeps what is of the island.
        until(lambda: not answers.readline())
        two.members.leave()
        assert not [line for line in lines if "Traceback" in line]


@pytest.mark.parametrize("shards", [1, 3])
def test_what_travels_is_what_a_plan_says(shards, monkeypatch):
    counted = Counter()

    def count(kind, name):
        original = getattr(kind, name)

        async def read(reader, num_bytes, heard):
            counted[kind.__name__, "takes"] += num_bytes
            return await original(reader, num_bytes, heard)

        monkeypatch.setattr(kind, name, read)

    send = Connection.send

    def counting_send(connection, message, payload=b""):
        counted[connection.writer.get_extra_info("sockname")[1]] += len(payload)
        counted["asked"] += "do" in message and "drop" not in message["do"]
        send(connection, message, payload)

    with sharded(shards) as (address, _, _ends):
        islands = begin_both(address, shards)
        for kind in (server, shard_process):
            count(kind, "read_bytes")
        monkeypatch.setattr(Connection, "send", counting_send)
        together(*(lambda one=one: one.push(numbers(1)) for one in islands))
        for island in islands:
            island.members.leave()
    config = IslandsConfig(method=IslandMethod.parameter_server, count=2, server_shards=shards)
    plan = island_traffic(config, sum(TENSORS.values()), largest=max(TENSORS.values()))
    # Each other shard is asked what it has taken, and told to step.
    assert counted["asked"] == 2 * (shards - 1)
    # The server has the largest tensor.
    assert counted["hfdist.islands.server", "takes"] == plan.server_taken_bytes
    assert counted[int(address.split(":")[1])] == plan.server_sent_bytes
    others = 8 * sum(TENSORS.values()) - plan.server_taken_bytes
    assert counted["hfdist.islands.shard_process", "takes"] == others
    assert sum(sent for place, sent in counted.items() if type(place) is int) == 8 * sum(TENSORS.values())


def test_a_shard_asks_for_the_secret_of_its_server():
    with sharded(2, secret="known", least=1) as (address, _, _ends):
        island = Island(address, 0, 2, secret="known")
        (shard,) = island.first.welcome["shards"]
        host, port = shard.split(":")
        island.begin()
        for secret in ("", "another"):
            with pytest.raises(ConfigError, match="secret"):
                member(shard, 0, secret=secret, seconds=2.0)
        _, answers = knock((host, int(port)), "known", {"rank": 0}, {"ticket": "none of any island"}, 5.0)
        assert b"welcome" in answers.readline()
        island.members.leave()


def test_what_a_rank_still_says_once_the_job_has_ended_is_not_reported():
    """The connection to the server is closed by then."""

    async def hear():
        process = ShardProcess(socket.socket(), "127.0.0.1:1", server="127.0.0.1:1", say=print)
        process._shard = ParameterShard(Message(job(0)), lambda *_: None)
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        heard = asyncio.create_task(process._hear(Message({"ticket": "1", "rank": 0}), reader, writer))
        theirs.sendall(write_message({"segments": [["a", [1], 0, 0, 0, 1]]}, 4))
        theirs.setblocking(False)
        assert b"welcome" in await asyncio.get_running_loop().sock_recv(theirs, 100)
        process._shard = None
        theirs.sendall(bytes(4))
        theirs.close()
        await heard

    asyncio.run(hear())
