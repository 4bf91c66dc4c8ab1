"""Tokenized data to batches: tokens a CPU second, beside the peers and the machine: `python -m benchmarks.loader`."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.data.readers import Reader
from benchmarks.data.rounds import without_shared_memory
from benchmarks.data.work import BATCH_SIZE, make_work
from benchmarks.overlay import UnavailableError, peer_environment, pinned
from benchmarks.rounds import medians_or_reasons
from benchmarks.table import Measure, describe_run, markdown, publish, read_options, rounded

LENGTHS = (2048, 8192)
GOAL_MTOKENS = 300
CPU_SECONDS_OF_TURN, QUICK_SECONDS = 0.25, 0.02


class Row(NamedTuple):
    """One row."""

    name: str
    loader: str
    """As in `benchmarks.data.contenders`."""
    options: dict[str, bool]
    workers: int
    gives: str
    needs_peers: bool = False


_OURS, _ALL = "hfdist", "tokens, positions, labels"
_REPLAYS = {"stateful": False}
ROWS = (
    Row(_OURS, "ours:Tokens", {}, 0, _ALL),
    Row("hfdist, a worker", "ours:Tokens", {}, 1, _ALL),
    Row("datasets streaming", "hf_datasets:Tokens", _REPLAYS, 0, "tokens"),
    Row("datasets map-style", "hf_datasets:MapStyle", {}, 0, "tokens"),
    Row("litdata", "litdata_tokens:Tokens", {}, 0, "tokens", needs_peers=True),
    Row("mosaicml-streaming", "mosaic:Tokens", {}, 0, "tokens", needs_peers=True),
    Row("memory map", "limits:Memmap", {}, 0, "tokens"),
    Row("zero-copy Arrow", "limits:Arrow", {}, 0, "tokens"),
)
_LIMITS = ("memory map", "zero-copy Arrow")


def main() -> None:
    """Measure all at each length, in turns."""
    options = read_options("loader", __doc__, rounds=3)
    megabytes, copies = (2, 2) if options.quick else (16, 4)
    lengths = LENGTHS[:1] if options.quick else LENGTHS
    with tempfile.TemporaryDirectory() as name:
        work = make_work(Path(name), text_bytes=megabytes * 10**6, token_copies=copies)
        found = {length: _measure(Path(name), length, options) for length in lengths}
    rows = [
        [row.name, row.gives, str(row.workers), *(rounded(found[length][row.name]) for length in lengths)]
        for row in ROWS
    ]
    columns = [f"Mtokens per CPU second, {length:,}" for length in lengths]
    peers = pinned("data", "litdata", "mosaicml-streaming")
    section = (
        "## Tokenized data to batches\n\n"
        f"{copies} x {work.num_tokens / 1e6:.1f} M tokens (uint16) of Python source cut to the lengths of web pages, "
        f"shuffled, batches of {BATCH_SIZE} in int64, local disk, one thread a process. CPU seconds are those of the "
        f"process and its worker. Medians of {options.rounds} interleaved turns of "
        f"{QUICK_SECONDS if options.quick else CPU_SECONDS_OF_TURN} CPU seconds, or up to the first end of an epoch "
        "after a quarter of that, what was imported kept out of garbage collections; the start of "
        "an epoch does not count, in which `datasets` streaming fills a buffer of 1,000 rows, at 8,192 tokens two "
        "fifths of an epoch. hfdist packs documents end to end with 48 lanes, and keeps its cursor's digests; the "
        "others read rows that were cut beforehand.\n\n"
        f"{describe_run('benchmarks.loader', 'torch', 'datasets', pinned=peers)}\n\n"
        f"{markdown(['reader', 'gives', 'workers', *columns], rows)}"
    )
    publish(options, "loader", section, [_row_of_table(length, found[length]) for length in lengths])


def _measure(folder: Path, length: int, options: argparse.Namespace) -> dict[str, float | str]:
    """Million tokens a CPU second of each reader, or the reason why there is none."""
    missing: dict[str, float | str] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_shared_memory())
        started: dict[str, Reader] = {}
        for row in ROWS:
            try:
                # All start at once: most of that is imports.
                started[row.name] = _start(row, folder, length, options.quick)
                stack.callback(started[row.name].end)
            except UnavailableError as error:
                missing[row.name] = str(error)
        turns: dict[str, Callable[[], float]] = {}
        for name, reader in started.items():
            try:
                reader.wait()
                turns[name] = partial(_turn, reader, QUICK_SECONDS if options.quick else CPU_SECONDS_OF_TURN)
            except UnavailableError as error:
                missing[name] = str(error)
        return missing | medians_or_reasons(turns, options.rounds, num_warm_up=int(not options.quick))


def _start(row: Row, folder: Path, length: int, is_quick: bool) -> Reader:
    if row.needs_peers and is_quick:
        raise UnavailableError("left out by --quick")
    variables = peer_environment("data") if row.needs_peers else {}
    settings = {"BENCHMARK_SEQUENCE_LENGTH": str(length), "BENCHMARK_WORKERS": str(row.workers)}
    return Reader(row.loader, row.options, folder, folder / f"{row.name}.log", {**variables, **settings})


def _turn(reader: Reader, cpu_seconds: float) -> float:
    return reader.read(cpu_seconds) / 1e6


def _row_of_table(length: int, found: dict[str, float | str]) -> Measure:
    ours = found[_OURS]
    assert isinstance(ours, float), ours
    others = {name: figure for name, figure in found.items() if not name.startswith(_OURS)}
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
