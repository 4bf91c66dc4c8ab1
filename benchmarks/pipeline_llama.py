"""A small Llama trained by the Trainer, on one process and on two pipeline ranks: what the pipeline costs, and gains.

python -m benchmarks.pipeline_llama --write
"""

from __future__ import annotations

import argparse
import ctypes
import tempfile
import time
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from benchmarks.rounds import interleave, median_fields
from benchmarks.small_llama import make_trainer
from benchmarks.table import Measure, describe_run, markdown, publish, read_options
from hfdist.config.strategy import ONE_F_ONE_B, Schedule
from hfdist.pipeline.schedule import bubble_fraction, stages_per_rank
from hfdist.testing import run_ranks
from hfdist.trainer.run_options import RunOptions

NUM_RANKS = 2
NUM_MICROBATCHES = 8
SEQUENCE_TOKENS = 256
NUM_WARMUP_STEPS = 2
SIZES: dict[str, Any] = {"vocab_size": 8192, "hidden_size": 320, "intermediate_size": 896, "num_hidden_layers": 8,
         "num_attention_heads": 5, "num_key_value_heads": 5, "tie_word_embeddings": False}  # fmt: skip
QUICK_SIZES = SIZES | {"vocab_size": 512, "hidden_size": 40, "intermediate_size": 96}
MOST_OF_ALONE = 1.08
KEPT_BYTES = 2**30
"""Freed memory that a process keeps, and the size from which memory is given back at once."""
ALONE, BESIDE = "one process", "one process beside another"
LAYOUTS: dict[str, dict[str, Any]] = {
    ALONE: {},
    BESIDE: {},
    "1f1b": {"pipeline": NUM_RANKS, "schedule": ONE_F_ONE_B.value},
    "zbv": {"pipeline": NUM_RANKS, "schedule": Schedule.zbv.value},
}


class Cost(NamedTuple):
    """Cost of one optimizer step."""

    wall_seconds: float
    cpu_seconds: float
    """CPU seconds of all threads of all ranks."""


class Clock(TrainerCallback):
    """Reads both clocks at the end of each step."""

    def __init__(self) -> None:
        self.readings: list[Cost] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the Trainer."""
        self.readings.append(Cost(time.perf_counter(), time.process_time()))


def main() -> None:
    """Measure, print the table, and write it down if asked to."""
    steps = {"type": int, "default": 4, "help": "timed optimizer steps of one run"}
    options = read_options("pipeline_llama", __doc__, rounds=5, steps=steps)
    if options.quick:
        options.steps = 1
    keep_freed_memory()
    sizes = QUICK_SIZES if options.quick else SIZES
    turns = {name: partial(measure, name, options.steps, sizes) for name in LAYOUTS}
    costs = interleave(turns, options.rounds, num_warm_up=0)
    section = "\n\n".join([_preamble(options, sizes), table(costs)])
    publish(options, "pipeline_llama", section, measures_of(costs))


def keep_freed_memory() -> None:
    """Let this process and its forks keep what they free.

    By default glibc gives it back, and has it cleared anew, or not, as blocks happen to lie: in the same layout a step
    had 10 page faults in one run and 48,000 in the next, a twentieth of its time.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        trim_threshold, mmap_threshold = -1, -3  # of malloc.h
        libc.mallopt(trim_threshold, KEPT_BYTES)
        libc.mallopt(mmap_threshold, KEPT_BYTES)


def measure(name: str, num_steps: int, sizes: dict[str, Any]) -> Cost:
    """One run of a layout: its median step."""
    is_pipeline = "pipeline" in LAYOUTS[name]
    with tempfile.TemporaryDirectory() as folder:
        # Without a group the two know nothing of each other.
        num_processes = 1 if name == ALONE else NUM_RANKS
        ranks = run_ranks(
            train, num_processes, folder, LAYOUTS[name], num_steps, sizes, group=is_pipeline, timeout_seconds=600
        )
    if not is_pipeline:
        return median_fields([cost for of_process in ranks for cost in of_process])
    # All ranks end a step together.
    steps = [
        Cost(max(cost.wall_seconds for cost in of_ranks), sum(cost.cpu_seconds for cost in of_ranks))
        for of_ranks in zip(*ranks, strict=True)
    ]
    return median_fields(steps)


