"""Training beside the upload of its checkpoints to a mirror, and without one: `python -m benchmarks.mirror`."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.rounds import interleave, median_fields
from benchmarks.table import Measure, describe_run, markdown, publish, read_options
from hfdist.checkpoint import Keep, Saver
from hfdist.checkpoint.folder import step_name
from hfdist.checkpoint.mirror import Mirror, Objects, Uploader
from hfdist.checkpoint.piece import WEIGHT, Piece

WITHOUT, FOLDER, SLOW, S3 = "no mirror", "a folder", "a store of 20 MB/s", "an S3 server on this machine"
GOAL = 1.05
KEEP = Keep(newest=2)
SLOW_BYTES_PER_SECOND = 20e6
_STEPS_A_SAVE = 16


class Cost(NamedTuple):
    """Cost of a training that saves several times."""

    training_seconds: float
    """Wall seconds from the first step to the last, with saves."""
    stall_seconds: float
    """Of these, what the saves took."""
    own_cpu_seconds: float
    """CPU seconds of the thread that trains."""
    mirrored_bytes: float
    """Bytes that had reached the mirror by then."""


class SlowObjects(Objects):
    """A store at the end of a slow line, which costs this machine no time of its processor."""

    def write(self, contents: Mapping[str, bytes]) -> None:
        """Write, and wait as the line would."""
        super().write(contents)
        time.sleep(sum(map(len, contents.values())) / SLOW_BYTES_PER_SECOND)


def main() -> None:
    """Measure and show."""
    options = read_options("mirror", __doc__, rounds=7)
    megabytes, num_saves = (4, 2) if options.quick else (8, 3)
    with tempfile.TemporaryDirectory() as folder, _s3_server() as address:
        stores: dict[str, Callable[[str], Objects] | None] = {
            WITHOUT: None,
            FOLDER: lambda name: Objects(f"file://{folder}/mirror/{name}"),
            SLOW: lambda name: SlowObjects(f"file://{folder}/slow/{name}"),
            S3: lambda name: Objects(f"{address}/{name}"),
        }
        turns = {name: partial(_train, Path(folder), store, megabytes, num_saves) for name, store in stores.items()}
        turns_of = interleave(turns, options.rounds)
    costs = {name: median_fields(of_name) for name, of_name in turns_of.items()}
    # Of turns that followed each other: a busy spell of the machine hits both.
    ratios = {
        name: statistics.median(
            own.training_seconds / without.training_seconds
            for own, without in zip(of_name, turns_of[WITHOUT], strict=True)
        )
        for name, of_name in turns_of.items()
    }
    rows = [
        [
            name,
            f"{cost.training_seconds:.2f}",
            f"{ratios[name]:.3f}",
            f"{1e3 * cost.stall_seconds:.0f}",
            f"{cost.own_cpu_seconds / costs[WITHOUT].own_cpu_seconds:.3f}",
            f"{cost.mirrored_bytes / 2**20:.0f}",
        ]
        for name, cost in costs.items()
    ]
    header = [
        "mirror",
        "training s",
        "beside none",
        "stalls ms",
        "CPU of its thread, beside none",
        "mirrored MiB by then",
    ]
    text = (
        f"One process multiplies matrices and saves {megabytes} MiB {num_saves} times, each time with other values. "
        "The uploads share the cores of this machine with the training; the S3 server, moto's, does so, too. "
        f"Medians of {options.rounds} interleaved rounds, and of the ratios in each round."
    )
    section = "\n\n".join(["## A mirror", text, describe_run("benchmarks.mirror", "torch"), markdown(header, rows)])
    measures = [
        Measure(
            what=f"training with a mirror in {name}",
            unit="s",
            ours=costs[name].training_seconds,
            peers={WITHOUT: costs[name].training_seconds / ratios[name]},
            goal=f"at most {GOAL} of none",
            is_met=ratios[name] <= GOAL,
        )
        for name in (FOLDER, SLOW)
    ]
    publish(options, "mirror", section, measures)


def _train(folder: Path, store: Callable[[str], Objects] | None, megabytes: int, num_saves: int) -> Cost:
    run = Path(tempfile.mkdtemp(dir=folder))
    state = torch.ones(megabytes * 2**18)
    pieces = [Piece(name="a", key=WEIGHT, shape=tuple(state.shape), start=0, view=state)]
    uploader = None if store is None else Uploader(Mirror(store(run.name)), KEEP)
    saver, stall_seconds = Saver(), 0.0
    saver.prepare(pieces)
    saver.wait()
    matrix = torch.randn(512, 512)
    begin, begin_cpu = time.monotonic(), time.thread_time()
    for step in range(1, _STEPS_A_SAVE * num_saves + 1):
        for _ in range(8):
            matrix = torch.nn.functional.normalize(matrix @ matrix)
        for saved in saver.take_reports():
            stall_seconds += saved.stall_seconds
            if uploader is not None:
                uploader.put(saved.path)
        if step % _STEPS_A_SAVE == 1:
            state.add_(1)
            held = frozenset[str]() if uploader is None else uploader.held
            keep = Keep(newest=1, held=held)
            saver.save(
                run / step_name(step), step=step, pieces=pieces, state={}, keep=keep, begin_seconds=time.monotonic()
            )
    cost = Cost(
        training_seconds=time.monotonic() - begin,
        stall_seconds=stall_seconds,
        own_cpu_seconds=time.thread_time() - begin_cpu,
        mirrored_bytes=0 if uploader is None else sum(upload.sent.new_bytes for upload in uploader.take_uploads()),
    )
    saver.wait()
    if uploader is not None:
        uploader.end()
        uploader.wait(60)
    return cost


@contextmanager
def _s3_server() -> Iterator[str]:
    """Start a server in a process of its own, and give the address of its bucket."""
    import boto3

    program = (
        "from moto.server import ThreadedMotoServer as Server; server = Server('127.0.0.1', 0, verbose=False);"
        " server.start(); print(*server.get_host_and_port(), flush=True); input()"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stdout is not None
        host, port = server.stdout.readline().split()
        own = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}
        os.environ.update(own, AWS_ENDPOINT_URL=f"http://{host}:{port}")
        boto3.client("s3").create_bucket(Bucket="benchmark")
        try:
            yield "s3://benchmark"
        finally:
            server.kill()


if __name__ == "__main__":
    main()
