"""From a saved cursor to the first batch, at any sample and any number of ranks: `python -m benchmarks.resume`.

The cursor at a sample is made by arithmetic, a place in an epoch that such a sample lies in, and read on from: so ten
million sequences need not be read first. What an uninterrupted stream gives from there is what each resume must give.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.data.contenders import CONTENDERS
from benchmarks.data.ours import Tokens
from benchmarks.data.rounds import Failure, run_rounds
from benchmarks.data.work import SEQUENCE_LENGTH, Work, make_work
from benchmarks.report import describe_run, markdown
from benchmarks.table import Measure, add_options, publish
from hfdist.config.data import DataConfig
from hfdist.data import Corpus, Cursor, TokenStream, open_corpus

GOAL_MILLISECONDS = 10
OURS = "hfdist"
BATCH = 8
"""Of the run, whatever the number of ranks."""
_COMPARED_BATCHES = 4


def main() -> None:
    """Measure hfdist at all samples and ranks, and the peers at 90 % of an epoch."""
    parser = add_options(argparse.ArgumentParser(prog="python -m benchmarks.resume", description=__doc__))
    parser.add_argument("--rounds", type=int, default=5, help="resumes of each")
    options = parser.parse_args()
    samples = [10**3, 10**7] if options.quick else [10**3, 10**4, 10**5, 10**6, 10**7]
    sizes = (1, 2) if options.quick else (1, 2, 4, 8)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        work = make_work(folder, text_bytes=(1 if options.quick else 4) * 10**6, token_copies=1)
        ours = Tokens()
        ours.prepare(work)
        config = replace(ours.config(work), workers=0)
        rows, medians = _resumes(work, config, samples, sizes, 1 if options.quick else options.rounds)
        peers = {} if options.quick else _peers(folder, options.rounds)
    header = ["sample", *(f"{size} ranks ms" for size in sizes), "opening ms", "same batches"]
    others = markdown(["at 90 % of an epoch", "ms"], [[name, _cell(figure)] for name, figure in peers.items()])
    section = (
        "## Resuming\n\n"
        f"Sequences of {SEQUENCE_LENGTH}, batches of {BATCH} over all ranks, from token files, `data.workers=0`, the "
        "corpus open; from the cursor to the first batch of the slowest rank, wall time, medians. Opening: the corpus "
        "and the stream. Same batches: those that follow are compared with the uninterrupted stream's. Cursors at a "
        "sample are made by arithmetic and read on from. At 90 % of an epoch: a new process and one loader process, "
        "from the end of the imports, so that opening counts for all.\n\n"
        f"{describe_run('benchmarks.resume', 'torch', 'datasets')}\n\n{markdown(header, rows)}\n\n{others}"
    )
    slowest = max(medians)
    measures = [
        Measure(
            what="saved cursor to the first batch, at 1e3 to 1e7 samples and any ranks, the slowest",
            unit="ms",
            ours=slowest,
            goal=f"at most {GOAL_MILLISECONDS}",
            is_met=slowest <= GOAL_MILLISECONDS,
        )
    ]
    ours_opened = next((figure for name, figure in peers.items() if name.startswith(OURS)), None)
    if isinstance(ours_opened, float):
        others_opened = {name: figure for name, figure in peers.items() if not name.startswith(OURS)}
        measures.append(
            Measure(
                what="the same in a new process, opening included", unit="ms", ours=ours_opened, peers=others_opened
            )
        )
    publish(options, "resume", section, measures)


def _resumes(
    work: Work, config: DataConfig, samples: list[int], sizes: tuple[int, ...], num_rounds: int
) -> tuple[list[list[str]], list[float]]:
    """Rows of the table, and all medians in milliseconds."""
    rows, every = [], []
    for sample in samples:
        began = time.perf_counter()
        corpus = open_corpus(config)
        stream = _stream(corpus, work, config, 0, 1)
        opening = time.perf_counter() - began
        stream.load_state_dict(_cursor_at(stream, sample))
        before = stream.loader(micro_batch_size=BATCH).__iter__()
        for _ in range(sample // BATCH % 32 + 1):
            next(before)
        state = stream.state_dict()
        expected = [next(before)["input_ids"] for _ in range(_COMPARED_BATCHES)]
        found, is_same = [], True
        for size in sizes:
            turns = [_resume(corpus, work, config, state, size, expected) for _ in range(num_rounds)]
            found.append(1e3 * statistics.median(seconds for seconds, _ in turns))
            is_same &= all(same for _, same in turns)
        every += found
        if not is_same:
            raise SystemExit(f"other batches after a resume at sample {sample}")
        rows.append([f"{sample:,}", *(f"{ms:.1f}" for ms in found), f"{1e3 * opening:.0f}", "yes"])
    return rows, every


def _cursor_at(stream: TokenStream, sample: int) -> dict[str, Any]:
    """A cursor behind `sample` sequences, at the start of the epoch in which it lies."""
    state = Cursor.from_json(stream.state_dict())
    lanes = state.num_lanes
    per_epoch = max(stream.corpus.num_documents // 2 // lanes, 1)
    rounds = sample // lanes
    places = {}
    for lane, own in state.lanes.items():
        (progress,) = own.pools
        place = progress.place._replace(epoch=rounds // per_epoch)
        places[lane] = own._replace(pools=(progress._replace(place=place, sequences=rounds),))
    return replace(state, samples=rounds * lanes, lanes=places).to_json()


def _resume(
    corpus: Corpus, work: Work, config: DataConfig, state: dict[str, Any], size: int, expected: list[torch.Tensor]
) -> tuple[float, bool]:
    """Seconds of the slowest rank, and whether all ranks together give what was to come."""
    slowest, shares = 0.0, []
    for rank in range(size):
        stream = _stream(corpus, work, config, rank, size)
        began = time.perf_counter()
        stream.load_state_dict(state)
        batches = iter(stream.loader(micro_batch_size=BATCH // size))
        first = next(batches)
        slowest = max(slowest, time.perf_counter() - began)
        shares.append([first["input_ids"], *(next(batches)["input_ids"] for _ in expected[1:])])
    together = [torch.stack(parts, dim=1).flatten(0, 1) for parts in zip(*shares, strict=True)]
    return slowest, all(torch.equal(ours, theirs) for ours, theirs in zip(together, expected, strict=True))


def _stream(corpus: Corpus, work: Work, config: DataConfig, rank: int, size: int) -> TokenStream:
    return TokenStream(corpus, work.tokenizer, config, data_rank=rank, data_size=size)


def _peers(folder: Path, num_rounds: int) -> dict[str, float | str]:
    """Milliseconds, or the reason why there are none; hfdist's among them."""
    numbers = [n for n, one in enumerate(CONTENDERS) if one.tokenized]
    peers: dict[str, float | str] = {}
    for contender, result in run_rounds(folder, numbers, min(num_rounds, 2)):
        name = f"{contender.library}, {contender.variant}, {contender.resumes_by}"
        if isinstance(result, Failure):
            peers[name] = result.reason
        else:
            peers[name if result.resumes_exactly else f"{name}, inexact"] = 1e3 * result.resume_seconds
    return peers


def _cell(figure: float | str) -> str:
    return figure if isinstance(figure, str) else f"{figure:.0f}"


if __name__ == "__main__":
    main()
