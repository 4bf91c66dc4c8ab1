"""When silence is an alarm, who waits for whom, and what a stack tells."""

import contextlib
import socket
import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hfdist.errors import ConfigError, PeerError
from hfdist.launch import address
from hfdist.messages.message import write_message
from hfdist.testing import run_ranks
from hfdist.watch import heartbeat, requests, stacks, store
from hfdist.watch.callback import Watch, is_broken_connection
from hfdist.watch.diagnosis import Diagnosis, find_left, find_lost, find_stalled
from hfdist.watch.heartbeat import EVALUATING, SAVING, STARTING, Heartbeat, PeerState, Progress
from hfdist.watch.snapshot import Collective, read_beats
from hfdist.watch.store import HostedStore, JoinedStore, Store, open_store
from hfdist.watch.tree import Below, Digest, find_parents
from hfdist.watch.watcher import Watcher

HEARTBEAT_SECONDS = 60.0


def heard(*beats, silent=None):
    """One rank a beat; `silent`: seconds by rank."""
    return {
        rank: PeerState(Heartbeat(number=1, host="here", **beat), (silent or {}).get(rank, 0.0))
        for rank, beat in enumerate(beats)
    }


def test_silence_is_an_alarm_after_the_heartbeat_and_not_before():
    assert find_lost(heard({}, {}, {}, silent={1: 59.9}), HEARTBEAT_SECONDS) is None
    line = find_lost(heard({}, {"step": 7}, {}, silent={1: 60.1}), HEARTBEAT_SECONDS).line
    assert line.startswith("ranks 0, 2 wait for rank 1 (on here, after the start, 7 steps done), which is dead")


def test_once_a_connection_broke_a_few_missing_beats_are_enough():
    assert find_lost(heard({"broken_seconds": 0.1}, {}, silent={1: 2.4}), HEARTBEAT_SECONDS) is None
    line = find_lost(heard({"broken_seconds": 2.4}, {}, {}, silent={1: 2.6, 2: 2.6}), HEARTBEAT_SECONDS).line
    assert line.startswith("rank 0 waits for ranks 1-2 (on here, after the start, 0 steps done), which are dead")
    # A broken connection, though everyone beats.
    assert find_lost(heard({"broken_seconds": 59}, {}), HEARTBEAT_SECONDS) is None
    assert "rank 0 lost the connection" in find_lost(heard({"broken_seconds": 61}, {}), HEARTBEAT_SECONDS).line


def test_a_rank_that_has_left_is_not_lost():
    for code in (0, 3):
        after = heard({}, {"left": code}, silent={1: 1000.0})
        assert find_lost(after, HEARTBEAT_SECONDS) is None
        assert find_stalled(after, HEARTBEAT_SECONDS) is None


def test_who_left_with_an_error_ends_the_others_with_its_exit_code_but_not_at_once():
    assert find_left(heard({}, {"left": 0}, silent={1: 1000.0}), HEARTBEAT_SECONDS) is None
    assert find_left(heard({}, {"left": 3}, silent={1: 1.0}), HEARTBEAT_SECONDS) is None
    assert find_left(heard({}, {"left": 3}, silent={1: 61.0}), HEARTBEAT_SECONDS).exit_code == 3
    broken = find_left(heard({"broken_seconds": 0.1}, {"left": 3}), HEARTBEAT_SECONDS)
    assert (broken.exit_code, broken.is_alarm) == (3, False)


def test_the_rank_with_the_fewest_marks_is_the_one_that_the_others_wait_for():
    idle = {"idle_seconds": 61.0, "step": 4}
    line = find_stalled(
        heard({"marks": 9, **idle, "waits_in": "all_gather"}, {"marks": 8, **idle}, {"marks": 9, **idle}),
        HEARTBEAT_SECONDS,
    ).line
    assert line.startswith("ranks 0, 2 wait for rank 1 (on here, after the start, 4 steps done), which has made no")
    assert line.endswith("; rank 0 is in all_gather")


def test_of_ranks_some_of_which_are_in_collectives_the_others_are_waited_for():
    """A rank that left a collective out is ahead by its marks, and loops after it."""
    stalled = heard({"marks": 5, "waits_in": "barrier", "idle_seconds": 61}, {"marks": 9, "idle_seconds": 61})
    assert find_stalled(stalled, HEARTBEAT_SECONDS).line.startswith("rank 0 waits for rank 1 ")
    crossed = heard(*({"waits_in": name, "idle_seconds": 61} for name in ("barrier", "all_reduce")))
    line = find_stalled(crossed, HEARTBEAT_SECONDS).line
    assert "wait for each other" in line
    assert line.endswith("rank 0 is in barrier; rank 1 is in all_reduce")


