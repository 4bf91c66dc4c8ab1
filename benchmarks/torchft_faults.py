"""torchft's local SGD beside `proofs/island_faults.py`: as many groups, the same steps, rounds and faults.

It has an environment of its own: make one, `pip install -r benchmarks/peers/torchft.txt`, and then
`PYTHON benchmarks/torchft_faults.py 900` prints a table. The time-outs are those of torchft's own examples.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import LocalSGD

# Those of `island_faults`, which this environment cannot import.
NUM_GROUPS, EVERY, STEP_SECONDS, FAULT_SECONDS = 8, 4, 1.0, 29.0
WIDTH, BATCH = 256, 128
_FORK = multiprocessing.get_context("fork")


def train_group(name: str, lighthouse: str, log: Path) -> None:
    """Train until it is killed; note the time of each exchange that counts."""
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,
        timeout=timedelta(seconds=30),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
        lighthouse_addr=lighthouse,
        replica_id=name,
    )
    with LocalSGD(manager, model, optimizer, sync_every=EVERY), log.open("a") as file:
        while True:
            before = manager.current_step()
            time.sleep(STEP_SECONDS)
            optimizer.zero_grad()
            model(torch.randn(BATCH, WIDTH)).square().mean().backward()
            optimizer.step()
            if manager.current_step() > before:
                file.write(f"{time.monotonic()}\n")
                file.flush()


def serve(end: Connection) -> None:
    """Serve until it is killed: apart, because a process with its threads must not be forked."""
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=10000, quorum_tick_ms=100)
    end.send(server.address())
    signal.pause()


def train(seconds: float, *, with_faults: bool) -> tuple[float, int]:
    """Give the steps a second of all groups that count, and the number of faults."""
    choose, faults = random.Random(0), 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ours, theirs = _FORK.Pipe()
        server = _FORK.Process(target=serve, args=(theirs,))
        server.start()
        address = ours.recv()

        def counted(begin: float, end: float) -> int:
            lines = [float(line) for log in folder.iterdir() for line in log.read_text().split()]
            return EVERY * sum(begin <= line < end for line in lines)

        def start(index: int, turn: int) -> BaseProcess:
            arguments = (f"{index}-{turn}", address, folder / f"{index}-{turn}")
            process = _FORK.Process(target=train_group, args=arguments)
            process.start()
            return process

        groups = [start(index, 0) for index in range(NUM_GROUPS)]
        while counted(0, float("inf")) < 2 * EVERY * NUM_GROUPS:
            time.sleep(0.2)
        begin = time.monotonic()
        while time.monotonic() < begin + seconds:
            time.sleep(0.1)
            if with_faults and time.monotonic() > begin + (faults + 1) * FAULT_SECONDS - FAULT_SECONDS / 2:
                index, faults = choose.randrange(NUM_GROUPS), faults + 1
                os.kill(groups[index].pid or 0, signal.SIGKILL)
                groups[index].join()
                groups[index] = start(index, faults)
        end = time.monotonic()
        for process in (*groups, server):
            process.kill()
            process.join()
        return counted(begin, end) / (end - begin), faults


if __name__ == "__main__":
    most_seconds = float(sys.argv[1])
    whole, _ = train(most_seconds, with_faults=False)
    left, num_faults = train(most_seconds, with_faults=True)
    sys.stdout.write(
        "| faults | minutes | steps a second of all groups | kept |\n|---:|---:|---:|---:|\n"
        f"| 0 | {most_seconds / 60:.1f} | {whole:.2f} | |\n"
        f"| {num_faults} | {most_seconds / 60:.1f} | {left:.2f} | {100 * left / whole:.1f} % |\n"
    )
