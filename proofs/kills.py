"""A run that is killed at random moments and goes on with other numbers of ranks, beside one that nobody kills.

`python -m proofs.kills 20` kills 20 times, and prints a line for each.
"""

from __future__ import annotations

import gzip
import itertools
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from hfdist.checkpoint import verify
from hfdist.config.composition.compose import compose_config
from hfdist.config.run import RunConfig
from hfdist.data.stream.ledger import read_records
from hfdist.errors import CheckpointError
from hfdist.records import RunFolder, read_lines
from hfdist.testing import run_ranks
from hfdist.verify.audit.past_run import open_past_run
from hfdist.verify.audit.run import prove_once
from tests.distributed.processes import Life, Victim, assert_gone
from tests.distributed.runs import SMALL, eval_losses, losses
from tests.imports import import_all

LAYOUTS = (("single", 1), ("ddp", 2), ("ddp", 4), ("ddp", 3))
NUM_LANES = 12  # each of these numbers of ranks divides it
SAVE_EVERY = 4
STEPS_PER_KILL = 12
"""A kill leaves the run about three steps farther on; a machine that is slow to strike, up to twice as many."""
SEED = 65  # whose first three kills are of all victims, in a save, at a start and in the ledger's write
BOUND = 1e-5
"""Of relative differences of losses in float32."""


class Moment(Enum):
    """What the run is doing then, and for about how many seconds it does so."""

    start = "at the start", 2.0
    step = "in a step", 0.1
    save = "in a save", 0.08
    ledger = "in the ledger's write", 0.01


@dataclass(frozen=True)
class Kill:
    """Whom to kill, and when."""

    strategy: str
    num_ranks: int
    victim: Victim
    moment: Moment
    steps: int
    """Done in this life before."""
    fraction: float
    """Of the moment, in [0, 1)."""
    seed: int
    """Chooses among several victims."""


def draw_kills(num_kills: int, seed: int) -> list[Kill]:
    """The layouts in turn; every victim at every moment about equally often.

    The first falls into the first save, when no checkpoint says yet what of the ledger counts.
    """
    generator = random.Random(seed)
    choices = list(itertools.product(Victim, Moment))
    rounds = (generator.sample(choices, len(choices)) for _ in itertools.count())
    drawn = itertools.islice(itertools.chain.from_iterable(rounds), num_kills)
    kills = [
        Kill(
            *LAYOUTS[number % len(LAYOUTS)],
            victim=victim,
            moment=moment,
            steps=generator.randint(1, 2 * SAVE_EVERY - 1),
            fraction=generator.random(),
            seed=generator.randrange(2**32),
        )
        for number, (victim, moment) in enumerate(drawn)
    ]
    first = replace(kills[0], victim=Victim.everyone, moment=Moment.ledger, steps=1, fraction=0.5)
    return [first, *kills[1:]]


def write_texts(folder: Path) -> Path:
    """Two sources of short documents, so few that they are read several times; some rows cannot be read."""
    folder.mkdir()
    generator = random.Random(0)
    texts = [f"{n}: " + " ".join(str(generator.randrange(1000)) for _ in range(1 + n % 8)) for n in range(200)]
    for part in range(2):
        rows = texts[part * 60 : part * 60 + 60]
        pq.write_table(pa.table({"text": rows}), folder / f"part-{part}.parquet", row_group_size=25)
    lines = [json.dumps({"text": text}) if n % 25 else f'{{"text": {text}' for n, text in enumerate(texts[120:])]
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    return folder


def make_config(run_dir: Path, texts: Path, max_steps: int, strategy: str) -> RunConfig:
    """A run that reads two sources with weights, and caches beside its folder."""
    return compose_config(
        [
            *SMALL,
            "data=files",
            f"data.sources.files={{kind: files, path: '{texts}/*.parquet', weight: 2}}",
            f"data.sources.lines={{kind: files, path: '{texts}/rows.jsonl.gz', weight: 1}}",
            "data.on_bad_rows=quarantine",
            "data.sequence_length=32",
            f"data.lanes={NUM_LANES}",
            "data.workers=1",
            "data.prefetch=8",
            "data.eval_fraction=0.05",
            f"data.cache_dir={run_dir}-cache",
            "model.tokenizer.vocab_size=300",
            f"train.max_steps={max_steps}",
            "train.global_batch_size=12",
            "train.micro_batch_size=1",
            # At 3e-3 rounding grows: after 120 steps 4 ranks that nobody kills are 2e-5 away from one.
            "optimizer.lr=5e-4",
            "checkpoint=default",
            f"checkpoint.every={SAVE_EVERY}",
            f"run.dir={run_dir}",
            f"strategy={strategy}",
        ]
    )