LONG = {"idle_seconds": 1000.0}


@pytest.mark.parametrize(
    "beats",
    [
        *((LONG, LONG | {"exempt": reason}) for reason in (STARTING, EVALUATING, "compiling")),
        (LONG, LONG, {"left": 3}),  # they wait for one that has ended with an error
        (LONG, {"idle_seconds": 1.0}),
        (LONG, LONG | {"longest_idle_seconds": 250.0}),  # pauses were as long before
    ],
)
def test_nobody_is_stalled_while_there_is_a_reason_to_wait(beats):
    assert find_stalled(heard(*beats), HEARTBEAT_SECONDS) is None
    assert find_stalled(heard(LONG, LONG), HEARTBEAT_SECONDS) is not None


def test_progress_does_not_measure_what_may_take_long():
    progress = Progress()
    time.sleep(0.05)
    progress.step_done(11)
    assert progress.longest_idle_seconds >= 0.05, "a measure for the first steps"
    progress.exempt = SAVING
    progress.step_done(12)
    progress.step_done(13)
    assert progress.longest_idle_seconds == 0, "and for no later one"
    time.sleep(0.05)
    progress.mark("a save")
    assert progress.longest_idle_seconds == 0
    progress.exempt = None
    assert list(progress.marking(iter([1, 2]))) == [1, 2]
    time.sleep(0.05)
    progress.mark("a slow one")
    assert progress.longest_idle_seconds >= 0.05
    assert (progress.marks, progress.step) == (7, 13)


def test_slow_steps_are_a_measure_for_the_first_step_after_the_warm_up(monkeypatch):
    """A pipeline makes one mark a step, and steps may take longer than a heartbeat may."""
    now = 0.0
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now)
    progress = Progress()
    for step, seconds in enumerate((300, 100, 90), start=1):
        now += seconds
        progress.step_done(step)
    assert progress.longest_idle_seconds == 90


