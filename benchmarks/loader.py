"""Tokenized data to batches: tokens a CPU second, beside the peers and the machine: `python -m benchmarks.loader`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.data.work import BATCH_SIZE, make_work
from benchmarks.overlay import UnavailableError, peer_environment, pinned
from benchmarks.report import describe_run, markdown
from benchmarks.rounds import interleave, medians
from benchmarks.table import Measure, add_options, publish

LENGTHS = (2048, 8192)
GOAL_MTOKENS = 300
_ROOT = Path(__file__).resolve().parents[1]


class Reader(NamedTuple):
    """One row."""

    name: str
    loader: str
    """As in `benchmarks.data.contenders`."""
    options: dict[str, bool]
    workers: int
    gives: str
    needs_peers: bool = False


_OURS, _ALL = "hfdist", "tokens, positions, labels"
_SHUFFLED = {"shuffled": True, "stateful": False}
READERS = (
    Reader(_OURS, "ours:Tokens", {}, 0, _ALL),
    Reader("hfdist, a worker", "ours:Tokens", {}, 1, _ALL),
    Reader("datasets streaming", "hf_datasets:Tokens", _SHUFFLED, 0, "tokens"),
    Reader("datasets map-style", "hf_datasets:MapStyle", {}, 0, "tokens"),
    Reader("litdata", "litdata_tokens:Tokens", {}, 0, "tokens", needs_peers=True),
    Reader("mosaicml-streaming", "mosaic:Tokens", {}, 0, "tokens", needs_peers=True),
    Reader("memory map", "limits:Memmap", {}, 0, "tokens"),
    Reader("zero-copy Arrow", "limits:Arrow", {}, 0, "tokens"),
)
_LIMITS = ("memory map", "zero-copy Arrow")


def main() -> None:
    """Measure all at each length, in turns."""
    parser = add_options(argparse.ArgumentParser(prog="python -m benchmarks.loader", description=__doc__))
    parser.add_argument("--rounds", type=int, default=3, help="timed turns of each reader")
    options = parser.parse_args()
    megabytes, copies = (2, 2) if options.quick else (16, 4)
    lengths = LENGTHS[:1] if options.quick else LENGTHS
    with tempfile.TemporaryDirectory() as name:
        work = make_work(Path(name), text_bytes=megabytes * 10**6, token_copies=copies)
        found = {length: _measure(Path(name), length, options) for length in lengths}
    rows = [
        [reader.name, reader.gives, str(reader.workers), *(_cell(found[length][reader.name]) for length in lengths)]
        for reader in READERS
    ]
    columns = [f"Mtokens per CPU second, {length:,}" for length in lengths]
    peers = pinned("data", "litdata", "mosaicml-streaming")
    section = (
        "## Tokenized data to batches\n\n"
        f"{copies} x {work.num_tokens / 1e6:.1f} M tokens (uint16) of Python source cut to the lengths of web pages, "
        f"shuffled, batches of {BATCH_SIZE} in int64, local disk, one thread a process. CPU seconds are those of the "
        f"process and its worker. Medians of {1 if options.quick else options.rounds} interleaved turns; the start of "
        "an epoch does not count. hfdist packs documents end to end with 48 lanes, and keeps its cursor's digests; the "
        "others read rows that were cut beforehand.\n\n"
        f"{describe_run('benchmarks.loader', 'torch', 'datasets', pinned=peers)}\n\n"
        f"{markdown(['reader', 'gives', 'workers', *columns], rows)}"
    )
    publish(options, "loader", section, [_row(length, found[length]) for length in lengths])


def _measure(folder: Path, length: int, options: argparse.Namespace) -> dict[str, float | str]:
    """Million tokens a CPU second of each reader, or the reason why there is none."""
    found: dict[str, float | str] = {}
    with contextlib.ExitStack() as stack:
        turns: dict[str, Callable[[], float]] = {}
        for reader in READERS:
            try:
                environment = peer_environment("data") if reader.needs_peers and not options.quick else {}
                if reader.needs_peers and options.quick:
                    raise UnavailableError("left out by --quick")
                turns[reader.name] = stack.enter_context(_serve(reader, folder, length, environment, options.quick))
            except UnavailableError as error:
                found[reader.name] = str(error)
        num_rounds, num_warm_up = (1, 0) if options.quick else (options.rounds, 1)
        return found | {**medians(interleave(turns, num_rounds, num_warm_up=num_warm_up))}


@contextlib.contextmanager
def _serve(
    reader: Reader, folder: Path, length: int, environment: dict[str, str], quick: bool
) -> Iterator[Callable[[], float]]:
    """Start a reader's process; give a call that lets it read for a moment.

    Raises:
        UnavailableError: it ends before it is ready.
    """
    settings = {"BENCHMARK_SEQUENCE_LENGTH": str(length), "BENCHMARK_WORKERS": str(reader.workers)}
    threads = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    log = folder / f"{reader.name}.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.data.served", reader.loader, json.dumps(reader.options), str(folder)],
            cwd=_ROOT,
            env={**os.environ, **environment, **settings, **threads, "HF_HOME": str(folder / "hf")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    lines, requests = process.stdout, process.stdin

    def turn() -> float:
        requests.write(f"{0.1 if quick else 0.5}\n")
        requests.flush()
        return float(_answer(lines)) / 1e6

    def _answer(lines: Iterator[str]) -> str:
        for line in lines:
            # Libraries write to the same place.
            if line.strip() == "ready" or line.strip().replace(".", "").replace("e+", "").isdigit():
                return line.strip()
        said = [line for line in log.read_text().splitlines() if line.strip()] or ["nothing was said"]
        raise UnavailableError(said[-1])

    try:
        _answer(lines)
        yield turn
    finally:
        requests.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _cell(figure: float | str) -> str:
    return figure if isinstance(figure, str) else f"{figure:.0f}"


def _row(length: int, found: dict[str, float | str]) -> Measure:
    ours = found[_OURS]
    assert isinstance(ours, float), ours
    others = {name: figure for name, figure in found.items() if name != _OURS}
    return Measure(
        what=f"tokenized to batches, {length:,} tokens, with positions and labels",
        unit="Mtokens per CPU second",
        ours=ours,
        peers={name: figure for name, figure in others.items() if name not in _LIMITS},
        limits={name: figure for name, figure in others.items() if name in _LIMITS},
        goal=f"{GOAL_MTOKENS}",
        is_met=ours >= GOAL_MTOKENS,
    )


if __name__ == "__main__":
    main()
