"""For tests of distributed training: run one function on N gloo ranks, forked from this process.

Importing torch, transformers and deepspeed costs seconds; a fork of a process that already has them costs
milliseconds. The ranks meet at a store on a free port.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkContext, ForkProcess
from typing import Any

import torch
import torch.distributed as dist

from hfdist.errors import HfdistError


class RankFailed(AssertionError):
    """A rank raised, died or did not finish in time; its cause is an error of hfdist's that the rank raised."""


def run_ranks(
    function: Callable[..., object],
    world_size: int,
    *arguments: object,
    timeout_seconds: float = 120,
    group: bool = True,
) -> list[Any]:
    """Call `function(*arguments)` on `world_size` forked ranks.

    Args:
        function: runs with one thread, and with `group` with RANK, WORLD_SIZE and LOCAL_RANK set; must return something
            picklable.
        world_size: number of ranks.
        arguments: passed on.
        timeout_seconds: after this, all ranks are killed.
        group: make the default gloo process group first; False: start ranks as plain `python` does, without a group
            and a launcher's environment.

    Returns:
        What each rank returned, in order of rank.

    Raises:
        RankFailed: a rank failed, with the traceback of the first one that did; or they took too long.
    """
    context = multiprocessing.get_context("fork")
    server, port = _serve_store(context) if group else (None, None)
    ranks = []
    for rank in range(world_size):
        ours, theirs = context.Pipe(duplex=False)
        arguments_of_rank = (theirs, function, arguments, rank, world_size, port, timeout_seconds)
        process = context.Process(target=_rank_main, args=arguments_of_rank)
        process.start()
        theirs.close()
        ranks.append((process, ours))
    try:
        return _collect([ours for _, ours in ranks], timeout_seconds)
    finally:
        for process, ours in ranks:
            process.kill()
            process.join()
            ours.close()
        if server is not None:
            server.kill()
            server.join()


def _collect(pipes: list[Connection], timeout_seconds: float) -> list[object]:
    deadline = time.monotonic() + timeout_seconds
    results: dict[int, object] = {}
    while len(results) < len(pipes):
        missing = [rank for rank in range(len(pipes)) if rank not in results]
        ready = wait([pipes[rank] for rank in missing], timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailed(f"ranks {missing} did not finish in {timeout_seconds:g} s")
        for rank in (rank for rank in missing if pipes[rank] in ready):
            try:
                succeeded, value = pipes[rank].recv()
            except EOFError as error:
                raise RankFailed(f"rank {rank} died without a word") from error
            if not succeeded:
                traced, cause = value
                raise RankFailed(f"rank {rank} raised:\n{traced}") from cause
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _rank_main(
    pipe: Connection,
    function: Callable[..., object],
    arguments: tuple[object, ...],
    rank: int,
    world_size: int,
    port: int | None,
    timeout_seconds: float,
) -> None:
    launcher = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    for name, value in {**launcher, "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.pop(name, None)
        if port is not None:
            os.environ[name] = str(value)
    os.environ["OMP_NUM_THREADS"] = "1"
    # What a rank inherits is no garbage: its collections need not look through it.
    gc.freeze()
    # A rank that hangs shows where, before it is killed.
    faulthandler.dump_traceback_later(0.9 * timeout_seconds, file=2)
    try:
        torch.set_num_threads(1)
        forget_parent()
        if port is not None:
            # accelerate and deepspeed both take over a group that is already there.
            dist.init_process_group("gloo", store=_store(port), rank=rank, world_size=world_size)
        answer = (True, function(*arguments))
        pipe.send(answer)
    except BaseException as error:
        answer = (False, (traceback.format_exc(), _copy(error) if isinstance(error, HfdistError) else None))
        pipe.send(answer)
    pipe.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the interpreter's own exit: gloo and DeepSpeed sometimes abort in it.
    os._exit(0 if answer[0] else 1)


def _copy(error: HfdistError) -> HfdistError:
    """Give an error of texts alone, which a pipe can take: of the nearest kind that is made of them."""
    told = error.texts()
    own = HfdistError.__init__
    made_of_texts = next(kind for kind in type(error).__mro__ if kind.__init__ is own)  # type: ignore[misc]
    copied: HfdistError = made_of_texts(str(told.pop("what")), **told)
    return copied


def _serve_store(context: ForkContext) -> tuple[ForkProcess, int]:
    """Start a process that serves a store, and give its port.

    The store has a thread, and a rank forked beside a running thread may find a lock taken for ever.
    """
    ours, theirs = context.Pipe(duplex=False)
    server = context.Process(target=_store_main, args=(theirs,))
    server.start()
    # So that its death ends the wait.
    theirs.close()
    try:
        return server, ours.recv()
    except EOFError as error:
        raise RankFailed("the store of the process group cannot be served") from error


def _store_main(pipe: Connection) -> None:
    store = _store(0)
    pipe.send(store.port)
    signal.pause()


def _store(port: int) -> Any:
    """Join the store on `port`; 0: serve one on a free port."""
    kind = dist.TCPStore  # type: ignore[attr-defined]  # not in torch's stubs
    return kind("127.0.0.1", port, is_master=port == 0, wait_for_workers=False)


def forget_parent() -> None:
    """Drop what the parent process may have put into accelerate's singletons, torch's compiling threads and atexit."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    # A rank that ends as a command does would run the parent's functions, too.
    atexit._clear()
    AcceleratorState._reset_state()
    GradientState._reset_state()
    PartialState._reset_state()
    inductor = sys.modules.get("torch._inductor.async_compile")
    if inductor is not None:
        # Its threads did not come along, and `torch.compile` would wait for them for ever (torch 2.13 forgets only its
        # pool of processes at a fork).
        inductor.AsyncCompile.pool.cache_clear()
