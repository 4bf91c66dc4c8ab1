"""From a saved cursor to the first batch, at any sample and any number of ranks: `python -m benchmarks.resume`.

The cursor at a sample is made by arithmetic, at about the place in the epoch at which such a sample lies and at others
spread over that epoch, and read on from: so ten million sequences need not be read first. What an uninterrupted stream
gives from there is what each resume must give.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.data.contenders import CONTENDERS
from benchmarks.data.ours import Tokens
from benchmarks.data.rounds import Failure, run_rounds
from benchmarks.data.work import SEQUENCE_LENGTH, Work, make_work
from benchmarks.overlay import pinned
from benchmarks.rounds import median_fields
from benchmarks.table import Measure, describe_run, markdown, publish, read_options, rounded
from hfdist.config.data import DataConfig
from hfdist.data import Corpus, Cursor, TokenStream, open_corpus
from hfdist.testing import run_ranks

GOAL_MILLISECONDS = 10
OURS = "hfdist"
BATCH = 8
"""Sequences of a global batch, whatever the number of ranks."""
SHARES = (0.02, 0.25, 0.5, 0.75, 0.98)
"""Shares of an epoch: places in it from which is resumed."""
_COMPARED_BATCHES = 4
_MOST_BATCHES_BEFORE = 7
_NUM_PEER_RESUMES = 2
_PEER_MEGABYTES, _PEER_COPIES = 12, 4
_PEERS = ("litdata", "mosaicml-streaming", "torchdata")


class Cost(NamedTuple):
    """Cost of a resume for the slowest rank, from the cursor to the first batch."""

    wall_milliseconds: float
    cpu_milliseconds: float


class FirstTouch(NamedTuple):
    """What a process takes that has not seen the corpus."""

    opening_milliseconds: float
    resume: Cost
    again: Cost


class Resumes(NamedTuple):
    """Resumes at one sample."""

    sample: int
    epoch: int
    slowest: dict[int, Cost]
    """The slowest median of all places in the epoch, by the number of ranks."""


class Settings(NamedTuple):
    """What is resumed."""

    work: Work
    config: DataConfig
    samples: Sequence[int]
    sizes: Sequence[int]
    num_rounds: int


def main() -> None:
    """Measure hfdist at all samples and ranks, and the peers at 90 % of an epoch."""
    options = read_options("resume", __doc__, rounds=3)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        work = make_work(folder, text_bytes=(1 if options.quick else 4) * 10**6, token_copies=1)
        ours = Tokens()
        ours.prepare(work)
        settings = Settings(
            work,
            replace(ours.config(work), workers=0),
            samples=(10**3, 10**7) if options.quick else (10**3, 10**4, 10**5, 10**6, 10**7),
            sizes=(1, 2) if options.quick else (1, 2, 4, 8),
            num_rounds=options.rounds,
        )
        # Forks, so that this process has not seen the corpus when it makes those that must not have, either.
        ((resumes, state),) = run_ranks(measure, 1, settings, group=False, timeout_seconds=300)
        touches = [run_ranks(first_touch, 1, settings, state, group=False)[0] for _ in range(options.rounds)]
    peers = {} if options.quick else _peers()
    publish(options, "resume", _section(options, resumes, touches, peers), _measures(resumes, touches, peers))


def measure(settings: Settings) -> tuple[list[Resumes], dict[str, Any]]:
    """All samples, ranks and places with the corpus open, and the last of the cursors.

    Raises:
        RuntimeError: a resume gives other batches than the uninterrupted stream.
    """
    work, config = settings.work, settings.config
    corpus = open_corpus(config)
    # A first resume sets up what all share.
    _resume(corpus, settings, _stream(corpus, work, config, 0, 1).state_dict(), 1)
    resumes = []
    for sample in settings.samples:
        stream = _stream(corpus, work, config, 0, 1)
        epoch = sample // max(work.num_tokens // SEQUENCE_LENGTH, 1)
        medians: dict[int, list[Cost]] = {size: [] for size in settings.sizes}
        for number, share in enumerate(SHARES):
            state, expected = _interrupted(stream, sample, epoch, share, number * _MOST_BATCHES_BEFORE // len(SHARES))
            for size in settings.sizes:
                turns = []
                for _ in range(settings.num_rounds):
                    cost, found = _resume(corpus, settings, state, size)
                    turns.append(cost)
                    if not all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)):
                        raise RuntimeError(f"other batches after a resume at sample {sample}, {share} of epoch {epoch}")
                medians[size].append(median_fields(turns))
        resumes.append(Resumes(sample, epoch, {size: _slowest(costs) for size, costs in medians.items()}))
    return resumes, state


def first_touch(settings: Settings, state: dict[str, Any]) -> FirstTouch:
    """In a process of its own, with the files of tokens no longer in the page cache."""
    for file in settings.work.folder.glob("tokens*/**/*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    began = time.perf_counter()
    corpus = open_corpus(settings.config)
    _stream(corpus, settings.work, settings.config, 0, 1)
    opening = time.perf_counter() - began
    return FirstTouch(1e3 * opening, *(_resume(corpus, settings, state, 1)[0] for _ in range(2)))


def _interrupted(
    stream: TokenStream, sample: int, epoch: int, share: float, num_batches: int
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """A cursor of a stream that has read a few batches from a place, and the batches that come next."""
    stream.load_state_dict(_cursor_at(stream, sample, epoch, share))
    batches = iter(stream.loader(batch_size=BATCH))
    for _ in range(num_batches):
        next(batches)
    state = stream.state_dict()
    return state, [next(batches)["input_ids"] for _ in range(_COMPARED_BATCHES)]


def _cursor_at(stream: TokenStream, sample: int, epoch: int, share: float) -> dict[str, Any]:
    """A cursor after `sample` sequences, at a share of an epoch of each lane."""
    state = Cursor.from_json(stream.state_dict())
    (order,) = stream.plan.orders
    rounds = sample // state.num_lanes
    places = {}
    for lane, own in state.lanes.items():
        (progress,) = own.pools
        position = int(share * order.lane_length(epoch, lane))
        place = progress.place._replace(epoch=epoch, position=position, offset=0)
        places[lane] = own._replace(pools=(progress._replace(place=place, sequences=rounds),))
    return replace(state, samples=rounds * state.num_lanes, lanes=places).to_json()


def _resume(corpus: Corpus, settings: Settings, state: dict[str, Any], size: int) -> tuple[Cost, list[torch.Tensor]]:
    """What the slowest rank takes, and what all ranks together give."""
    costs, shares = [], []
    for rank in range(size):
        stream = _stream(corpus, settings.work, settings.config, rank, size)
        began, began_cpu = time.perf_counter(), time.process_time()
        stream.load_state_dict(state)
        batches = iter(stream.loader(batch_size=BATCH // size))
        first = next(batches)
        costs.append(Cost(1e3 * (time.perf_counter() - began), 1e3 * (time.process_time() - began_cpu)))
        shares.append([first["input_ids"], *(next(batches)["input_ids"] for _ in range(1, _COMPARED_BATCHES))])
    return _slowest(costs), [torch.stack(parts, dim=1).flatten(0, 1) for parts in zip(*shares, strict=True)]


def _stream(corpus: Corpus, work: Work, config: DataConfig, rank: int, size: int) -> TokenStream:
    return TokenStream(corpus, work.tokenizer, config, data_rank=rank, data_size=size)


def _slowest(costs: Sequence[Cost]) -> Cost:
    return Cost(*(max(figures) for figures in zip(*costs, strict=True)))


def _peers() -> dict[str, float | str]:
    """Milliseconds, or the reason why there are none; hfdist's among them."""
    numbers = [n for n, one in enumerate(CONTENDERS) if one.tokenized]
    peers: dict[str, float | str] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # More than lies in a peer's buffer whole.
        make_work(folder, text_bytes=_PEER_MEGABYTES * 10**6, token_copies=_PEER_COPIES)
        rows = run_rounds(folder, numbers, 1, num_resumes=_NUM_PEER_RESUMES)
    for contender, result in rows:
        name = f"{contender.library}, {contender.variant}, {contender.resumes_by}"
        if isinstance(result, Failure):
            peers[name] = result.reason
        else:
            peers[name if result.resumes_exactly else f"{name}, inexact"] = 1e3 * result.resume_seconds
    return peers


