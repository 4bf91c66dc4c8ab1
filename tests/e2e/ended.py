"""A recipe in a process with a thread that comes back from torch's C++ while the interpreter ends: that aborts it.

`python -m tests.e2e.ended FOLDER` forks one such process for each way to end, and prints their exit codes as JSON.
"""

import atexit
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

import torch.distributed as dist

from hfdist.config.cli.command import recipe
from hfdist.errors import NumericsError
from hfdist.testing import _serve_store, _store

ENDS = {"well": None, "told": NumericsError("the loss is not finite"), "untold": ZeroDivisionError("by zero")}


class AtTheVeryEnd:
    """Gone when the interpreter drops its modules, which ends the thread's wait."""

    def __init__(self, server):
        # By then `os`, `signal` and `time` are None.
        self.kill, self.sleep = partial(os.kill, server, signal.SIGKILL), time.sleep

    def __del__(self):
        self.kill()
        self.sleep(0.5)


def later(word):
    """Say it from a thread that the process waits for."""
    time.sleep(0.1)
    sys.stdout.write(f"{word}\n")


def start(folder, way):
    """Do what a recipe does, up to its end."""
    os.setsid()
    for descriptor, name in enumerate(("out", "err"), start=1):
        os.dup2(os.open(folder / f"{way}.{name}", os.O_WRONLY | os.O_CREAT), descriptor)
    server, port = _serve_store(multiprocessing.get_context("fork"))
    multiprocessing.process._children.clear()  # for whose end the process would wait
    store = _store(port)
    threading.Thread(target=store.get, args=("nothing",), daemon=True).start()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    @recipe()
    def main(config):
        atexit.register(sys.stdout.write, "last words\n")
        threading.Thread(target=later, args=("from a thread",)).start()
        if ENDS[way] is not None:
            raise ENDS[way]

    sys.argv = ["pretrain.py"]
    return main, AtTheVeryEnd(server.pid)


if __name__ == "__main__":
    folder, codes = Path(sys.argv[1]), {}
    for way in ENDS:
        child = os.fork()
        if child == 0:
            command, late = start(folder, way)
            command()
            sys.exit(0)
        codes[way] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.killpg(child, signal.SIGKILL)  # its server
    sys.stdout.write(json.dumps(codes))
