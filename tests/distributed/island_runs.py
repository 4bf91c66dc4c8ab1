"""Runs that are islands: each in processes of its own, with a server in another."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hfdist.islands.member import Member
from hfdist.islands.server import IslandServer
from hfdist.islands.shard_process import ShardProcess
from hfdist.run.builder import Run
from tests.distributed.runs import losses, pretrain, weights

_FORK = multiprocessing.get_context("fork")
MOST_SECONDS = 100


class Island:
    """A run in processes of its own."""

    def __init__(
        self, folder: Path, num_ranks: int, *overrides: str, at_start: Callable[[], None] = lambda: None
    ) -> None:
        self.folder = folder
        self._end, theirs = _FORK.Pipe(duplex=False)
        self.process = _FORK.Process(target=_train, args=(theirs, folder, num_ranks, overrides, at_start))
        self.process.start()
        theirs.close()

    def wait(self, most_seconds: float = MOST_SECONDS) -> str | None:
        """What it failed with, once it has ended; None: with nothing."""
        if not self._end.poll(most_seconds):
            return "it does not end"
        try:
            return self._end.recv()
        except EOFError:
            return "it was killed"

    def kill(self) -> None:
        """End whatever is left of it."""
        if self.process.is_alive():
            self.process.kill()
        self.process.join()


def _train(
    end: Connection, folder: Path, num_ranks: int, overrides: tuple[str, ...], at_start: Callable[[], None]
) -> None:
    try:
        at_start()
        pretrain(folder, num_ranks, *overrides, timeout_seconds=3600)
        end.send(None)
    except BaseException:
        end.send(traceback.format_exc())


@contextmanager
def served(log: Path | None = None, **options: Any) -> Iterator[str]:
    """Run a server meanwhile; gives its address. `log` gets its lines, each with the seconds in front."""
    listener = socket.create_server(("127.0.0.1", 0))
    process = _FORK.Process(target=_serve, args=(listener, log, options))
    process.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        process.kill()
        process.join()
        listener.close()


def _serve(listener: socket.socket, log: Path | None, options: dict[str, Any]) -> None:
    def say(line: str) -> None:
        if log is None:
            os.write(1, f"{line}\n".encode())
        else:
            with log.open("a") as file:
                file.write(f"{time.monotonic()} {line}\n")

    asyncio.run(IslandServer(listener, say=say, **options).serve())


@contextmanager
def shards_beside(address: str, number: int) -> Iterator[list[multiprocessing.process.BaseProcess]]:
    """Run further shards of the server meanwhile; gives their processes."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    processes = [_FORK.Process(target=_serve_shard, args=(address, listener)) for listener in listeners]
    for process in processes:
        process.start()
    for listener in listeners:
        listener.close()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def _serve_shard(address: str, listener: socket.socket) -> None:
    own = f"127.0.0.1:{listener.getsockname()[1]}"
    asyncio.run(ShardProcess(listener, own, server=address, say=lambda line: None).serve())


def overrides_of(address: str, index: int, count: int, *more: str) -> tuple[str, ...]:
    """Make a run one of some islands."""
    keys = (f"islands.address={address}", f"islands.index={index}", f"islands.count={count}")
    return ("islands=diloco", "islands.timeout_seconds=20", *keys, *more)


def run_islands(
    folder: Path, count: int, num_ranks: int, *overrides: str, most_seconds: float = MOST_SECONDS
) -> list[Path]:
    """Run islands of one layout to their end; gives their run folders."""
    with served() as address:
        islands = [
            Island(folder / f"island-{index}", num_ranks, *overrides_of(address, index, count, *overrides))
            for index in range(count)
        ]
        try:
            failures = [found for island in islands if (found := island.wait(most_seconds)) is not None]
        finally:
            for island in islands:
                island.kill()
    assert not failures, failures[0]
    return [island.folder for island in islands]


def difference(found, wanted):
    assert found.keys() == wanted.keys()
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted)


def goes_on_as_if_nothing_had_been(folder, num_ranks, dies, *keys):
    """Two islands that die, are started again, and end as others that nobody killed; `dies` is an `at_start`."""
    through = run_islands(folder / "through", 2, num_ranks, *keys)
    folders = [folder / f"island-{index}" for index in range(2)]
    with served() as address:
        for at_start in (dies, lambda: None):
            islands = [
                Island(own, num_ranks, *overrides_of(address, index, 2, *keys), at_start=at_start)
                for index, own in enumerate(folders)
            ]
            ends = [island.wait() for island in islands]
            for island in islands:
                island.kill()
    assert ends == [None, None]
    for own, whole in zip(folders, through, strict=True):
        assert losses(own)[-3:] == losses(whole)[-3:]
        assert difference(weights(own), weights(whole)) == 0


def before_steps(act):
    """Call `act(step)` before each forward and backward, with the number of steps so far."""

    def at_start():
        build = Run.build_trainer

        def build_changed(run):
            build(run)
            train = run.trainer.training_step

            def training_step(*args, **kwargs):
                act(run.trainer.state.global_step)
                return train(*args, **kwargs)

            run.trainer.training_step = training_step

        Run.build_trainer = build_changed

    return at_start


def die_at(step):
    def act(now):
        if now == step:
            os.kill(os.getpid(), signal.SIGKILL)

    return before_steps(act)


def wait_at(step, sign):
    """Until a file is there."""

    def act(now):
        while now == step and not sign.exists():
            time.sleep(0.05)

    return before_steps(act)


def shows(sign):
    """Writes the file when it comes to the others."""

    def at_start():
        connect = Member.connect

        def connect_and_show(member):
            connect(member)
            sign.touch()

        Member.connect = connect_and_show

    return at_start
