"""What is under way when a rank ends arrives."""

import asyncio
from types import SimpleNamespace

from hfdist.config.islands import Codec
from hfdist.islands import transport
from hfdist.islands.rounds import Rounds
from hfdist.islands.transport import Transport


def test_what_is_under_way_arrives_as_long_as_it_gets_on(monkeypatch):
    read_bytes = transport.read_bytes

    async def read_slowly(reader, num_bytes, heard):
        parts = []
        for _ in range(16):
            await asyncio.sleep(0.1)
            parts.append(await read_bytes(reader, num_bytes // 16, heard))
        return b"".join(parts)

    monkeypatch.setattr(transport, "read_bytes", read_slowly)
    monkeypatch.setattr(transport, "_LINGER_SECONDS", 0.8)
    one, two = (Transport("127.0.0.1", Codec.fp32) for _ in range(2))
    for each in (one, two):
        each.begin("known")
    content = bytes(2**25)
    one.send(two.address, 1, "state", content)
    one.close()
    # At once: who has ended says so to the server, which then counts no more on what is on its way.
    assert two._waiting == {(1, "state", one.address): [content]}
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
