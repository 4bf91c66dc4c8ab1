"""Held-out losses of four islands and of ddp: `python -m proofs.island_losses docs/islands.md`.

Rates are tuned for each row: all inner ones, and for DiLoCo all outer ones, each with each. The tables between the
marks of the page are new then: one of random weights, and one of weights that a process has trained before.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hfdist.records import RunFolder, read_lines
from proofs.plan_search import write
from tests.distributed.island_runs import run_islands
from tests.distributed.runs import eval_losses, pretrain, weights
from tests.imports import import_all

NUM_ISLANDS, NUM_STEPS, BATCH = 4, 400, 4
MOST_SECONDS = 1800
COMMON = (
    f"train.max_steps={NUM_STEPS}",
    "train.micro_batch_size=4",
    "data.eval_sequences=64",
    "data.lanes=48",
    "optimizer.warmup_steps=20",
)


@dataclass(frozen=True)
class Way:
    """How islands train."""

    name: str
    overrides: tuple[str, ...]
    tunes_outer: bool = True


def _ways(*intervals: int) -> tuple[Way, ...]:
    return (
        *(Way(f"averaging, H = {every}", ("islands=local_sgd", f"islands.every={every}"), tunes_outer=False)
          for every in intervals),
        *(Way(f"DiLoCo, H = {every}", ("islands=diloco", f"islands.every={every}")) for every in intervals),
    )  # fmt: skip


STREAMING = Way("streaming, H = 100, int8", ("islands=streaming", "islands.every=100", "islands.codec=int8"))


@dataclass(frozen=True)
class Table:
    """Runs that begin alike."""

    name: str
    """Of its marks."""
    ways: tuple[Way, ...]
    inner: tuple[float, ...]
    """Rates."""
    outer: tuple[tuple[float, float], ...]
    """Rates and momenta."""
    steps_before: int = 0
    """Steps of one process with the batch of all, after which all begin; 0: with random weights."""


TABLES = (
    Table("losses", (*_ways(10, 50, 100), STREAMING), (1.5e-3, 3e-3, 6e-3), ((0.4, 0.8), (0.7, 0.8), (1.0, 0.5))),
    Table("losses from a trained start", _ways(25, 100), (7.5e-4, 1.5e-3), ((0.7, 0.8), (1.0, 0.5)), steps_before=1000),
)


@dataclass(frozen=True)
class Arm:
    """A run of one choice of rates."""

    lr: float
    outer: tuple[float, float] | None
    loss: float
    sent_bytes: float
    """By each island, in the whole run."""


def arms_of(way: Way, table: Table, common: Sequence[str]) -> Iterator[Arm]:
    """Train with all rates; `common`: overrides of all runs of the table."""
    for lr, outer in itertools.product(table.inner, table.outer if way.tunes_outer else (None,)):
        rates = () if outer is None else (f"islands.outer_lr={outer[0]}", f"islands.outer_momentum={outer[1]}")
        with tempfile.TemporaryDirectory() as folder:
            sizes = (f"train.global_batch_size={BATCH}", f"optimizer.lr={lr}")
            one, *_ = run_islands(
                Path(folder), NUM_ISLANDS, 1, *common, *sizes, *way.overrides, *rates, most_seconds=MOST_SECONDS
            )
            sent = sum(line.get("islands/sent_bytes", 0) for line in read_lines(RunFolder(one).metrics))
            yield Arm(lr, outer, eval_losses(one)[-1], sent)


def arms_of_ddp(table: Table, common: Sequence[str]) -> Iterator[Arm]:
    """One process with the batch of all: what ddp trains, bit by bit or nearly."""
    for lr in table.inner:
        with tempfile.TemporaryDirectory() as folder:
            run = _train_alone(Path(folder) / "run", lr, *common)
            num_elements = sum(value.numel() for value in weights(run).values())
            ring = 2 * (NUM_ISLANDS - 1) / NUM_ISLANDS * 4 * num_elements
            yield Arm(lr, None, eval_losses(run)[-1], ring * NUM_STEPS)


def _train_alone(folder: Path, lr: float, *overrides: str) -> Path:
    sizes = (f"train.global_batch_size={NUM_ISLANDS * BATCH}", f"optimizer.lr={lr}")
    return pretrain(folder, 1, *overrides, *sizes, timeout_seconds=MOST_SECONDS)


def _begin(table: Table, folder: Path) -> tuple[str, ...]:
    """Train what all begin with, if anything, and give the overrides of all runs of a table."""
    if not table.steps_before:
        return COMMON
    run = _train_alone(folder, table.inner[-1] * 2, *COMMON, f"train.max_steps={table.steps_before}")
    # In another order than before.
    return (*COMMON, "model=hub", f"model.name={RunFolder(run).model}", "data.seed=1")


def rows_of(rows: dict[str, list[Arm]]) -> str:
    """The rows of the page, each with its best arm."""
    best = {name: min(arms, key=lambda arm: arm.loss) for name, arms in rows.items()}
    ddp = next(iter(best.values()))
    lines = ["| | held-out loss | beside ddp | sent by each | of ddp's | lr | outer lr, momentum | arms |",
             "|---|---:|---:|---:|---:|---:|---|---:|"]  # fmt: skip
    for name, arm in best.items():
        outer = "" if arm.outer is None else f"{arm.outer[0]:g}, {arm.outer[1]:g}"
        share = "1" if arm is ddp else f"1/{ddp.sent_bytes / arm.sent_bytes:.0f}"
        lines.append(
            f"| {name} | {arm.loss:.4f} | {100 * (arm.loss / ddp.loss - 1):+.2f} % | {arm.sent_bytes / 1e6:.1f} MB "
            f"| {share} | {arm.lr:g} | {outer} | {len(rows[name])} |"
        )
    return "\n".join(lines)


def fill(page: Path, table: Table, folder: Path) -> None:
    """Train all runs of a table, and write each row into the page once it is there."""
    common = _begin(table, folder)
    found = {"ddp": list(arms_of_ddp(table, common))}
    for way in table.ways:
        found[way.name] = list(arms_of(way, table, common))
        write(page, rows_of(found), f"<!-- {table.name}: begin -->", f"<!-- {table.name}: end -->")


if __name__ == "__main__":
    import_all()
    for one in TABLES:
        if one.name in sys.argv[2:] or not sys.argv[2:]:
            with tempfile.TemporaryDirectory() as start:
                fill(Path(sys.argv[1]), one, Path(start) / "run")
