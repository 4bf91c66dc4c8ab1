"""The time of a step as a plan has it, against real steps of each layout on this machine, before and after calibration.

python -m proofs.plan_time docs/plan.md [--cpu]

Writes the table between the marks of a page; without a page prints it. `--cpu` compares CPU seconds of the slowest rank
in place of the clock, for a machine that does other things meanwhile.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import deepspeed  # noqa: F401  # once, and not in each rank: it takes seconds, and counts ranks as it finds them
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from benchmarks.small_llama import make_trainer
from benchmarks.table import markdown
from hfdist.config.batch import plan_batch
from hfdist.config.composition.compose import compose_config
from hfdist.config.hardware import Hardware
from hfdist.config.run import RunConfig
from hfdist.models.loss import LossHead
from hfdist.planning.timing.calibration import TimedStep, calibrate, default_factors
from hfdist.planning.timing.hardware import measure_cpu
from hfdist.planning.timing.step_time import StepParts, step_parts
from hfdist.planning.timing.traffic import step_sizes, traffic
from hfdist.planning.tracing.memory import trace_rank
from hfdist.strategies.select import select_strategy
from hfdist.testing import run_ranks
from hfdist.trainer.run_options import RunOptions

BEGIN, END = "<!-- errors of time: begin -->", "<!-- errors of time: end -->"
GOAL = 0.15
_SIZES = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
          "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True}  # fmt: skip
_SEQUENCE_TOKENS, _GLOBAL_BATCH, _MICRO_BATCH = 128, 16, 4
_NUM_WARM_UP, _NUM_TIMED = 2, 5


@dataclass(frozen=True, kw_only=True)
class Case:
    """One layout."""

    num_ranks: int
    keys: dict[str, Any]
    micro_batch_size: int = _MICRO_BATCH


CASES = {
    "single": Case(num_ranks=1, keys={}),
    "single, micro batches of 1": Case(num_ranks=1, keys={}, micro_batch_size=1),
    "ddp, 2": Case(num_ranks=2, keys={}),
    "ddp, 4": Case(num_ranks=4, keys={}),
    "zero1, 2": Case(num_ranks=2, keys={"sharding": "zero1"}),
    "zero2, 2": Case(num_ranks=2, keys={"sharding": "zero2"}),
    "zero3, 2": Case(num_ranks=2, keys={"sharding": "zero3"}),
    "fsdp2, 2": Case(num_ranks=2, keys={"sharding": "fsdp2"}),
    "tensor, 2": Case(num_ranks=2, keys={"tensor": 2}),
    "context, 2": Case(num_ranks=2, keys={"context": 2}),
    "pipeline (1f1b), 2": Case(num_ranks=2, keys={"pipeline": 2}),
    "pipeline (zbv), 2": Case(num_ranks=2, keys={"pipeline": 2, "schedule": "zbv"}),
    "pipeline 2 x tensor 2": Case(num_ranks=4, keys={"pipeline": 2, "tensor": 2}),
    "fsdp2 2 x tensor 2": Case(num_ranks=4, keys={"sharding": "fsdp2", "tensor": 2}),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a plan says, and what was measured, in seconds."""

    name: str
    measured: float
    before: float
    after: float

    @property
    def error(self) -> float:
        """Behind calibration, as a share of what was measured."""
        return abs(self.after / self.measured - 1)


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", nargs="?", type=Path)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--only", nargs="*", default=list(CASES))
    options = parser.parse_args()
    table = describe(measure(options.only, by_cpu=options.cpu), by_cpu=options.cpu)
    if options.page is None:
        sys.stdout.write(table)
        return
    text = options.page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    options.page.write_text(f"{before}{BEGIN}\n\n{table}\n{END}{after}", encoding="utf-8")


def measure(names: Sequence[str], *, by_cpu: bool) -> list[Row]:
    """Plan and run each layout."""
    hardware = {n: find_hardware(n, by_cpu=by_cpu) for n in sorted({CASES[name].num_ranks for name in names})}
    # In a process that ends: a trace leaves its mark on the ranks that are forked after it.
    parts = {
        name: run_ranks(predict, 1, CASES[name], hardware[CASES[name].num_ranks], group=False)[0] for name in names
    }
    if by_cpu:
        parts = {name: without_waiting(of_layout) for name, of_layout in parts.items()}
    timed = {name: run(CASES[name], by_cpu=by_cpu) for name in names}
    steps = {
        name: TimedStep(hardware="cpu", layout=name, ideal=parts[name].ideal, step_seconds=timed[name])
        for name in names
    }
    rows = []
    for name in names:
        own = hardware[CASES[name].num_ranks]
        # As of a plan for a layout that was never run here.
        others = [step for other, step in steps.items() if other != name]
        before, after = default_factors(own), calibrate(others, own)
        rows.append(
            Row(
                name=name,
                measured=timed[name],
                before=before.apply(parts[name].ideal),
                after=after.apply(parts[name].ideal),
            )
        )
    return rows


