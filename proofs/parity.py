"""Pipelines beside one process: loss, gradient norm, every gradient and every weight. `python -m` writes the table."""

from __future__ import annotations

import platform
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
import transformers

from hfdist.config.strategy import Schedule
from hfdist.config.train import Precision
from hfdist.verify.certificate import BOUNDS, Row
from hfdist.verify.compare_runs import compare_runs
from tests.distributed.runs import pretrain
from tests.imports import import_all

BOUND = BOUNDS[Precision.fp32]
NUM_STEPS = 5
COMMON = (
    "model.config.num_hidden_layers=8",
    # As a model of a usual size would.
    "model.loss=chunked",
    "train.global_batch_size=16",
    f"train.max_steps={NUM_STEPS}",
    "checkpoint.every=1",
    f"checkpoint.keep={NUM_STEPS}",
    "data.eval_sequences=2",
    "train.micro_batch_size=1",
    # Adam divides by it where a gradient is by chance almost zero: with 1e-8 the rounding of one element, of millions,
    # can come out 300 times as large in its weight.
    "optimizer.eps=1e-6",
)


@dataclass(frozen=True)
class Case:
    """A pipeline layout."""

    schedule: Schedule
    pipeline: int
    data: int = 1
    sharding: str = "none"
    tied: bool = False

    @property
    def num_processes(self) -> int:
        """Ranks that it needs."""
        return self.pipeline * self.data

    @property
    def overrides(self) -> tuple[str, ...]:
        """Of the recipe."""
        layout = (f"strategy.pipeline={self.pipeline}", f"strategy.schedule={self.schedule.value}")
        return ("strategy=pipeline", f"strategy.sharding={self.sharding}", *layout, *tying(self.tied))

    def __str__(self) -> str:
        zero = " zero1" if self.sharding == "zero1" else ""
        return f"{self.schedule.value} {self.pipeline}x{self.data}{zero}{' tied' if self.tied else ''}"


def tying(tied: bool) -> tuple[str, ...]:
    """Whether head and embedding are one parameter."""
    return (f"model.config.tie_word_embeddings={str(tied).lower()}",)


def run_single(folder: Path, *more: str, tied: bool) -> Path:
    """The reference."""
    return pretrain(folder, 1, "strategy=single", *COMMON, *tying(tied), *more)


def run_case(folder: Path, case: Case, *more: str) -> Path:
    """The same in the layout."""
    return pretrain(folder, case.num_processes, *COMMON, *case.overrides, *more)


def all_cases() -> Iterator[Case]:
    """Every schedule on 2 and 4 ranks, tied and untied, alone, with two replicas, and with two under ZeRO-1."""
    schedules = [schedule for schedule in Schedule if schedule is not Schedule.auto]
    for tied, (data, sharding), pipeline, schedule in product(
        (False, True), ((1, "none"), (2, "none"), (2, "zero1")), (2, 4), schedules
    ):
        yield Case(schedule, pipeline, data, sharding, tied)


def write_table(path: Path, cases: list[Case]) -> None:
    """Run all cases and write what came out as a Markdown table."""
    lines = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        single = {tied: run_single(folder / f"single-{tied}", tied=tied) for tied in (False, True)}
        for number, case in enumerate(cases):
            rows = compare_runs(run_case(folder / str(number), case), single[case.tied], BOUND)
            lines.append(f"| {case} | {case.num_processes} | {' | '.join(map(_cell, rows))} |")
            sys.stderr.write(lines[-1] + "\n")
    path.write_text("\n".join([*_head(), *lines, ""]), encoding="utf-8")


def _cell(row: Row) -> str:
    return f"{row.difference:.1e}" + ("" if row.passed else f" **above {row.bound:.0e}**")


def _head() -> list[str]:
    return [
        "# Pipelines beside one process",
        "",
        f"Largest relative differences after {NUM_STEPS} steps in float32 of a Llama of 8 blocks, on gloo ranks: loss",
        "and gradient norm of every step, every parameter's gradient of the first step, every weight after the last.",
        "`4x2` is a pipeline of 4 ranks and 2 replicas of it. Written by `make parity` with torch "
        f"{torch.__version__.partition('+')[0]}, transformers {transformers.__version__}, Python "
        f"{platform.python_version()}.",
        "",
        "```\nmake parity\n```",
        "",
        "| layout | ranks | loss | gradient norm | gradients | weights |",
        "|---|---|---|---|---|---|",
    ]


if __name__ == "__main__":
    import_all()
    torch.set_num_threads(1)
    write_table(Path(sys.argv[1]), list(all_cases()))
