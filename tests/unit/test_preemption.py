"""Signals: one wish is one stop, a second one ends the process at once; loader processes pass theirs on."""

import fcntl
import os
import signal
import termios
import time
from contextlib import suppress
from functools import partial
from multiprocessing import get_context

import psutil
import pytest
from torch.utils.data._utils import worker
from transformers import TrainerControl, TrainerState, TrainingArguments

from hfdist.data import TokenStream, open_corpus
from hfdist.processes.stop_signals import STOP_SIGNALS
from hfdist.trainer.fault_tolerance import preemption
from hfdist.trainer.fault_tolerance.preemption import Preemption
from hfdist.trainer.fault_tolerance.rank_flags import RankFlags
from tests.unit.data.corpora import files_config, tokenizer, write_txt

FORK = get_context("fork")


def train_without_output(listening, seconds):
    """As `train` in a process that was started with `>&-`."""
    os.close(1)
    train(listening, seconds)


def train(listening, seconds):
    """Is in a step for so long, and says by its exit status whether it was to stop after it."""
    callback, control = Preemption(), TrainerControl()
    flags = RankFlags([callback])
    state, arguments = TrainerState(max_steps=100, global_step=7), TrainingArguments("unused", use_cpu=True)
    callback.on_train_begin(arguments, state, control)
    listening.set()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.01)
    flags.on_step_begin(arguments, state, control)
    flags.on_step_end(arguments, state, control)
    callback.on_train_end(arguments, state, control)
    os._exit(33 if control.should_save and control.should_training_stop else 0)


@pytest.fixture
def step(monkeypatch):
    """Gives a process that is in a step."""
    monkeypatch.setattr(preemption, "_SAME_REQUEST_SECONDS", 0.3)
    started = []

    def start(seconds=1.0, run=train):
        listening = FORK.Event()
        process = FORK.Process(target=run, args=(listening, seconds))
        process.start()
        started.append(process)
        assert listening.wait(20)
        return process

    yield start
    for process in started:
        process.kill()


@pytest.mark.parametrize(
    ("numbers", "run"),
    [(STOP_SIGNALS[:1], train), (STOP_SIGNALS[1:], train), (STOP_SIGNALS[:1], train_without_output)],
)
def test_one_signal_or_what_a_terminal_and_a_launcher_send_together_lets_the_step_end(step, numbers, run):
    process = step(run=run)
    for number in numbers:
        os.kill(process.pid, number)
    process.join()
    assert process.exitcode == 33


def train_at_a_terminal(ours, terminal, listening, seconds):
    os.close(ours)
    os.setsid()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    for descriptor in (1, 2):
        os.dup2(terminal, descriptor)
    os.close(terminal)
    stop = Preemption.on_flag

    def say_and_stop(*arguments):
        # As a progress bar: an error where nothing reads it any more.
        stop(*arguments)
        os.write(2, b"saving")

    Preemption.on_flag = say_and_stop
    train(listening, seconds)


def test_a_terminal_that_closes_lets_the_step_end(step):
    ours, terminal = os.openpty()
    process = step(run=partial(train_at_a_terminal, ours, terminal))
    os.close(terminal)
    os.close(ours)
    process.join()
    assert process.exitcode == 33


def test_under_nohup_a_terminal_that_closes_does_nothing(step):
    process = step(0.5, train_under_nohup)
    os.kill(process.pid, signal.SIGHUP)
    process.join()
    assert process.exitcode == 0


def train_under_nohup(listening, seconds):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    train(listening, seconds)


def test_a_second_wish_ends_the_process_at_once(step):
    process = step(60)
    os.kill(process.pid, signal.SIGTERM)
    time.sleep(0.5)
    assert process.is_alive()
    os.kill(process.pid, signal.SIGTERM)
    process.join(5)
    assert process.exitcode == -signal.SIGTERM


def read_and_wait(folder, pids):
    """A rank whose loader process reads more ahead than a pipe holds; it says when it is told to stop."""
    signal.signal(signal.SIGTERM, lambda number, frame: pids.put(-number))
    config = files_config(write_txt(folder), folder / "cache", sequence_length=4096, workers=1)
    batches = iter(TokenStream(open_corpus(config), tokenizer(), config).loader(batch_size=1))
    next(batches)
    (loader,) = psutil.Process().children()
    pids.put(loader.pid)
    time.sleep(60)


def die_after_the_fork(folder, pids):
    """A rank that is killed before torch's loop asks whose child it is in."""

    class Late(worker.ManagerWatchdog):
        def __init__(self):
            pids.put(os.getpid())
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(0.5)
            super().__init__()

    worker.ManagerWatchdog = Late
    read_and_wait(folder, pids)


def wait_for(loader):
    with suppress(psutil.NoSuchProcess):
        try:
            loader.wait(20)
        finally:
            loader.kill()


def test_a_loader_does_not_outlive_a_rank_that_is_killed_after_the_fork(tmp_path):
    pids = FORK.SimpleQueue()
    rank = FORK.Process(target=die_after_the_fork, args=(tmp_path, pids))
    rank.start()
    loader = psutil.Process(pids.get())
    rank.join()
    assert rank.exitcode == -signal.SIGKILL
    wait_for(loader)


def test_the_loader_of_a_stream_passes_signals_on_and_does_not_outlive_a_rank_that_is_killed(tmp_path):
    pids = FORK.Queue()
    rank = FORK.Process(target=read_and_wait, args=(tmp_path, pids))
    rank.start()
    loader = psutil.Process(pids.get(timeout=60))
    loader.send_signal(signal.SIGTERM)
    assert pids.get(timeout=60) == -signal.SIGTERM
    # Until it waits for its rank to take what it has read.
    time.sleep(1)
    rank.kill()
    rank.join()
    wait_for(loader)