def without_waiting(parts: StepParts) -> StepParts:
    """Leave out the bubble of a pipeline, in which a rank computes nothing."""
    share = 1 - parts.time.bubble / parts.time.seconds
    return replace(parts, ideal={name: seconds * share for name, seconds in parts.ideal.items()})


def find_hardware(num_ranks: int, *, by_cpu: bool) -> Hardware:
    """Measure this machine; without the clock as if each rank had a core of its own."""
    if not by_cpu:
        return measure_cpu(num_ranks)
    return replace(measure_cpu(min(num_ranks, os.cpu_count() or 1)), devices_per_machine=num_ranks)


def predict(case: Case, hardware: Hardware) -> StepParts:
    """Plan a step, as `hfdist plan` does, from traces of its ranks on fake tensors."""
    config = compose(case)
    architecture = LlamaConfig(**_SIZES, use_cache=False)
    topology = config.strategy.topology(case.num_ranks)
    batch = plan_batch(
        global_batch_size=_GLOBAL_BATCH,
        micro_batch_size=case.micro_batch_size,
        data_size=topology.data,
        sequence_length=_SEQUENCE_TOKENS,
        lanes=topology.data,
    )
    strategy = select_strategy(config.strategy, config.train, topology=topology, batch=batch, device_type="cpu")
    with torch.device("meta"):
        whole = LlamaForCausalLM(architecture)
    sizes = step_sizes(whole, config.train, tensor=topology.tensor, is_gpu=False)
    sent = traffic(strategy, sizes, devices_per_machine=hardware.devices_per_machine)
    ranks = [pipeline[0] for pipeline in zip(*topology.pipelines, strict=True)]
    costs = [
        replace(trace_rank(config, architecture, world_size=case.num_ranks, rank=rank).costs, traffic=sent)
        for rank in ranks
    ]
    return step_parts(costs, strategy, hardware, config.train)


def compose(case: Case) -> RunConfig:
    """Give the config of a run of the same layout."""
    sizes = [f"model.config.{name}={value}" for name, value in _SIZES.items() if name != "vocab_size"]
    return compose_config(
        [
            "model=small",
            *sizes,
            "model.loss=chunked",
            "strategy.data=null",
            "data.packing=none",
            f"data.sequence_length={_SEQUENCE_TOKENS}",
            f"train.global_batch_size={_GLOBAL_BATCH}",
            f"train.micro_batch_size={case.micro_batch_size}",
            *(f"strategy.{key}={value}" for key, value in case.keys.items()),
        ]
    )


def run(case: Case, *, by_cpu: bool) -> float:
    """Train for some steps; give the seconds of one on the slowest rank."""
    return max(run_ranks(_train, case.num_ranks, case, by_cpu, timeout_seconds=600, group=case.num_ranks > 1))


def _train(case: Case, by_cpu: bool) -> float:
    gc.freeze()
    clock = _Clock(by_cpu=by_cpu)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(
            folder,
            case.keys,
            _SIZES,
            batch=(_GLOBAL_BATCH, case.micro_batch_size),
            sequence_tokens=_SEQUENCE_TOKENS,
            max_steps=_NUM_WARM_UP + _NUM_TIMED,
            callbacks=[clock],
            options=RunOptions(loss_head=LossHead()),
        )
        trainer.train()
    return statistics.median(clock.seconds[_NUM_WARM_UP:])


class _Clock(TrainerCallback):
    """Times steps, by the clock or by what this process computes."""

    def __init__(self, *, by_cpu: bool) -> None:
        self.seconds: list[float] = []
        self._read = time.process_time if by_cpu else time.perf_counter
        self._last = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """Called by the Trainer."""
        self._last = self._read()

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """Called by the Trainer."""
        self.seconds.append(self._read() - self._last)


def describe(rows: Sequence[Row], *, by_cpu: bool) -> str:
    """Give the table and what it shows."""
    cells = [
        [row.name, f"{row.measured:.3f}", f"{row.before:.3f}", f"{row.before / row.measured - 1:+.0%}",
         f"{row.after:.3f}", f"{row.after / row.measured - 1:+.0%}"]
        for row in rows
    ]  # fmt: skip
    heads = ["layout", "measured, s", "planned, s", "error", "calibrated, s", "error"]
    within = sum(row.error <= GOAL for row in rows)
    what = "CPU seconds of a step on the slowest rank" if by_cpu else "Seconds of a step, the median of five"
    return (
        f"{what}; a Llama of {_SIZES['num_hidden_layers']} blocks of width {_SIZES['hidden_size']}, "
        f"{_GLOBAL_BATCH} sequences of {_SEQUENCE_TOKENS} tokens, float32, on {os.cpu_count()} cores. `planned` knows "
        "this machine by two seconds of measuring; `calibrated` knows timed steps of all the other layouts, too, and "
        f"none of its own: {within} of {len(rows)} are within {GOAL:.0%}.\n\n{markdown(heads, cells)}\n"
    )


if __name__ == "__main__":
    main()
