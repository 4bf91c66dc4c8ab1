"""Who takes part in a rendezvous, and what becomes of one where an island is lost."""

import socket
import threading
import time
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest

from hfdist.errors import ConfigError, PeerError
from hfdist.islands.member import Member
from hfdist.islands.membership import Connection, Island
from hfdist.islands.rendezvous_messages import Arrival, Participants
from hfdist.islands.server import IslandServer
from hfdist.islands.server_connection import ServerConnection
from hfdist.messages.message import Message, write_message
from tests.unit.islands.servers import JOB, member, served, together, until
from tests.unit.islands.servers import at as place


def arrive(*arrivals):
    """Let members arrive together; gives their rendezvous."""
    found = {}

    def one(place, who, arrival):
        answer = who.arrive(arrival)
        found[place] = None if answer is None else Participants.from_json(answer)

    threads = [threading.Thread(target=one, args=(place, *pair)) for place, pair in enumerate(arrivals)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return [found.get(place) for place in range(len(arrivals))]


def at(step, outer_step=0, digest="a", read=None):
    return Arrival(step=step, outer_step=outer_step, digest=digest, read=read)


def test_the_first_rendezvous_waits_for_all_and_the_next_exchange():
    with served() as (address, lines):
        one = member(address, 0)
        first = threading.Thread(target=lambda: one.arrive(at(0)))
        first.start()
        until(lambda: "1 of 2 islands are there" in lines)
        assert first.is_alive()
        two = member(address, 1)
        (start,) = arrive((two, at(0)))
        first.join(10)
        assert start.members == {}
        rendezvous = arrive((one, at(10, read="a")), (two, at(10, read="b")))
        assert [dict(participants.members) for participants in rendezvous] == [{0: [place(0)], 1: [place(1)]}] * 2
        assert (start.there, rendezvous[0].there) == ([0, 1], [0, 1])
        number, read = rendezvous[0].number, {0: "a", 1: "b"}
        assert together(lambda: one.finish(number, is_ok=True), lambda: two.finish(number, is_ok=True)) == [read, read]
        one.leave()
        two.leave()


def test_addresses_are_told_once_and_rendezvous_to_the_first_rank_alone(monkeypatch):
    told, send = [], Connection.send

    def noting(self, message, payload=b""):
        told.append((self, message.keys() - {"beat"}))
        send(self, message, payload)

    monkeypatch.setattr(Connection, "send", noting)
    with served() as (address, _lines):
        members = [member(address, island, rank=rank, ranks=2) for island in range(2) for rank in range(2)]
        for step in (10, 20):
            rendezvous = arrive((members[0], at(step)), (members[2], at(step)))
            assert rendezvous[0].members == {0: [place(0), place(0, 1)], 1: [place(1), place(1, 1)]}
            number = rendezvous[0].number
            together(*(partial(one.finish, number, is_ok=True) for one in (members[0], members[2])))
        for one in members:
            one.close()
    assert sum("addresses" in keys for _, keys in told) == 2
    assert len({id(connection) for connection, keys in told if keys & {"round", "commit", "addresses"}}) == 2


def test_who_has_other_outer_weights_gets_the_state_of_a_member():
    with served(least=1) as (address, _lines):
        old, new, late = member(address, 0), member(address, 1), member(address, 2)
        rendezvous = arrive((old, at(20, 10, "b")), (new, at(20, 10, "b")), (late, at(0)))
        assert dict(rendezvous[2].members) == {0: [place(0)], 1: [place(1)]}
        assert dict(rendezvous[2].sources) == {2: (0, [place(2)])}
        number = rendezvous[0].number
        read = {0: None, 1: None}
        assert together(lambda: old.finish(number, is_ok=True), lambda: new.finish(number, is_ok=True)) == [read, read]
        # Before the state has come no other rendezvous begins.
        next_one = threading.Thread(target=lambda: arrive((old, at(30, 20, "c")), (new, at(30, 20, "c"))))
        next_one.start()
        time.sleep(0.2)
        assert next_one.is_alive()
        late.tell_done(number, is_ok=True)
        assert arrive((late, at(30, 20, "c")))[0].sources == {}
        next_one.join(10)
        for one in (old, new, late):
            one.leave()


def test_who_starts_again_in_the_middle_of_a_round_has_its_own_share_of_the_data():
    with served(least=3) as (address, _lines):
        members = [member(address, island) for island in range(3)]
        starts = arrive(*((one, at(0)) for one in members))
        assert [start.there for start in starts] == [[0, 1, 2]] * 3
        members[2].leave()
        back, late = member(address, 2, start="2"), member(address, 3)
        waiting = [threading.Thread(target=one.arrive, args=(at(10),)) for one in members[:2]]
        # It has the weights of this round, and its share has others' data already.
        waiting.append(threading.Thread(target=late.arrive, args=(at(0),)))
        for thread in waiting:
            thread.start()
        (start,) = arrive((back, at(0)))
        assert (start.there, start.members) == ([0, 1, 2], {})
        assert all(thread.is_alive() for thread in waiting)
        (end,) = arrive((back, at(10)))
        assert sorted(end.members) == [0, 1, 2]
        assert list(end.sources) == [3]
        for thread in waiting:
            thread.join(10)
        for one in (*members[:2], back, late):
            one.leave()


def test_whoever_is_sent_much_is_no_burden_for_beats():
    told = []
    transport = SimpleNamespace(get_write_buffer_size=lambda: 2**23, abort=lambda: told.append("aborted"))
    writer = SimpleNamespace(transport=transport, write=told.append)
    server, island = IslandServer(None), Island(0, "1", addresses=["a"])
    island.connections[0] = Connection(writer, time.monotonic())
    server._islands[0] = island
    server._beat()
    assert told == []
    transport.get_write_buffer_size = lambda: 0
    server._beat()
    assert len(told) == 1
    assert b"beat" in told[0]


def test_the_other_ranks_of_an_island_may_come_long_before_its_first(monkeypatch):
    """The server loads torch for the first one of all."""
    monkeypatch.setattr("hfdist.islands.server._COMPLETE_SECONDS", 2.5)
    with served(least=1, silent_seconds=2.5) as (address, lines):
        other, astray = member(address, 0, rank=1), member(address, 1, rank=1)
        time.sleep(1.5)
        first = member(address, 0, ranks=2)
        until(lambda: "island 0 is there, with 2 ranks" in lines)
        until(lambda: "island 1 has left: not all of its ranks have come" in lines)
        assert not other._connection.is_broken.is_set()
        for one in (first, other, astray):
            one.close()


def test_a_lost_member_aborts_an_exchange_and_the_rest_exchange_anew():
    with served(least=1) as (address, _lines):
        members = [member(address, island) for island in range(3)]
        first = arrive(*((one, at(10)) for one in members))
        number = first[0].number
        members[2].close()
        assert together(*(lambda one=one: one.finish(number, is_ok=True) for one in members[:2])) == [None, None]
        until(lambda: members[0].is_aborted(number))
        again = arrive(*((one, at(10)) for one in members[:2]))
        assert sorted(again[0].members) == [0, 1]
        assert again[0].number > number
        # One that could not exchange does the same.
        number = again[0].number
        ends = together(lambda: members[0].finish(number, is_ok=True), lambda: members[1].finish(number, is_ok=False))
        assert ends == [None, None]
        for one in members[:2]:
            one.leave()


def test_an_island_is_lost_with_any_of_its_ranks():
    with served(least=1) as (address, _lines):
        first, second = member(address, 0, ranks=2), member(address, 0, rank=1)
        other = member(address, 1)
        rendezvous = arrive((first, at(10)), (other, at(10)))
        second.close()
        assert other.finish(rendezvous[1].number, is_ok=True) is None
        until(lambda: first.is_aborted(rendezvous[0].number))
        # Both ranks come back, and it is there again.
        first.connect()
        second.connect()
        assert sorted(arrive((first, at(10)), (other, at(10)))[0].members) == [0, 1]
        for one in (first, other):
            one.leave()
        second.close()


def test_who_does_not_beat_is_lost(monkeypatch):
    with served(least=1, silent_seconds=1.5) as (address, lines):
        one, two = member(address, 0), member(address, 1)
        monkeypatch.setattr(two._connection, "send", lambda message: None)
        (rendezvous,) = arrive((one, at(10)))
        assert sorted(rendezvous.members) == [0]
        assert any("island 1 has left: rank 0 is silent" in line for line in lines)
        two.close()
        one.leave()


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"job": JOB | {"islands.every": 20}}, "islands.every"),
        ({"island": 0, "start": "2"}, "islands.index"),
        ({"secret": "wrong"}, "HFDIST_ISLANDS_SECRET"),
    ],
)
def test_what_does_not_fit_is_refused(change, where):
    with served(secret="known") as (address, _lines):
        one = member(address, 0, secret="known")
        with pytest.raises(ConfigError) as error:
            member(address, **({"island": 1, "secret": "known", "seconds": 0.3} | change))
        assert error.value.where == where
        one.leave()