def interrupt(run_dir: Path, config: RunConfig, kill: Kill, log: Path) -> tuple[str, int]:
    """Start the run once more, kill it, and give a line on what is left, and the process group."""
    before = newest_whole(run_dir)
    unfinished, metrics = _unfinished(run_dir), RunFolder(run_dir).metrics
    # Lines of steps that will be done again are in the file until training begins, which writes it anew.
    stamp = _stamp(metrics)
    steps = _step(before) + kill.steps
    life = Life(config, kill.num_ranks, log)
    if kill.moment is not Moment.start:
        life.wait(lambda: _stamp(metrics) != stamp and _last_step(metrics) >= steps)
    strike = life.aim(kill.victim, kill.seed)
    if kill.moment is Moment.save:
        life.wait(lambda: _unfinished(run_dir) - unfinished)
    if kill.moment is Moment.ledger:
        sizes = _ledger_sizes(run_dir)
        life.wait(lambda: _ledger_sizes(run_dir) != sizes)
    time.sleep(kill.fraction * kill.moment.value[1])
    strike()
    seconds_to_end = life.end()
    assert not life.has_finished, f"the run was over before it could be killed: {kill}"
    chosen = re.search(r"resuming from .*/(step-\d+)$", log.read_text(), flags=re.MULTILINE)
    assert chosen is None or chosen[1] == before, f"{chosen} instead of {before}"
    damaged = [path.name for path in (run_dir / "checkpoints").glob("*.bad-*")]
    assert not damaged, "a kill leaves whole checkpoints or none"
    line = (
        f"{kill.num_ranks} ranks, {kill.victim.value} {kill.moment.value[0]}: from {before} to step "
        f"{_last_step(metrics)}, over after {seconds_to_end:.1f} s; whole: {newest_whole(run_dir)}"
    )
    return line, life.group


def _unfinished(run_dir: Path) -> set[str]:
    return {path.name for path in (run_dir / "checkpoints").glob("*.tmp-*")}


def _step(checkpoint: str | None) -> int:
    return int(checkpoint.removeprefix("step-")) if checkpoint else 0


def _last_step(metrics: Path) -> int:
    lines = read_lines(metrics)
    return lines[-1]["step"] if lines else 0


def _stamp(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def _ledger_sizes(run_dir: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in RunFolder(run_dir).ledger.glob("*.records")}


def newest_whole(run_dir: Path) -> str | None:
    """Name of the newest checkpoint all bytes of which verify."""
    for path in sorted((run_dir / "checkpoints").glob("step-????????"), reverse=True):
        try:
            verify(path)
        except CheckpointError:
            continue
        return path.name
    return None


@dataclass(frozen=True)
class Comparison:
    """A run beside the uninterrupted one."""

    num_steps: int
    loss: float
    """Largest relative difference of a step."""
    held_out_loss: float
    """Relative difference at the end."""
    epochs: int
    """Begun by the lane that is the farthest."""
    audit: list[str]
    """What the audit of the run says, its verdict last."""


def compare(run_dir: Path, whole: Path, config: RunConfig) -> Comparison:
    """Check that a run has done what the uninterrupted run has, and measure how far its losses are from it.

    Every step once; in every lane the same pieces of the same documents, byte by byte; nothing half done is left.
    """
    steps = [line["step"] for line in read_lines(RunFolder(run_dir).metrics) if "loss" in line]
    assert steps == list(range(1, config.train.max_steps + 1)), steps
    ours, theirs = (
        {path.name: path.read_bytes() for path in RunFolder(run).ledger.iterdir()} for run in (run_dir, whole)
    )
    assert ours.keys() == theirs.keys()
    assert not [name for name in theirs if ours[name] != theirs[name]]
    left, expected = ({path.name for path in (run / "checkpoints").iterdir()} for run in (run_dir, whole))
    assert left == expected
    return Comparison(
        num_steps=len(steps),
        loss=_largest_difference(losses(run_dir), losses(whole)),
        held_out_loss=_largest_difference(eval_losses(run_dir), eval_losses(whole)),
        epochs=1 + max(int(read_records(RunFolder(run_dir).ledger, lane)["epoch"].max()) for lane in range(NUM_LANES)),
        # In a process of its own: it sets up the log.
        audit=run_ranks(lambda: list(prove_once(open_past_run(run_dir, config))), 1, group=False)[0],
    )


def _largest_difference(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True))


def run_both(folder: Path, num_kills: int, report: Callable[[str], object]) -> Comparison:
    """Make an uninterrupted run and one that is killed, and compare them."""
    max_steps = STEPS_PER_KILL * num_kills
    texts, run_dir, whole = write_texts(folder / "texts"), folder / "killed", folder / "whole"
    config = partial(make_config, texts=texts, max_steps=max_steps)
    Life(config(whole, strategy="single"), 1, folder / "whole.log").join()
    groups = []
    for number, kill in enumerate(draw_kills(num_kills, SEED), start=1):
        line, group = interrupt(run_dir, config(run_dir, strategy=kill.strategy), kill, folder / f"{number}.log")
        groups.append(group)
        report(f"{number:3}. {line}")
    strategy, num_ranks = LAYOUTS[num_kills % len(LAYOUTS)]
    last = config(run_dir, strategy=strategy)
    Life(last, num_ranks, folder / "last.log").join()
    assert_gone(groups)
    return compare(run_dir, whole, last)


def _kill_and_print(num_kills: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        comparison = run_both(Path(name), num_kills, lambda line: sys.stdout.write(f"{line}\n"))
    for line in comparison.audit:
        sys.stdout.write(f"{line}\n")
    sys.stdout.write(
        f"{comparison.num_steps} steps, {comparison.epochs} epochs, {num_kills} kills: every step once; the ledger is "
        f"byte by byte that of a run that nobody killed; losses within {comparison.loss:.1e} of its, held-out loss "
        f"within {comparison.held_out_loss:.1e}\n"
    )
    assert max(comparison.loss, comparison.held_out_loss) <= BOUND


if __name__ == "__main__":
    import_all()
    torch.set_num_threads(1)
    sys.stdout.reconfigure(line_buffering=True)
    _kill_and_print(int(sys.argv[1]))