def train(
    folder: str, layout: dict[str, Any], num_steps: int, sizes: dict[str, Any], options: RunOptions | None = None
) -> list[Cost]:
    """Train for some steps on one rank; what each took but the first ones. `options`: of the Trainer."""
    clock = Clock()
    trainer = make_trainer(
        folder,
        layout,
        sizes,
        batch=(NUM_MICROBATCHES, 1),
        sequence_tokens=SEQUENCE_TOKENS,
        max_steps=NUM_WARMUP_STEPS + num_steps,
        callbacks=[clock],
        options=options,
    )
    trainer.train()
    readings = clock.readings[NUM_WARMUP_STEPS - 1 :]
    return [
        Cost(after.wall_seconds - before.wall_seconds, after.cpu_seconds - before.cpu_seconds)
        for before, after in pairwise(readings)
    ]


def measures_of(costs: dict[str, list[Cost]]) -> list[Measure]:
    """CPU time of each pipeline beside that of one process."""
    alone, beside = (median_fields(costs[name]).cpu_seconds for name in (ALONE, BESIDE))
    measures = []
    for name, of_layout in costs.items():
        if "pipeline" in LAYOUTS[name]:
            cpu_seconds = median_fields(of_layout).cpu_seconds
            measures.append(
                Measure(
                    what=f"CPU time of a step, {name}, all {NUM_RANKS} ranks together",
                    unit="s",
                    ours=cpu_seconds,
                    limits={ALONE: alone, BESIDE: beside},
                    goal=f"<= {MOST_OF_ALONE:g} x {ALONE}",
                    is_met=cpu_seconds <= MOST_OF_ALONE * alone,
                )
            )
    return measures


def table(costs: dict[str, list[Cost]]) -> str:
    """CPU time beside that of one process, and wall time beside the schedule's ideal."""
    alone, beside = median_fields(costs[ALONE]), median_fields(costs[BESIDE])
    rows = []
    for name, of_layout in costs.items():
        cost = median_fields(of_layout)
        ideal_seconds = _ideal_seconds(name, alone.wall_seconds)
        rows.append(
            [
                name,
                f"{cost.cpu_seconds:.3f}",
                f"{cost.cpu_seconds / alone.cpu_seconds:.3f}",
                f"{cost.cpu_seconds / beside.cpu_seconds:.3f}",
                f"{cost.wall_seconds:.3f}",
                f"{ideal_seconds:.3f}",
                f"{cost.wall_seconds / ideal_seconds:.3f}",
            ]
        )
    return markdown(["layout", "CPU s", "x alone", "x beside another", "wall s", "ideal s", "x ideal"], rows)


def _ideal_seconds(name: str, single_seconds: float) -> float:
    """All ranks compute at the speed of one process alone, and idle only where the schedule says so."""
    if "pipeline" not in LAYOUTS[name]:
        return single_seconds
    schedule = Schedule(name)
    bubble = bubble_fraction(
        schedule,
        num_ranks=NUM_RANKS,
        stages_per_rank=stages_per_rank(schedule, None),
        num_microbatches=NUM_MICROBATCHES,
    )
    return single_seconds / NUM_RANKS / (1 - bubble)


def _preamble(options: argparse.Namespace, sizes: dict[str, Any]) -> str:
    num_parameters = sum(p.numel() for p in LlamaForCausalLM(LlamaConfig(**sizes)).parameters())
    return (
        "## A small Llama through a pipeline\n\n"
        f"{num_parameters / 1e6:.1f} M parameters in {sizes['num_hidden_layers']} blocks, float32, "
        f"{NUM_MICROBATCHES} micro batches of one sequence of {SEQUENCE_TOKENS} tokens, through `hfdist.Trainer`, "
        f"AdamW, one thread a rank, {NUM_RANKS} pipeline ranks. CPU: of all threads of all ranks in one step; "
        "two processes that share a machine slow each other down even if they have nothing to do with each other, so "
        "one is also measured beside another like it. All keep the memory that they free, which glibc by default may "
        "or may not have cleared in each step anew (docs/performance.md). "
        "Ideal: the wall time of one process, divided by the ranks and by the share in which the schedule keeps them "
        f"busy. Medians of {options.rounds} interleaved runs, each the median of {options.steps} steps after "
        f"{NUM_WARMUP_STEPS}.\n\n"
        f"{describe_run('benchmarks.pipeline_llama', 'torch', 'transformers')}"
    )


if __name__ == "__main__":
    main()