def _section(
    options: argparse.Namespace, resumes: list[Resumes], touches: list[FirstTouch], peers: dict[str, float | str]
) -> str:
    sizes = list(resumes[0].slowest)
    rows = [
        [f"{sample:,}", f"{epoch:,}", *(f"{wall:.1f} ({cpu:.1f})" for wall, cpu in slowest.values())]
        for sample, epoch, slowest in resumes
    ]
    first, again = median_fields([touch.resume for touch in touches]), median_fields([touch.again for touch in touches])
    opening = statistics.median(touch.opening_milliseconds for touch in touches)
    parts = [
        f"## Resuming\n\nSequences of {SEQUENCE_LENGTH}, batches of {BATCH} over all ranks, from token files, "
        "`data.workers=0`, the corpus open; from the cursor to the first batch of the slowest rank, milliseconds of "
        f"wall time, in brackets of CPU time. Medians of {options.rounds} resumes, of which the slowest of the places "
        f"at {', '.join(f'{share:.0%}' for share in SHARES)} of the epoch counts. Cursors are made by arithmetic and "
        "read on from; the batches that follow were the same as the uninterrupted stream's at every place.",
        describe_run("benchmarks.resume", "torch", "datasets", pinned=pinned("data", *_PEERS)),
        markdown(["sample", "epoch", *(f"{size} rank{'s' * (size > 1)}" for size in sizes)], rows),
        "In a process that has not seen the corpus, its files no longer in the page cache, one rank: opening corpus "
        f"and stream {opening:.0f}, the first resume {first.wall_milliseconds:.1f} ({first.cpu_milliseconds:.1f}), the "
        f"next {again.wall_milliseconds:.1f} ({again.cpu_milliseconds:.1f}).",
    ]
    if peers:
        parts += [
            "Beside the peers: a new process and one loader process, from the end of the imports to the first batch, "
            f"at 90 % of an epoch of {_PEER_COPIES} times the tokens of {_PEER_MEGABYTES} MB of text, so that opening "
            "and starting the loader process count for all; what was imported is kept out of garbage collections, and "
            "hfdist has the tokenizer loaded, which the peers do not ask for. `datasets` mixes shards and a buffer of "
            "1,000 rows, whose contents its state_dict leaves out: it fills it anew. Medians of "
            f"{_NUM_PEER_RESUMES}, wall time.",
            markdown(["at 90 % of an epoch", "ms"], [[name, rounded(figure)] for name, figure in peers.items()]),
        ]
    return "\n\n".join(parts)


def _measures(resumes: list[Resumes], touches: list[FirstTouch], peers: dict[str, float | str]) -> list[Measure]:
    slowest = _slowest([cost for at_sample in resumes for cost in at_sample.slowest.values()])
    touched = statistics.median(touch.resume.wall_milliseconds for touch in touches)
    where = "saved cursor to the first batch"
    figures = {
        f"{where}, at 1e3 to 1e7 samples and any ranks, the slowest": slowest.wall_milliseconds,
        f"{where}, CPU time of it": slowest.cpu_milliseconds,
        f"{where}, the first in a process, files not in memory": touched,
    }
    goal = f"at most {GOAL_MILLISECONDS}"
    measures = [
        Measure(what=what, unit="ms", ours=value, goal=goal, is_met=value <= GOAL_MILLISECONDS)
        for what, value in figures.items()
    ]
    if peers:
        (ours,) = (figure for name, figure in peers.items() if name.startswith(OURS))
        assert isinstance(ours, float), ours
        others = {name: figure for name, figure in peers.items() if not name.startswith(OURS)}
        what = f"{where}, in a new process, opening and a loader process included"
        measures.append(Measure(what=what, unit="ms", ours=ours, peers=others))
    return measures


if __name__ == "__main__":
    main()