def test_an_island_that_starts_anew_waits_until_its_old_start_is_lost():
    with served(least=1, silent_seconds=2) as (address, lines):
        old = member(address, 0, start="1")
        until(lambda: lines)
        # As where its machine has lost its power.
        old._connection.is_broken.set()
        new = member(address, 0, start="2", seconds=10)
        assert any("silent" in line for line in lines)
        new.leave()
        old.close()


def test_a_server_that_does_not_answer_is_named():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(PeerError) as error:
        member(f"127.0.0.1:{port}", 0, seconds=0.3)
    assert error.value.where == "islands.address"
    assert str(port) in str(error.value)


@contextmanager
def says_at_once(*lines):
    """The address of what says all of this to the first that connects, and then nothing."""
    ended = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def speak():
        with listener, listener.accept()[0] as connection:
            connection.sendall(b"".join(map(write_message, lines)))
            ended.wait(10)

    thread = threading.Thread(target=speak)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        ended.set()
        thread.join()


def test_what_comes_with_the_welcome_is_heard():
    """A job may wait for a shard: the server says what to do as soon as the shard is there."""
    with says_at_once({"welcome": ""}, {"do": {"job": {}}}) as address:
        one = member(address, 0)
        time.sleep(0.1)
        assert one.wait_for("do") == {"do": {"job": {}}}
        one.close()


