"""The page over real HTTP on the loopback interface: events follow what is added, and strangers are refused."""

import http.client
import json
import socket
import threading
import time
from contextlib import contextmanager

import pytest

from hfdist.errors import ConfigError
from hfdist.tools.report.command import parse_request
from hfdist.tools.report.live import LivePage, Server
from hfdist.tools.report.reading.run_files import RunFiles
from tests.unit.report.folders import rank_line, training_line, write_run
from tests.unit.report.test_sweep import TRIALS, write_sweep

MOST_SECONDS = 30


@contextmanager
def serving(*folders):
    live = LivePage([RunFiles(folder) for folder in folders])
    server = Server(live, 0)
    threads = [threading.Thread(target=target) for target in (live.follow, lambda: server.serve_forever(0.02))]
    for thread in threads:
        thread.start()
    try:
        yield server
    finally:
        live.end()
        server.shutdown()
        server.server_close()
        for thread in threads:
            thread.join(MOST_SECONDS)
            assert not thread.is_alive()


def get(server, path="", host=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=MOST_SECONDS)
    if host is not None:
        headers["Host"] = host
    connection.request("GET", f"/{server.secret}/{path}", headers=headers)
    return connection.getresponse()


class Stream:
    """Server-sent events, as a browser reads them."""

    def __init__(self, response):
        assert response.headers["Content-Type"] == "text/event-stream"
        self._response, self.ids = response, []
        """The place of each event; None: it has none."""

    def next(self):
        found = {}
        while line := self._response.readline().decode().rstrip("\n"):
            name, _, value = line.partition(": ")
            found[name] = value
        if "data" not in found:
            return self.next()
        self.ids.append(found.get("id"))
        return json.loads(found["data"])

    def until(self, name, text):
        while True:
            news = self.next()
            if news["id"] == name and text in news["html"]:
                return news["html"]


def events_of(server, **headers):
    content = get(server).read().decode()
    path = content.partition('data-events="')[2].partition('"')[0]
    assert path.startswith("events?")
    return Stream(get(server, path, **headers))


def test_a_line_that_is_added_follows(tmp_path):
    folder = write_run(tmp_path / "run", state="running", exit_code=None)
    with serving(folder) as server:
        stream = events_of(server)
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(training_line(21, loss=3.25)) + "\n")
        stream.until("heads", "<dd>3.25</dd>")
        (folder / "ranks.jsonl").write_text("".join(json.dumps(rank_line(step)) + "\n" for step in (20, 21)))
        stream.until("ranks", "rank 3 on node-b")
        # A browser that comes back has nothing to hear twice, and one of an earlier server hears all.
        again = events_of(server, **{"Last-Event-ID": "gone-3"})
        again.until("ranks", "rank 3 on node-b")
        while again.next()["id"] != "details":
            pass
        # Only the last one tells that it has heard all.
        assert {*again.ids[:-1]} == {None} != {again.ids[-1]}


def test_what_fails_once_is_said_and_the_page_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("hfdist.tools.report.live._EVERY_SECONDS", 0.01)
    folder = write_run(tmp_path / "run")

    class Fails(RunFiles):
        """At the second and third look."""

        looks = 0

        def read(self):
            self.looks += 1
            if self.looks in (2, 3):
                raise PermissionError(13, "Permission denied")
            return super().read()

    live = LivePage([Fails(folder)])
    thread = threading.Thread(target=live.follow)
    thread.start()
    (folder / "metrics.jsonl").write_text(json.dumps(training_line(21, loss=3.25)) + "\n")
    end = time.monotonic() + MOST_SECONDS
    while "<dd>3.25</dd>" not in live.html("events") and time.monotonic() < end:
        time.sleep(0.01)
    live.end()
    thread.join(MOST_SECONDS)
    assert "<dd>3.25</dd>" in live.html("events")
    said = "warning: the page stays as it was: PermissionError: [Errno 13] Permission denied\n"
    assert capsys.readouterr().err == said


def test_a_sweep_that_is_served_has_its_trials(tmp_path):
    folder = write_sweep(tmp_path / "sweep", TRIALS[:2])
    request = parse_request([str(folder), "--live"])
    live = LivePage([RunFiles(run) for run in request.folders], request.sweeps)
    assert "2 trials, 0 failed" in live.html("events")
    with (folder / "sweep.jsonl").open("a") as file:
        file.write(json.dumps({"trial": 2, "values": TRIALS[0][0]}) + "\n")
    live.refresh()
    assert "3 trials, 0 failed" in live.html("events")


def test_only_what_has_changed_is_sent(tmp_path):
    folder = write_run(tmp_path / "run")
    with serving(folder) as server:
        stream = events_of(server)
        (folder / "samples.jsonl").write_text(json.dumps({"step": 20, "prompt": "a", "text": "b"}) + "\n")
        assert stream.next()["id"] == "samples"


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "169.254.1.1:80", "evil.example:80", "", "[bad"]
)
def test_a_foreign_host_is_refused(tmp_path, host):
    with serving(write_run(tmp_path / "run")) as server:
        for path in ("", "events"):
            response = get(server, path, host=host)
            assert response.status == 403
            assert b"loss" not in response.read()


def test_browsers_are_answered_again_once_threads_can_be_started(tmp_path, monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    with serving(write_run(tmp_path / "run")) as server:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            for _ in range(65):
                with socket.create_connection(("127.0.0.1", server.server_port), MOST_SECONDS) as browser:
                    assert browser.recv(1) == b""
        assert get(server).status == 200


def test_this_machine_by_any_port_is_answered(tmp_path):
    with serving(write_run(tmp_path / "run")) as server:
        assert server.server_address[0] == "127.0.0.1"
        for host in (None, "localhost:8000", "127.0.0.1:8000", "LOCALHOST"):
            response = get(server, host=host)
            assert response.status == 200
            assert b"connect-src 'self'" in response.read()
        for header, value in (("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff")):
            assert response.headers[header] == value
        assert "Access-Control-Allow-Origin" not in response.headers


def test_who_does_not_know_the_address_gets_nothing(tmp_path):
    with serving(write_run(tmp_path / "run")) as server:
        for path in (
            "/",
            "/events",
            f"/{server.secret}x/",
            f"/{server.secret}/run.json",
            f"/{server.secret}/../run.json",
        ):
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=MOST_SECONDS)
            connection.request("GET", path)
            assert connection.getresponse().status == 404


def test_the_address_without_its_slash_leads_to_the_page(tmp_path):
    with serving(write_run(tmp_path / "run")) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=MOST_SECONDS)
        connection.request("GET", f"/{server.secret}")
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (302, b"")
        assert answer.headers["Location"] == f"/{server.secret}/"


def test_a_port_that_is_taken_is_one_message(tmp_path):
    live = LivePage([RunFiles(write_run(tmp_path / "run"))])
    with serving(tmp_path / "run") as server, pytest.raises(ConfigError, match="cannot be served"):
        Server(live, server.server_port)