def watching():
    """The threads of a watch."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("watch-")]


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf"), "60"])
def test_what_is_no_time_is_refused(seconds, tmp_path):
    Watch(tmp_path, np.int64(60))
    with pytest.raises(ConfigError, match="no time"):
        Watch(tmp_path, seconds)


def test_who_has_left_beats_no_more(tmp_path):
    """A thread that comes back from C++ while the interpreter ends aborts a process whose run ended well."""
    watcher = Watcher(Progress(), open_store(1.0), tmp_path, HEARTBEAT_SECONDS)
    assert sorted(watching()) == ["watch-beats", "watch-judge", "watch-requests", "watch-store"]
    watcher.leave(0)
    assert watching() == []


def test_a_store_that_never_answers_keeps_nobody_who_leaves(tmp_path):
    """Rank 0 is stopped: its machine takes what is sent, and nobody reads it."""
    with socket.create_server(("localhost", 0)) as stopped:
        joined = JoinedStore([("localhost", stopped.getsockname()[1])], "", 1, 1.0)
        watcher = Watcher(Progress(), Store(1, 2, below(1, 2), None, joined), tmp_path, HEARTBEAT_SECONDS)
        began = time.monotonic()
        watcher.leave(0)
        assert time.monotonic() - began < HEARTBEAT_SECONDS / 4
        assert watching() == []


TOKEN = "1" * 32


def below(own, num_ranks, known=None):
    """Of a rank of one machine."""
    known = known or [Heartbeat(number=0)] * num_ranks
    return Below(own, known, find_parents([range(num_ranks)]), time.monotonic())


def host_of(num_ranks, known=None):
    """The store of rank 0."""
    heard = below(0, num_ranks, known)
    return Store(0, num_ranks, heard, HostedStore(heard, num_ranks, TOKEN), None)


def joined_to(hosts, own, num_ranks):
    addresses = [("localhost", host._hosted.port) for host in hosts]
    return Store(own, num_ranks, below(own, num_ranks), None, JoinedStore(addresses, TOKEN, own, 1.0))


def beats_of(host):
    return {rank: one.beat for rank, one in host.below.states(time.monotonic(), 1.0).items()}


def test_ranks_hear_rank_0_and_rank_0_hears_all():
    host = host_of(3)
    joined = [joined_to([host], rank, 3) for rank in (1, 2)]
    first = Heartbeat(number=1, mark="ä\n")
    host.exchange(first, None, 1.0)
    assert [store.exchange(Heartbeat(number=7), None, 1.0) for store in joined] == [(first, None)] * 2
    verdict = Diagnosis("rank 1 is lost")
    host.exchange(Heartbeat(number=2), verdict, 1.0)
    assert {rank: beat.number for rank, beat in beats_of(host).items()} == {1: 7, 2: 7}
    assert joined[0].exchange(Heartbeat(number=8), None, 1.0) == (Heartbeat(number=2), verdict)
    host.close()
    with pytest.raises(ConnectionError):
        joined[1].exchange(Heartbeat(number=8), None, 1.0)


def test_a_rank_that_has_not_beaten_yet_has_a_name():
    known = [Heartbeat(number=0, host="a", pid=1), Heartbeat(number=0, host="b", pid=2)]
    host = host_of(2, known)
    assert beats_of(host) == {1: known[1]}
    host.exchange(known[0], None, 1.0)
    other = joined_to([host], 1, 2)
    assert other.exchange(Heartbeat(number=1, host="b", pid=2), None, 1.0) == (known[0], None)
    other.close()
    host.close()


def test_who_loses_the_rank_above_goes_to_the_next_one():
    """One that has ended, and one that is stopped."""
    first, second = host_of(3), host_of(3)
    with socket.create_server(("localhost", 0)) as stopped:
        store = joined_to([first, second], 1, 3)
        joined = store._joined
        joined._above.insert(1, stopped.getsockname())
        store.exchange(Heartbeat(number=1), None, 1.0)
        assert beats_of(first)[1].number == 1
        first.close()
        store.exchange(Heartbeat(number=2), None, 1.0)
        assert (beats_of(first)[1].number, beats_of(second)[1].number) == (1, 2)
        # The first one is tried again, and this is not it.
        joined._returns_at = 0.0
        store.exchange(Heartbeat(number=3), None, 1.0)
        assert beats_of(second)[1].number == 3
        third = host_of(3)
        joined._above[0], joined._returns_at = ("localhost", third._hosted.port), 0.0
        store.exchange(Heartbeat(number=4), None, 1.0)
        assert (beats_of(second)[1].number, beats_of(third)[1].number) == (3, 4)
    for one in (store, second, third):
        one.close()


@pytest.mark.parametrize("first", [b"", b"1\n", b"\xff 1\n", b"x" * 100_000, b"wrong 1\n{}\n"])
def test_who_is_no_rank_is_not_heard(first):
    host = host_of(2)
    stranger = socket.create_connection(("localhost", host._hosted.port), timeout=HEARTBEAT_SECONDS)
    with stranger, contextlib.suppress(ConnectionError):  # when it is turned away before all is sent
        stranger.sendall(first)
        stranger.shutdown(socket.SHUT_WR)
        assert stranger.recv(1) == b""
    assert beats_of(host)[1].number == 0
    host.close()


def in_three_machines():
    """Stores of rank 0, of a leader, and of the rank below that: it knows of rank 0, too."""
    machines, known = [[0], [1, 2], [3]], [Heartbeat(number=0, host=f"host-{rank}", pid=7) for rank in range(4)]
    heard = [Below(rank, known, find_parents(machines), time.monotonic()) for rank in range(3)]
    hosts = [HostedStore(one, 4, TOKEN) for one in heard[:2]]
    addresses = [("localhost", host.port) for host in hosts]
    leader = JoinedStore(addresses[:1], TOKEN, 1, 1.0)
    last = JoinedStore(addresses[::-1], TOKEN, 2, 1.0)
    return [
        Store(0, 4, heard[0], hosts[0], None),
        Store(1, 4, heard[1], hosts[1], leader),
        Store(2, 4, heard[2], None, last),
    ]


def test_ranks_know_where_rank_0_is_before_its_first_beat():
    first, leader, last = in_three_machines()
    for one in (leader, last):
        beat, _ = one.exchange(Heartbeat(number=1), None, 1.0)
        assert (beat.host, beat.pid) == ("host-0", 7)
    for one in (last, leader, first):
        one.close()


def test_a_leader_that_has_lost_rank_0_lets_those_below_go():
    first, leader, last = in_three_machines()
    leader._joined._connection.shutdown(socket.SHUT_RDWR)
    with pytest.raises(OSError, match=r"ended|pipe|reset"):
        leader.exchange(Heartbeat(number=1), None, 1.0)
    last.exchange(Heartbeat(number=5), None, 1.0)
    assert beats_of(first)[2].number == 5
    for one in (last, leader, first):
        one.close()


def test_who_asks_what_ranks_are_doing_hears_of_those_below_leaders_too(tmp_path):
    first, leader, last = in_three_machines()
    watcher = Watcher(Progress(), first, tmp_path / "watch" / "now", HEARTBEAT_SECONDS)
    folder = requests.request(tmp_path, "asked-20260102-030405")
    number, end = 0, time.monotonic() + HEARTBEAT_SECONDS
    while not (heard := read_beats(folder)[0]) and time.monotonic() < end:
        number += 1
        for one in (last, leader):
            one.exchange(Heartbeat(number=number), None, 1.0)
        time.sleep(0.02)
    assert heard[2].beat.number > 0
    first.below.hear(3, Heartbeat(number=1, left=0), Digest(), {}, time.monotonic())
    for one in (last, leader):
        one.exchange(Heartbeat(number=number, left=0), None, 1.0)
    watcher.leave(0)
    for one in (last, leader):
        one.close()


def test_what_hundreds_of_collectives_wait_for_fits_a_heartbeat(monkeypatch):
    pending = Collective("0", 7, "nccl:_all_gather_base", [[41943040]] * 100, False, "default_pg")
    monkeypatch.setattr(stacks, "recorded_collectives", lambda: [pending] * 200)
    found = stacks.waits_in()
    assert found.startswith("nccl:_all_gather_base [[41943040], ")
    assert found.endswith(", and 199 more")
    assert (
        len(write_message({"each": [7, *PeerState(Heartbeat(number=1, waits_in=found))]})) < store._MOST_BYTES_OF_EACH
    )


def test_a_leader_without_a_route_is_not_known_as_rank_0(monkeypatch):
    def fails(*args, **named):
        raise OSError("no route")

    monkeypatch.setattr(address, "find_route", fails)
    monkeypatch.setattr(address.platform, "node", lambda: "host-4")
    monkeypatch.setenv("MASTER_ADDR", "host-0")
    assert address.own_address(4) == ("host-4", "")
    assert address.own_address(0) == ("host-0", "")


def refused_by_rank_0():
    def fails(*args):
        raise OSError("no port is free")

    store.HostedStore = fails
    with pytest.raises(OSError, match="rank 0 cannot serve the others") as caught:
        open_store(1.0)
    return str(caught.value)


def test_where_rank_0_cannot_serve_all_ranks_hear_it():
    one, two = run_ranks(refused_by_rank_0, 2)
    assert one == two


class SlowStore:
    """Of rank 1 of 2: an exchange begins before its rank leaves, and ends after that."""

    rank, world_size = 1, 2
    below = below(1, 2)

    def __init__(self):
        self.sent, self.has_begun, self.may_end = [], threading.Event(), threading.Event()

    def exchange(self, own, verdict, beat_seconds, asks_each):
        self.has_begun.set()
        self.may_end.wait(HEARTBEAT_SECONDS)
        self.sent.append(own)
        return Heartbeat(number=0), None

    def close(self):
        pass


def test_who_leaves_during_an_exchange_says_so_in_the_next(tmp_path):
    store = SlowStore()
    watcher = Watcher(Progress(), store, tmp_path, HEARTBEAT_SECONDS)
    assert store.has_begun.wait(HEARTBEAT_SECONDS)
    leaving = threading.Thread(target=watcher.leave, args=(3,))
    leaving.start()
    # Until it waits for the exchange; longer does no harm.
    time.sleep(0.2)
    store.may_end.set()
    leaving.join(HEARTBEAT_SECONDS)
    assert [beat.left for beat in store.sent] == [None, 3]


def test_broken_connections_are_told_from_other_errors():
    gloo = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:21310"
    assert is_broken_connection(RuntimeError(gloo))
    assert is_broken_connection(dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp"))
    assert not is_broken_connection(RuntimeError("The size of tensor a (3) must match"))
    assert not is_broken_connection(ConnectionResetError("Connection reset by peer"))


def test_a_broken_connection_without_words_is_one_message(tmp_path):
    with pytest.raises(PeerError) as caught, Watch(tmp_path, None):
        raise dist.DistNetworkError("")
    assert caught.value.found == "DistNetworkError"


def test_compiling_is_seen_while_torch_compiles_and_not_while_what_it_compiled_runs():
    seen = {}

    def look(name):
        # From another thread, as the watch does.
        thread = threading.Thread(target=lambda: seen.setdefault(name, stacks.is_compiling()))
        thread.start()
        thread.join()

    def backend(graph, inputs):
        look("compiling")

        def run(*values):
            look("running")
            return graph(*values)

        return run

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert seen == {"compiling": True, "running": False}
