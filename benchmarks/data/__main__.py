"""hfdist's token stream beside `datasets`, mosaicml-streaming and litdata, in one run.

    python -m benchmarks.data --write

In an environment that has hfdist, the peers come with one command, without the vision and cloud packages that they
ask for and that reading tokens from a disk does not need:

    pip install -c constraints.txt --no-deps mosaicml-streaming==0.13.0 litdata==0.2.76 torchdata==0.11.0 \
        Brotli python-snappy cramjam zstd catalogue lightning-utilities boto3 botocore s3transfer jmespath \
        python-dateutil six requests urllib3 charset-normalizer certifi

A peer that is not installed is reported as such; `--quick` takes what needs none, and a tiny corpus.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.data.contenders import CONTENDERS
from benchmarks.data.rounds import Failure, run_rounds
from benchmarks.data.tables import tables
from benchmarks.data.work import BATCH_SIZE, SEQUENCE_LENGTH, VOCAB_SIZE, Work, make_work
from benchmarks.report import RESULTS, describe_machine, write_section


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables, and write them down if asked to."""
    options = _options(arguments)
    command = " ".join(["python -m benchmarks.data", *(sys.argv[1:] if arguments is None else arguments)])
    started = datetime.datetime.now(datetime.UTC)
    text_megabytes, copies, num_rounds = (2, 1, 1) if options.quick else (options.megabytes, 4, options.rounds)
    numbers = [number for number, contender in enumerate(CONTENDERS) if contender.quick or not options.quick]
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        work = make_work(Path(folder), text_bytes=text_megabytes * 10**6, token_copies=copies)
        rows = run_rounds(Path(folder), numbers, num_rounds)
    section = "\n\n".join([_preamble(work, text_megabytes, num_rounds, started, command), tables(rows), _NOTES])
    print(section)
    if options.write:
        write_section(RESULTS, "data", section)
    if any(row.contender.library == "hfdist" and isinstance(row.result, Failure) for row in rows):
        sys.exit("hfdist failed: see the tables")


def _preamble(work: Work, text_megabytes: int, num_rounds: int, started: datetime.datetime, command: str) -> str:
    packages = ["torch", "datasets", "mosaicml-streaming", "litdata", "torchdata"]
    return (
        "## Reading data, beside the peers\n\n"
        f"{text_megabytes} MB of Python source, cut to the lengths of web pages, in 8 parquet shards of uneven size, "
        f"{work.num_tokens / 1e6:.1f} M tokens of a BPE with {VOCAB_SIZE} entries; tokenized beforehand: "
        f"{work.token_copies} times as many. Sequences of {SEQUENCE_LENGTH}, batches of {BATCH_SIZE}, one loader "
        f"process, one thread a process, local disk. Medians of {num_rounds} interleaved rounds, every run in a fresh "
        "process. Rates are those between 10 % and 90 % of an epoch; CPU seconds are those of the process and its "
        "workers. `first batch` and `resume at 90 %` count from the end of the imports to the first batch. In "
        "brackets: as a multiple of the table's first row; more is better in the two columns of rates, less in the "
        "others.\n\n"
        f"{describe_machine(*filter(_is_installed, packages))}; {started:%Y-%m-%d}; `{command}`"
    )


_NOTES = """\
* What they give: hfdist gives position ids that restart at each document and labels beside the tokens; the others \
tokens only.
* `datasets` mixes shards and a buffer of 1,000 rows, whose contents its state_dict leaves out: it says so and fills \
the buffer anew. Where a shard that it mixes ends, it can wait 5 s for threads. run_clm.py drops what is left over of \
each 1,000 documents.
* mosaicml-streaming and litdata have no tokenizing path of their own: both write tokens beforehand, so they are in \
the second table only. litdata drops what is left over of each chunk.
* Memory: proportional set size of the process and its workers, so that pages that they share, files mapped among \
them, count once."""


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=16, help="size of the corpus as text")
    parser.add_argument("--rounds", type=int, default=3, help="timed runs of every contender")
    parser.add_argument("--quick", action="store_true", help="hfdist and datasets, a tiny corpus, one round")
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made")
    parser.add_argument("--write", action="store_true", help=f"put the tables into {RESULTS.name}")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
