"""The processes that hfdist starts by itself: how their ends become one exit code, and signals that reach them."""

import contextlib
import multiprocessing
import multiprocessing.util
import os
import signal
import socket
import sys
import threading
import time

import pytest

from hfdist.config.cli import process_end
from hfdist.errors import ConfigError, PeerError
from hfdist.launch import launch
from hfdist.processes.stop_signals import STOP_SIGNALS
from tests.imports import quicken_agent

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _quick_and_clean(monkeypatch):
    """Forks have imported torch already; what the agent writes into the environment is taken back."""
    quicken_agent()
    monkeypatch.setattr(launch, "START_METHOD", "fork")
    for name in ("TORCHELASTIC_SIGNALS_TO_HANDLE", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")


def note(folder, text):
    (folder / f"{os.environ['RANK']}-{len(list(folder.iterdir()))}").write_text(text)


def end(folder, codes):
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)  # as in a process that is not forked
    note(folder, os.environ["WORLD_SIZE"])
    code = codes[int(os.environ["RANK"])]
    if code is None:
        time.sleep(60)
    elif code < 0:
        os.kill(os.getpid(), -code)
    sys.exit(code)


@pytest.mark.parametrize(("codes", "exit_code"), [((0, 0), 0), ((None, 75), 75), ((3, None), 3)])
def test_the_exit_code_is_that_of_the_process_that_failed_first(tmp_path, capfd, codes, exit_code):
    assert launch.start_ranks(end, tmp_path, codes, processes=2, max_restarts=0) == exit_code
    assert capfd.readouterr() == ("", "")


def test_a_killed_process_is_one_message(tmp_path, capfd):
    with pytest.raises(PeerError, match="SIGKILL"):
        launch.start_ranks(end, tmp_path, (None, -signal.SIGKILL), processes=2, max_restarts=0)
    assert capfd.readouterr() == ("", "")


def fail(folder):
    raise ValueError("a bug")


def test_a_bug_keeps_its_traceback(tmp_path, capfd):
    assert launch.start_ranks(fail, tmp_path, processes=1, max_restarts=0) == 1
    said = capfd.readouterr().err
    assert said.count("ValueError: a bug") == 1
    assert "elastic" not in said


def leave_a_folder(folder):
    process_end.group_size = lambda: 1
    with process_end.ending():
        note(folder, multiprocessing.util.get_temp_dir())


def test_a_rank_that_ends_well_does_all_that_multiprocessing_does_at_the_end(tmp_path):
    assert launch.start_ranks(leave_a_folder, tmp_path, processes=2, max_restarts=0) == 0
    noted = [path.read_text() for path in tmp_path.iterdir()]
    assert len(noted) == 2
    assert not any(os.path.exists(folder) for folder in noted)
    assert launch.start_ranks(sys.exit, processes=1, max_restarts=0) == 0, "an end without a code is a good one"


def tell_address(folder):
    note(folder, os.environ["MASTER_ADDR"])


def test_the_name_of_this_machine_need_not_be_known_to_the_network(tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "getfqdn", lambda name="": "no-such-host.invalid")
    assert launch.start_ranks(tell_address, tmp_path, processes=1, max_restarts=0) == 0
    assert (tmp_path / "0-0").read_text() == "localhost"


def fail_at_first(folder, code):
    note(folder, "")
    sys.exit(code if len(list(folder.iterdir())) == 1 else 0)


@pytest.mark.parametrize(("code", "starts"), [(75, 2), (6, 2), (1, 2), (2, 1), (5, 1)])
def test_what_may_pass_is_tried_again(tmp_path, code, starts):
    exit_code = launch.start_ranks(fail_at_first, tmp_path, code, processes=1, max_restarts=2)
    assert exit_code == (0 if starts == 2 else code)
    assert len(list(tmp_path.iterdir())) == starts


def save_when_told(folder, number, exit_code):
    def save(number, frame):
        # Longer than ranks differ, and than the agent waits between two looks.
        time.sleep(0.5 + int(os.environ["RANK"]))
        note(folder, "saved")
        sys.exit(exit_code)

    signal.signal(number, save)
    note(folder, "ready")
    time.sleep(60)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_reaches_all_processes_and_they_have_time_to_save(tmp_path, number):
    def tell():
        # A file that is still empty is of a process that would be interrupted while it writes.
        while [path.read_text() for path in tmp_path.iterdir()] != ["ready", "ready"]:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    teller = threading.Thread(target=tell)
    teller.start()
    assert launch.start_ranks(save_when_told, tmp_path, number, 75, processes=2, max_restarts=3) == 75
    teller.join()
    assert sorted(path.read_text() for path in tmp_path.iterdir()) == ["ready", "ready", "saved", "saved"]
    assert signal.getsignal(number) == before


def test_a_signal_before_they_listen_ends_them(tmp_path):
    def tell():
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=tell).start()
    assert launch.start_ranks(end, tmp_path, (None, None), processes=2, max_restarts=3) == 128 + signal.SIGTERM


class Ended:
    """A process that is no more."""

    pid, exitcode = 2**22 + 1, -signal.SIGTERM

    def join(self):
        pass


@pytest.mark.parametrize(
    ("children", "ignored", "code", "exit_code"),
    [([Ended(), Ended()], BaseException, 75, 128 + signal.SIGTERM), ([], (), 6, 6)],
    ids=["its error is ignored, as in a finalizer", "no process is there yet"],
)
def test_a_signal_between_processes_ends_the_run(monkeypatch, children, ignored, code, exit_code):
    starts = []

    def start(main, arguments, processes):
        starts.append(processes)
        with contextlib.suppress(ignored):
            os.kill(os.getpid(), signal.SIGTERM)
        return code

    monkeypatch.setattr(launch, "_start_once", start)
    monkeypatch.setattr(multiprocessing, "active_children", lambda: children)
    assert launch.start_ranks(end, processes=2, max_restarts=3) == exit_code
    assert starts == [2]


def test_processes_share_the_cores_that_they_may_use(monkeypatch):
    """A job of a scheduler may have some cores of a machine only."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(launch, "_start_once", lambda *_: 0)
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    launch.start_ranks(end, processes=2, max_restarts=0)
    assert os.environ["OMP_NUM_THREADS"] == "1"


def test_each_process_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(launch, "count_gpus", lambda: 2)
    with pytest.raises(ConfigError, match="a GPU of its own") as caught:
        launch.start_ranks(end, processes=4, max_restarts=0)
    assert "4, with 2 GPUs" in caught.value.found
