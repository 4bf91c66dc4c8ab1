"""What is under way when a rank ends arrives."""

import asyncio
import socket
from types import SimpleNamespace

import pytest

from hfdist.collectives import rank
from hfdist.config.islands import Codec, IslandsConfig
from hfdist.errors import ConfigError
from hfdist.islands import transport
from hfdist.islands.open_transport import open_transport
from hfdist.islands.outer import OuterOptimizer
from hfdist.islands.rounds import Rounds
from hfdist.islands.transport import Transport
from hfdist.launch import address
from hfdist.testing import run_ranks
from tests.unit.checkpoint.pieces import small_pieces


def test_all_ranks_hear_of_one_that_finds_no_way_to_the_server():
    def meet():
        config = IslandsConfig(address=("localhost:1", "a..b:1")[rank()], timeout_seconds=1.0)
        pieces = small_pieces()
        with pytest.raises(ConfigError) as error:
            Rounds(config, {}, OuterOptimizer(lambda: pieces, config), lambda: pieces, None)
        return error.value.where

    assert run_ranks(meet, 2, timeout_seconds=30) == ["islands.address"] * 2


def test_what_is_under_way_arrives_as_long_as_it_gets_on(monkeypatch):
    read_bytes, listen = transport.read_bytes, transport.listen

    async def read_slowly(reader, num_bytes, heard):
        parts = []
        for _ in range(32):
            await asyncio.sleep(0.1)
            parts.append(await read_bytes(reader, num_bytes // 32, heard))
        return b"".join(parts)

    def listen_narrowly(*arguments, **options):
        listener = listen(*arguments, **options)
        # Else the kernel takes all at once for the other side, and nothing is seen to get on.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**18)
        return listener

    monkeypatch.setattr(transport, "read_bytes", read_slowly)
    monkeypatch.setattr(transport, "listen", listen_narrowly)
    monkeypatch.setattr(transport, "_LINGER_SECONDS", 1.5)
    one, two = (Transport("127.0.0.1", Codec.fp32) for _ in range(2))
    for each in (one, two):
        each.begin("known")
    # No more: a loaded machine takes seconds to copy much.
    content = bytes(2**22)
    one.send(two.address, 1, "state", content)
    one.close()
    # At once: who has ended says so to the server, which then counts no more on what is on its way.
    assert two._waiting == {(1, "state", one.address): [content]}
    two.close()


def test_who_drops_what_comes_again_and_again_is_given_up(monkeypatch):
    read_bytes = transport.read_bytes

    async def drop(reader, num_bytes, heard):
        await read_bytes(reader, num_bytes // 4, heard)
        raise ConnectionError

    monkeypatch.setattr(transport, "read_bytes", drop)
    monkeypatch.setattr(transport, "_LINGER_SECONDS", 1.0)
    one, two = (Transport("127.0.0.1", Codec.fp32) for _ in range(2))
    for each in (one, two):
        each.begin("known")
    one.send(two.address, 1, "state", bytes(2**25))
    # Else it waits for ever, since each try sends bytes.
    one.close()
    assert not two._waiting
    two.close()


def test_an_island_says_bye_once_what_it_has_given_is_there():
    done = []

    def noting(*names):
        return SimpleNamespace(**{name: lambda name=name: done.append(name) for name in names})

    rounds = Rounds.__new__(Rounds)
    rounds._exchange, rounds._sender = None, noting("shutdown")
    rounds._transport = SimpleNamespace(close=lambda: done.append("given"))
    rounds._member = noting("leave", "close")
    rounds.leave()
    assert done[:2] == ["given", "leave"]


def test_a_rank_hears_others_at_the_port_of_its_place_on_the_machine(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = IslandsConfig(port=port - 1, timeout_seconds=0.2)
        with pytest.raises(ConfigError, match=f"port {port}: ") as error:
            open_transport(config, "127.0.0.1", 2**20)
        assert error.value.where == "islands.port"
        # What has it for a moment is waited for.
        monkeypatch.setattr(address.time, "sleep", lambda seconds: taken.close())
        opened = open_transport(IslandsConfig(port=port - 1, timeout_seconds=60), "127.0.0.1", 2**20)
    assert opened.address == f"tcp://127.0.0.1:{port}"
    opened.close()
