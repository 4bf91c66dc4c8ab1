"""hfdist's token stream beside `datasets`, mosaicml-streaming and litdata, in one run.

    python -m benchmarks.data --write

The peers' packages are those of `benchmarks/peers/data.txt`. `--quick` takes what needs none of them, and a tiny
corpus.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.data.contenders import CONTENDERS
from benchmarks.data.rounds import Failure, Row, run_rounds
from benchmarks.data.tables import tables
from benchmarks.data.work import BATCH_SIZE, NUM_WORKERS, SEQUENCE_LENGTH, VOCAB_SIZE, Work, make_work
from benchmarks.overlay import pinned
from benchmarks.table import Measure, describe_run, publish, read_options


def main() -> None:
    """Measure, show the tables, and write them down if asked to."""
    options = read_options(
        "data",
        __doc__,
        rounds=2,
        megabytes={"type": int, "default": 12, "help": "of text; few would lie in the peers' buffers whole"},
        folder={"type": Path, "help": "where the temporary folder is made"},
    )
    text_megabytes, copies, num_rounds = options.megabytes, 4, options.rounds
    if options.quick:
        text_megabytes, copies = 1, 1
    numbers = [
        number
        for number, contender in enumerate(CONTENDERS)
        if (contender.quick if options.quick else not contender.only_resumes)
    ]
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        work = make_work(Path(folder), text_bytes=text_megabytes * 10**6, token_copies=copies)
        rows = run_rounds(Path(folder), numbers, num_rounds, at_once=len(numbers) if options.quick else 1)
    section = "\n\n".join([_preamble(work, text_megabytes, num_rounds), tables(rows), _NOTES])
    publish(options, "data", section, _measures(rows))
    if any(row.contender.library == "hfdist" and isinstance(row.result, Failure) for row in rows):
        sys.exit("hfdist failed: see the tables")


def _preamble(work: Work, text_megabytes: int, num_rounds: int) -> str:
    peers = pinned("data", "mosaicml-streaming", "litdata", "torchdata")
    return (
        "## Reading data, beside the peers\n\n"
        f"{text_megabytes} MB of Python source, cut to the lengths of web pages, in 8 parquet shards of uneven size, "
        f"{work.num_tokens / 1e6:.1f} M tokens of a BPE with {VOCAB_SIZE} entries; tokenized beforehand: "
        f"{work.token_copies} times as many. Sequences of {SEQUENCE_LENGTH}, batches of {BATCH_SIZE}, one loader "
        f"process, one thread a process, local disk. Medians of {num_rounds} interleaved rounds, every run in a fresh "
        "process. Rates are those between 10 % and 90 % of an epoch; CPU seconds are those of the process and its "
        "workers. `first batch` and `resume at 90 %` (of one run) count from the end of the imports to the "
        "first batch; what was imported is kept out of garbage collections, and of token files hfdist has the "
        "tokenizer loaded, which the peers do not ask for. In brackets: as a multiple of the table's first row; more "
        "is better in the two columns of rates, less in the others.\n\n"
        f"{describe_run('benchmarks.data', 'torch', 'datasets', pinned=peers)}"
    )


_NOTES = """\
* What they give: hfdist gives position ids that restart at each document and labels beside the tokens; the others \
tokens only.
* `datasets` mixes shards and a buffer of 1,000 rows. Where a shard that it mixes ends, it can wait 5 s for threads. \
run_clm.py drops what is left over of each 1,000 documents.
* mosaicml-streaming and litdata have no tokenizing path of their own: both write tokens beforehand, so they are in \
the second table only. litdata drops what is left over of each chunk.
* Memory: proportional set size of the process and its workers, so that pages that they share, files mapped among \
them, count once."""


def _measures(rows: Sequence[Row]) -> list[Measure]:
    """A row of the one table for each way in which hfdist reads."""
    return [_measure(row, rows) for row in rows if row.contender.library == "hfdist"]


def _measure(ours: Row, rows: Sequence[Row]) -> Measure:
    path = "tokenized beforehand" if ours.contender.tokenized else f"text, {ours.contender.variant}"
    peers = {
        f"{row.contender.library} ({row.contender.variant})": _rate(row)
        for row in rows
        if row.contender.library != "hfdist" and row.contender.tokenized == ours.contender.tokenized
    }
    rates, own = [rate for rate in peers.values() if not isinstance(rate, str)], _rate(ours)
    # The peers have no tokens of an epoch before.
    is_like = not ours.contender.options.get("warm")
    return Measure(
        what=f"{path}, {SEQUENCE_LENGTH:,} tokens, workers: {NUM_WORKERS}",
        unit="Mtokens per CPU second",
        ours=0.0 if isinstance(own, str) else own,
        peers=peers,
        goal="the best peer" if is_like else "",
        is_met=not isinstance(own, str) and own >= max(rates) if is_like and rates else None,
    )


def _rate(row: Row) -> float | str:
    return row.result.reason if isinstance(row.result, Failure) else row.result.tokens_per_cpu_second / 1e6


if __name__ == "__main__":
    main()
