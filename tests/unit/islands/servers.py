"""A server of islands in a thread, and ranks that are connected to it."""

import asyncio
import queue
import socket
import threading
import time
from contextlib import contextmanager, suppress

from hfdist.islands.member import Member
from hfdist.islands.server import IslandServer

JOB = {"islands.count": 2, "islands.every": 10}


@contextmanager
def in_thread(make):
    """Let a server, or what serves beside one, serve in a thread; `make` is called there."""
    started = queue.Queue()

    async def serve():
        made = make()
        started.put((asyncio.get_running_loop(), asyncio.current_task()))
        with suppress(asyncio.CancelledError):
            await made.serve()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    loop, task = started.get()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()


@contextmanager
def served(**options):
    """The address of a server in a thread, and its lines."""
    listener = socket.create_server(("127.0.0.1", 0))
    lines = []

    def make():
        # What nobody expects is a line, so that a test sees it.
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: lines.append(f"Traceback: {context}"))
        return IslandServer(listener, say=lines.append, **options)

    with in_thread(make):
        yield f"127.0.0.1:{listener.getsockname()[1]}", lines


def at(island, rank=0):
    """The address of a rank, at which nobody listens."""
    return f"tcp://127.0.0.1:{7000 + 10 * island + rank}"


def member(address, island, *, rank=0, ranks=1, job=JOB, start="1", secret="", seconds=2.0):
    hello = {"island": island, "rank": rank, "start": start}
    more = {"job": job, "addresses": [at(island, place) for place in range(ranks)]} if rank == 0 else {}
    made = Member(address, secret, hello, more, seconds)
    made.connect()
    return made


def together(*calls):
    """What functions give that run side by side."""
    found = {}
    threads = [threading.Thread(target=lambda p=p, c=c: found.update({p: c()})) for p, c in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return [found.get(place) for place in range(len(calls))]


def until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
