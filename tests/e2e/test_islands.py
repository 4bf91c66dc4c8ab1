"""The commands of the page on islands, each in a process of its own, as it shows them."""

import re
import shlex
import socket
import time

import pytest

from hfdist import __main__ as command
from hfdist.launch.address import own_interfaces
from tests.distributed.runs import weights
from tests.e2e.forked import end, run_forked, run_script, start_forked
from tests.e2e.test_readme import SMALL
from tests.unit.config.shipped import CONF

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(280)]

PAGE = CONF.parent / "docs" / "islands.md"


def test_the_commands_of_the_page_train_one_model(tmp_path, cache_dir):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    block = PAGE.read_text().split("```")[1].replace("29600", f"{port}").replace("HOST", "localhost")
    serve, *islands = [shlex.split(line)[1:] for line in block.strip().splitlines()]

    def start(words, log):
        said = (tmp_path / log, tmp_path / log)
        return start_forked(run_script, command.__file__, *words, cwd=tmp_path, said=said)

    server = start(serve, "server")
    running = [start([*words, *SMALL, "islands.every=5"], f"island-{place}") for place, words in enumerate(islands)]
    codes = [end(process) for process in running]
    assert codes == [0, 0], [(tmp_path / f"island-{place}").read_text() for place in range(2)]
    server.terminate()
    assert end(server) == 0
    said = re.sub(r"^[\d:]+ ", "", (tmp_path / "server").read_text(), flags=re.MULTILINE)
    assert said.startswith(f"islands.address=127.0.0.1:{port}\n")
    assert [line for line in said.splitlines() if "exchange" in line] == [
        f"step {step}: islands 0, 1 exchange" for step in (5, 10, 12)
    ]
    one, two = [weights(tmp_path / "runs" / f"island-{place}") for place in range(2)]
    assert all(bool((one[name] == two[name]).all()) for name in one)


def test_a_shard_comes_to_its_server_and_both_end_when_they_are_told(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"

    def start(log, *words):
        said = (tmp_path / log, tmp_path / log)
        return start_forked(run_script, command.__file__, "serve", *words, cwd=tmp_path, said=said)

    shard = start("shard", f"of={address}")
    server = start("server", f"port={address.split(':')[1]}")
    deadline = time.monotonic() + 60
    while "a shard is there" not in (said := log.read_text() if (log := tmp_path / "server").exists() else ""):
        assert time.monotonic() < deadline, said
        time.sleep(0.05)
    (place,) = re.findall(r"a shard is there, at (127\.0\.0\.1:\d+)\n", said)
    assert f"a shard of the server at {address}, reached at {place}\n" in (tmp_path / "shard").read_text()
    for process in (shard, server):
        process.terminate()
        assert end(process) == 0


@pytest.mark.parametrize(
    ("words", "where"), [(["of=here:99999"], "of"), (["of=here:1", "least=2"], "least"), (["of=here:1:x"], "of")]
)
def test_a_mistake_at_a_shard_is_one_message(words, where, tmp_path):
    done = run_forked("serve", *words, cwd=tmp_path, script=command.__file__)
    assert done.returncode == 2
    assert f"where:   {where} (" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_shard_of_a_server_elsewhere_listens_where_islands_reach_it(tmp_path):
    own = next(iter(own_interfaces().values()), None)
    if own is None:
        pytest.skip("no interface but the loopback")
    done = run_forked("serve", f"of={own}:29600", cwd=tmp_path, script=command.__file__)
    assert done.returncode == 2
    assert "where:   host (" in done.stderr
    assert f"or host={own}\n" in done.stderr


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (["islands=diloco"], "islands.address"),
        (["islands=diloco", "islands.address=here:1", "islands.index=1"], "islands.index"),
        (["islands.count=2"], "islands.count"),
        (["islands=diloco", "islands.address=here:1", "islands.count=7"], "data.lanes"),
        (["islands=diloco", "islands.address=localhost:9", "islands.timeout_seconds=0.5"], "islands.address"),
    ],
)
def test_a_mistake_is_one_message(words, where, tmp_path, cache_dir):
    done = run_forked("pretrain", "model=tiny", *words, *SMALL, cwd=tmp_path, script=command.__file__)
    assert done.returncode == (6 if "islands.timeout_seconds=0.5" in words else 2)
    assert f"where:   {where}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_that_is_taken_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run_forked("serve", "host=127.0.0.1", f"port={port}", cwd=tmp_path, script=command.__file__)
    assert done.returncode == 2
    assert f"127.0.0.1, {port}" in done.stderr
    assert "another port, such as port=29601" in done.stderr
