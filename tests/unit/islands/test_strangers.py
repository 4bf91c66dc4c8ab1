"""What one who does not know the secret learns of a server of islands, and what it can do there."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from hfdist.errors import ConfigError
from hfdist.islands.command import reached_at
from hfdist.messages.door import HELLO_SECONDS, MOST_STRANGERS, SECRET, knock
from tests.unit.islands.servers import JOB, at, member, served

KNOWN = "what all islands know"
SERVER_JOB = {
    "islands.method": "parameter_server",
    "islands.count": 1,
    "islands.codec": "fp32",
    "islands.staleness": 0,
    "train.max_grad_norm": 1.0,
}


def said_to(address, line, seconds=5):
    """All that the server says to one who sends a line."""
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), seconds) as stranger:
        stranger.sendall(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n")
        stranger.shutdown(socket.SHUT_WR)
        found = b""
        while more := stranger.recv(65536):
            found += more
        return found.decode()


def hello(job, island=5, **more):
    return {"island": island, "rank": 0, "start": "x", "job": job, "addresses": [at(1)], **more}


def test_who_does_not_know_the_secret_learns_nothing_and_holds_nobody(monkeypatch):
    monkeypatch.setenv("CANARY", "canary-in-the-environment")
    doubling = {"a0": "x"} | {f"a{i}": f"${{.a{i - 1}}}${{.a{i - 1}}}" for i in range(1, 40)}
    optimizers = ({"plugin": "${oc.env:CANARY}"}, {"name": "adamw", "arguments": doubling})
    with served(secret=KNOWN, least=1) as (address, lines):
        one = member(address, 0, secret=KNOWN, job=JOB | {"train.max_steps": 4321})
        for optimizer in optimizers:
            for more in ({}, {"secret": "wrong"}, {"nonce": "1" * 32}, {"nonce": 1}, {"proof": "0" * 64}):
                found = said_to(address, hello(SERVER_JOB | {"optimizer": optimizer}, **more))
                assert "canary" not in found
                assert "4321" not in found
        found = said_to(address, b"x" * 100_000)
        assert "4321" not in found
        begin = time.monotonic()
        other = member(address, 1, secret=KNOWN, job=JOB | {"train.max_steps": 4321})
        assert time.monotonic() - begin < 2
        assert not any("island 5" in line for line in lines)
        other.leave()
        one.leave()


def test_nothing_that_an_island_says_is_interpolated(monkeypatch):
    """Of one that knows the secret, too."""
    monkeypatch.setenv("CANARY", "canary-in-the-environment")
    with served() as (address, _lines):
        for optimizer in ({"plugin": "${oc.env:CANARY}"}, {"name": "${oc.env:CANARY}"}, {"arguments": {"a": "${.a}"}}):
            found = said_to(address, hello(SERVER_JOB | {"optimizer": optimizer}), seconds=120)
            assert "canary" not in found
            assert "refused" in found


def test_the_secret_does_not_travel_and_a_server_that_does_not_know_it_is_left():
    heard, answers = [], [b'{"challenge": "1", "proof": "2"}\n', b'{"welcome": "1"}\n', b"no message\n"]

    def listen():
        for answer in answers:
            other, _ = listener.accept()
            with other:
                heard.append(other.recv(65536))
                other.sendall(answer)
                while more := other.recv(65536):
                    heard.append(more)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=listen)
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ConfigError, match="does not know the secret"):
            member(address, 0, secret=KNOWN, job=JOB)
        for _ in answers[1:]:
            with pytest.raises(Exception, match="not a message"):
                knock(("127.0.0.1", listener.getsockname()[1]), KNOWN, {}, {}, 5.0)
        thread.join()
    said = b"".join(heard).decode()
    assert KNOWN not in said
    # The job is for who has proven to know it.
    assert "islands.every" not in said


@pytest.mark.parametrize(("of_server", "own"), [(KNOWN, ""), ("", KNOWN), (KNOWN, "another")])
def test_who_has_another_secret_is_told_which_variable_has_it(of_server, own):
    with served(secret=of_server) as (address, _), pytest.raises(ConfigError) as error:
        member(address, 0, secret=own)
    assert error.value.where == SECRET


def test_a_refusal_tells_values_of_others_only_to_who_has_proven_to_know_a_secret():
    for secret in ("", KNOWN):
        with served(secret=secret) as (address, lines):
            one = member(address, 0, secret=secret)
            with pytest.raises(ConfigError) as error:
                member(address, 1, secret=secret, job=JOB | {"islands.every": 20})
            assert error.value.where == "islands.every"
            assert error.value.allowed == ("10" if secret else None)
            assert "island 1 is refused: islands.every is 20, and 10 on island 0" in lines
            one.leave()


BAD = ("garbage", "", "http://a", "tcp://", "tcp://x", "tcp://127.0.0.1:99999", "tcp://h:0", "ipc:///x", "tcp://[::1:5",
       "inproc://x", "udp://127.0.0.1:1", "tcp://a b:1", "tcp://h:1;tcp://h:2", 7, None, ["tcp://h:1"])  # fmt: skip


def test_an_address_that_is_none_is_refused():
    with served(least=1) as (address, _):
        for number, bad in enumerate(BAD):
            assert "refused" in said_to(address, hello(JOB, number) | {"addresses": [bad]}), bad
        for bad in ([], "tcp://h:1", {}, None):
            assert "welcome" not in said_to(address, hello(JOB) | {"addresses": bad})
        for good in (["tcp://127.0.0.1:7000", "tcp://node-1:7001"], ["tcp://[::1]:7000"]):
            assert "welcome" in said_to(address, hello(JOB, 99) | {"addresses": good})


def test_who_says_nothing_makes_room_for_others(monkeypatch):
    monkeypatch.setattr("hfdist.messages.door.HELLO_SECONDS", 0.5)
    with served(least=1, secret=KNOWN) as (address, _):
        host, port = address.split(":")
        idle = [socket.create_connection((host, int(port))) for _ in range(MOST_STRANGERS + 50)]
        try:
            member(address, 0, secret=KNOWN).leave()
            for one in idle:
                one.settimeout(HELLO_SECONDS)
                with suppress(ConnectionError):
                    assert one.recv(1) == b""
        finally:
            for one in idle:
                one.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "10.0.0.1", "::1"])
def test_a_server_says_the_address_at_which_it_listens(host):
    assert reached_at(host) == host
    assert {reached_at(every) for every in ("", "0.0.0.0", "::")} == {socket.gethostname()}


def test_a_server_without_a_secret_is_for_this_machine_and_says_so(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = tmp_path / "log"
    without = {name: value for name, value in os.environ.items() if name != SECRET}
    with log.open("wb") as out:
        server = subprocess.Popen(
            [sys.executable, "-m", "hfdist", "serve", f"port={port}"], stdout=out, stderr=out, env=without
        )
    try:
        deadline = time.monotonic() + 60
        while "anybody may join" not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        assert f"islands.address=127.0.0.1:{port}" in log.read_text()
        rows = [line.split() for table in ("tcp", "tcp6") for line in Path("/proc/net", table).read_text().splitlines()]
        listening = [row[1].split(":") for row in rows if row[3] == "0A"]
        where = [own for own, at_port in listening if int(at_port, 16) == port]
        assert where == ["0100007F"]
        server.send_signal(signal.SIGTERM)
        assert server.wait(10) == 0
    finally:
        server.kill()
        server.wait()