def test_more_than_memory_holds_ends_a_connection():
    with says_at_once({"welcome": ""}, {"weights": 1, "bytes": 2**53}) as address:
        host, port = address.split(":")
        one = ServerConnection((host, int(port)), "", {}, {}, 2.0, threading.Event())
        assert one.is_broken.wait(5)
        one.close()


def test_what_no_rank_would_send_ends_a_connection_and_nothing_else():
    with served(least=1) as (address, _lines):
        host, port = address.split(":")
        for content in (b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'{"island": 0}\n', b"\xff\xfe\n", b"1" * 2**23):
            with socket.create_connection((host, int(port))) as stranger:
                stranger.settimeout(5)
                try:
                    stranger.sendall(content)
                    stranger.shutdown(socket.SHUT_WR)
                    assert stranger.recv(100) == b""
                except ConnectionError:
                    pass
        one = member(address, 0)
        assert sorted(arrive((one, at(10)))[0].members) == [0]
        one.leave()


def test_once_all_have_left_exchanges_have_another_mark():
    """They are counted anew, and a message of an earlier one must not pass for one of a later one."""
    with served(least=1) as (address, lines):
        first, second = member(address, 0), member(address, 1)
        assert first.nonce == second.nonce
        first.leave()
        until(lambda: any("island 0" in line and "ended" in line for line in lines))
        back = member(address, 0, start="2")
        assert back.nonce == second.nonce
        back.leave()
        second.leave()
        until(lambda: sum("ended" in line for line in lines) == 3)
        last = member(address, 0, start="3")
        assert last.nonce != second.nonce
        last.leave()


def test_a_rank_that_comes_before_its_first_does_not_keep_a_job_that_has_ended():
    with served(least=1) as (address, lines):
        before, early = member(address, 0), member(address, 1, rank=1, ranks=2)
        before.leave()
        until(early._connection.is_broken.is_set)
        early.connect()
        first = member(address, 1, ranks=2, job=JOB | {"islands.count": 3})
        assert first.nonce == early.nonce != before.nonce
        until(lambda: "island 1 is there, with 2 ranks" in lines)
        first.leave()
        early.close()


@pytest.mark.parametrize(
    "answer",
    [
        {"members": {"0": ["tcp://a:1"]}},
        {"members": [0, 5]},
        {"weights": [1.0]},
        {"round": None},
    ],
)
def test_an_answer_of_another_version_is_said(answer):
    told = {"round": 1, "members": [0], "weights": {"0": 1.0}, "resting": [], "there": [0], "sources": {}}
    one = Member("localhost:1", "", {}, {}, 1.0)
    one._connection = SimpleNamespace(
        addresses={0: ["tcp://a:1"]}, send=lambda *sent: None, wait_for=lambda key, number: Message(told | answer)
    )
    with pytest.raises(PeerError, match="another version of hfdist"):
        one.arrive(at(0))
