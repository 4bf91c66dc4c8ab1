"""Packing whole documents with hfdist, TRL and group_texts: what is filled, what is cut, and documents a CPU-second.

python -m benchmarks.packing --write
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from benchmarks.rounds import interleave, medians
from benchmarks.table import Measure, describe_run, markdown, publish, read_options
from hfdist.data.order.lane_state import Place
from hfdist.data.order.records import Status
from hfdist.data.packing import sequence
from hfdist.data.packing.sequence import INPUT_IDS, Pieces, Shape, make_rows
from hfdist.data.packing.windows import best_fit
from hfdist.data.sources.document_batch import DocumentBatch

LENGTHS = (2048, 8192)
LANES = 48
OURS = "hfdist best_fit"
OURS_IN_LANES = f"hfdist best_fit, {LANES} lanes"
COPIES = "bare copies"
TRL, TRL_WRAPPED, GROUP_TEXTS = "TRL bfd", "TRL wrapped", "group_texts"
GOAL_SHARE, GOAL_SPEED = 0.997, 3.0
_FILL_ID = 2**31 - 1
# What a lane of hfdist gets at a time: as many as are tokenized together.
_CHUNK = 32
# Sequences of a batch.
_TOGETHER = 8
_ALL = slice(None)

Packed = list[NDArray[Any]]
"""Tokens of each sequence, without filling or with `_FILL_ID`."""


class Work(NamedTuple):
    """Documents whose tokens are all the document's own number, so that sequences tell where each one went."""

    dataset: datasets.Dataset
    """A table in memory with a column `input_ids`."""

    @property
    def column(self) -> pa.ListArray:
        """All tokens of the table, and where each document begins."""
        (array,) = self.dataset.data["input_ids"].chunks
        return array

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Tokens of each; shape [documents]."""
        return self.column.value_lengths().to_numpy().astype(np.int64)


class Kept(NamedTuple):
    """What became of the documents."""

    share: float
    """Share of the places of all sequences, at their full length, that hold a token of a document."""
    cut: int
    """Documents that fit into a sequence, and are in two or in part."""
    lost: float
    """Share of the tokens that are in no sequence."""


def main() -> None:
    """Count and time all."""
    documents = {"type": int, "default": 10_000, "help": "of the web-like lengths"}
    options = read_options("packing", __doc__, rounds=7, documents=documents)
    num_documents, num_rounds = 2000 if options.quick else options.documents, options.rounds
    datasets.disable_progress_bars()
    work = _web_like(num_documents)
    rows, measures = [], []
    # Looking through the imports for garbage takes tenths of a second, in whoever's turn it comes.
    gc.collect()
    gc.freeze()
    for length in LENGTHS:
        kept, rates = _measure(work, length, num_rounds)
        rows += [_row(length, name, kept.get(name), rates) for name in rates]
        measures += _measures(length, kept, rates)
    publish(options, "packing", _section(work, rows, num_rounds), measures)


def _measure(work: Work, length: int, num_rounds: int) -> tuple[dict[str, Kept], dict[str, float]]:
    """What became of the documents, and documents a CPU-second, by contender."""
    quick, slow = _contenders(work, length)
    kept = {name: _keep(work, length, pack()) for name, pack in (quick | slow).items()}
    arrays = np.split(work.column.values.to_numpy(), work.column.offsets.to_numpy()[1:-1])
    timers = {name: _timer(pack) for name, pack in (quick | slow | {COPIES: lambda: _copy(arrays)}).items()}
    seconds = interleave({name: timer for name, timer in timers.items() if name not in slow}, num_rounds)
    seconds |= interleave({name: timers[name] for name in slow}, 1 + num_rounds // 4, num_warm_up=0)
    return kept, {name: len(work.sizes) / spent for name, spent in medians(seconds).items()}


def _timer(pack: Callable[[], Any]) -> Callable[[], float]:
    def run() -> float:
        begin = time.process_time()
        pack()
        return time.process_time() - begin

    return run


def _contenders(work: Work, length: int) -> tuple[dict[str, Callable[[], Packed]], dict[str, Callable[[], Packed]]]:
    """Those that are timed in all rounds, and those that take a hundred times as long."""
    lanes = [slice(lane, None, LANES) for lane in range(LANES)]
    quick = {
        OURS: lambda: list(_ours(work, length)),
        OURS_IN_LANES: lambda: [ids for lane in lanes for ids in _ours(work, length, lane)],
    }
    slow = {GROUP_TEXTS: lambda: _columns(work.dataset.map(_group(length), batched=True))}
    try:
        from trl.data_utils import pack_dataset
    except ImportError:
        return quick, slow

    def pack(strategy: str) -> Packed:
        return _columns(pack_dataset(work.dataset, length, strategy, {"load_from_cache_file": False}))

    quick |= {TRL: lambda: pack("bfd"), TRL_WRAPPED: lambda: pack("wrapped")}
    return quick, slow


def _ours(work: Work, length: int, which: slice = _ALL) -> Iterator[NDArray[np.int32]]:
    """Make rows with tokens, positions and labels; give the tokens."""
    for batch in _batches(work, length, which):
        yield from make_rows(Pieces.of(batch), np.int32)[INPUT_IDS].reshape(-1, length)


def _batches(work: Work, length: int, which: slice = _ALL) -> Iterator[list[sequence.PackedSequence]]:
    sequences = best_fit(_chunks(work, which), 0, Shape(length, _FILL_ID), ("benchmark",))
    while batch := list(islice(sequences, _TOGETHER)):
        yield batch


def _chunks(work: Work, which: slice) -> Iterator[tuple[Place, DocumentBatch]]:
    """Documents of the table, as a lane reads them: their tokens stay where they are."""
    tokens, offsets = work.column.values.to_numpy(), work.column.offsets.to_numpy().astype(np.int64)
    numbers = np.arange(len(offsets) - 1)[which]
    starts, lengths, nothing = offsets[numbers], np.diff(offsets)[numbers], np.zeros_like(numbers)
    everything = DocumentBatch(numbers, [tokens], nothing, starts, lengths, nothing, nothing + Status.trained, {})
    for start in range(0, len(numbers), _CHUNK):
        yield Place(0, start), everything.part(start, start + _CHUNK)


def _copy(arrays: Sequence[NDArray[np.int32]]) -> None:
    """All tokens, positions and labels, written once, with no thought of what goes where."""
    counting = np.arange(max(map(len, arrays)), dtype=np.int32)
    for start in range(0, len(arrays), _CHUNK):
        own = arrays[start : start + _CHUNK]
        block = np.empty((3, sum(map(len, own))), dtype=np.int32)
        np.concatenate(own, out=block[0])
        np.concatenate([counting[: len(tokens)] for tokens in own], out=block[1])
        block[2] = block[0]


def _columns(packed: datasets.Dataset) -> Packed:
    """Views into the table."""
    arrays = [chunk for chunk in packed.data["input_ids"].chunks if len(chunk)]
    return [
        part
        for array in arrays
        for part in np.split(array.flatten().to_numpy(), np.cumsum(array.value_lengths().to_numpy())[:-1])
    ]


def _group(length: int) -> Callable[[dict[str, list[list[int]]]], dict[str, list[list[int]]]]:
    """`group_texts` of transformers' run_clm.py; what is left over of 1,000 documents is dropped."""

    def group_texts(examples: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        concatenated = [token for document in examples["input_ids"] for token in document]
        total = len(concatenated) // length * length
        chunks = [concatenated[start : start + length] for start in range(0, total, length)]
        return {"input_ids": chunks, "labels": chunks.copy()}

    return group_texts


def _keep(work: Work, length: int, packed: Packed) -> Kept:
    sizes = work.sizes
    found = np.zeros(len(sizes), dtype=np.int64)
    num_sequences = np.zeros(len(sizes), dtype=np.int64)
    for tokens in packed:
        documents, counts = np.unique(tokens[tokens != _FILL_ID], return_counts=True)
        found[documents] += counts
        num_sequences[documents] += 1
    if (found > sizes).any():
        raise RuntimeError("a token is in two sequences")
    is_cut = (sizes <= length) & ((num_sequences > 1) | (found < sizes))
    return Kept(
        share=float(found.sum() / (length * len(packed))),
        cut=int(is_cut.sum()),
        lost=float(1 - found.sum() / sizes.sum()),
    )


def _web_like(num_documents: int) -> Work:
    """Lengths as of web pages: half of them below 424 tokens, a mean of 700, the longest of tens of thousands."""
    lengths = np.random.default_rng(0).lognormal(6.05, 1.0, num_documents)
    sizes = np.rint(lengths).astype(np.int64).clip(8, 100_000)
    tokens = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    ends = np.cumsum(sizes)
    column = pa.ListArray.from_arrays(np.concatenate([[0], ends]).astype(np.int32), pa.array(tokens))
    return Work(datasets.Dataset(pa.table({"input_ids": column})))


def _row(length: int, name: str, kept: Kept | None, rates: dict[str, float]) -> list[str]:
    counted = ["-"] * 3 if kept is None else [f"{kept.share:.2%}", f"{kept.cut:,}", f"{kept.lost:.1%}"]
    return [f"{length:,}", name, *counted, f"{rates[name]:,.0f}", f"{rates[OURS] / rates[name]:.2f}x"]


def _measures(length: int, kept: dict[str, Kept], rates: dict[str, float]) -> list[Measure]:
    missing: dict[str, float | str] = {} if TRL in kept else {TRL: "not installed"}
    shown = [name for name in (TRL, TRL_WRAPPED, GROUP_TEXTS) if name in kept]
    return [
        Measure(
            what=f"places that hold a token, web-like lengths, sequences of {length:,}",
            unit="%",
            ours=100 * kept[OURS].share,
            peers=missing | {name: 100 * kept[name].share for name in shown},
            goal=f">= {GOAL_SHARE:.1%}",
            is_met=kept[OURS].share >= GOAL_SHARE,
        ),
        Measure(
            what=f"documents cut without need, sequences of {length:,}",
            unit="",
            ours=kept[OURS].cut,
            peers=missing | {name: f"{kept[name].cut:,}" for name in shown},
            goal="none",
            is_met=kept[OURS].cut == 0,
        ),
        Measure(
            what=f"documents packed a CPU-second, sequences of {length:,}",
            unit="",
            ours=rates[OURS],
            peers=missing | {name: rates[name] for name in shown},
            limits={COPIES: rates[COPIES]},
            goal=f">= {GOAL_SPEED:g}x TRL",
            is_met=rates[OURS] >= GOAL_SPEED * rates[TRL] if TRL in rates else None,
        ),
    ]


def _section(work: Work, rows: list[list[str]], num_rounds: int) -> str:
    described = (
        f"{len(work.sizes):,} documents with lengths as of web pages, {work.sizes.sum() / 1e6:.1f} M tokens, median "
        f"{np.median(work.sizes):,.0f}, longest {work.sizes.max():,}"
    )
    versions = [*(["trl"] if any(TRL in row for row in rows) else []), "datasets", "pyarrow", "numpy"]
    header = ["sequence", "packed by", "filled", "cut without need", "lost", "documents/s", "hfdist is"]
    return (
        "## Packing documents\n\n"
        f"{described}. Filled: places of all sequences at their full length that hold a token of a document. Cut "
        "without need: documents that would fit into a sequence, and are in two or in part. Lost: tokens that are in "
        "no sequence. All three are counted in what each gives. Documents per second of CPU time, without tokenizing, "
        "from a table of Arrow in memory, what was imported kept out of garbage collections. hfdist gives tokens, "
        "positions that restart and labels; TRL's `pack_dataset` gives tokens and lengths; group_texts gives tokens "
        "twice, and no positions. Bare copies: tokens, positions and labels written once, in the order in which "
        "documents come. hfdist packs windows of at most 1,024 documents while it reads, and can go on at each "
        "sequence; the others pack the data before the training, TRL's Trainer and group_texts 1,000 documents "
        f"at a time. `{LANES} lanes`: the same documents in as many windows side by side as `data.lanes` has by "
        f"default. Medians of {num_rounds} interleaved rounds after one to warm up; of "
        f"{GROUP_TEXTS}, {1 + num_rounds // 4}.\n\n"
        f"{describe_run('benchmarks.packing', *versions)}\n\n"
        f"{markdown(header, rows)}"
    )


if __name__ == "__main__":
    main()
