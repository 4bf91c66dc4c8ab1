"""A small Llama on two ranks that share its blocks, its state, its matrices or its sequences; beside torch's own calls.

python -m benchmarks.mesh --write
"""

from __future__ import annotations

import argparse
import ctypes
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from time import perf_counter, process_time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from benchmarks.rounds import interleave, median_fields
from benchmarks.small_llama import make_trainer
from benchmarks.table import Measure, describe_run, markdown, publish, read_options
from hfdist.config.strategy import ONE_F_ONE_B, Schedule
from hfdist.pipeline.schedule import bubble_fraction, stages_per_rank
from hfdist.testing import run_ranks

NUM_RANKS = 2
NUM_MICROBATCHES = 8
SEQUENCE_TOKENS = 256
NUM_WARMUP_STEPS = 2
SIZES: dict[str, Any] = {"vocab_size": 8192, "hidden_size": 320, "intermediate_size": 896, "num_hidden_layers": 8,
         "num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False}  # fmt: skip
QUICK_SIZES = SIZES | {"vocab_size": 512, "hidden_size": 40, "intermediate_size": 96}
MOST_OF_ALONE, MOST_OF_TORCH = 1.08, 0.9
"""The goals: a pipeline's CPU time in that of one process, and another layout's in that of torch's own calls."""
KEPT_BYTES = 2**30
"""Freed memory that a process keeps, and the size from which memory is given back at once."""
ALONE, BESIDE = "one process", "one process beside another"
PIPELINES = {"1f1b": ONE_F_ONE_B, "zbv": Schedule.zbv}
LAYOUTS: dict[str, dict[str, Any]] = {
    ALONE: {},
    BESIDE: {},
    **{name: {"pipeline": NUM_RANKS, "schedule": schedule.value} for name, schedule in PIPELINES.items()},
    "fsdp2": {"sharding": "fsdp2"},
    "tensor": {"tensor": NUM_RANKS},
    "context": {"context": NUM_RANKS},
}
_PLAN = {
    **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ColwiseParallel),
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), ColwiseParallel),
    **dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), RowwiseParallel),
}
_NO_PEER = "torch's context_parallel has no kernel for the CPU"


class Cost(NamedTuple):
    """Of one optimizer step; or a reading of both clocks."""

    wall_seconds: float
    cpu_seconds: float
    """Of all threads of all ranks."""


class Clock(TrainerCallback):
    """Reads both clocks at the end of each step."""

    def __init__(self) -> None:
        self.readings: list[Cost] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the Trainer."""
        self.readings.append(Cost(perf_counter(), process_time()))


def main() -> None:
    """Measure, print the table, and write it down if asked to."""
    steps = {"type": int, "default": 4, "help": "timed optimizer steps of one run"}
    options = read_options("mesh", __doc__, rounds=5, steps=steps)
    if options.quick:
        options.steps = 1
    keep_freed_memory()
    sizes = QUICK_SIZES if options.quick else SIZES
    turns: dict[str, Callable[[], Cost]] = {name: partial(_measure, name, options.steps, sizes) for name in LAYOUTS}
    turns |= {f"{name}, torch": partial(_measure_torch, name, options.steps, sizes) for name in _TORCH}
    costs: dict[str, list[Cost]] = {name: [] for name in turns}

    def turn(name: str) -> float:
        costs[name].append(turns[name]())
        return costs[name][-1].cpu_seconds

    interleave({name: partial(turn, name) for name in turns}, options.rounds, num_warm_up=0)
    medians = {name: median_fields(of_layout) for name, of_layout in costs.items()}
    publish(options, "mesh", f"{_preamble(options, sizes)}\n\n{_table(medians)}", _measures(medians))


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


def _measure(name: str, num_steps: int, sizes: dict[str, Any]) -> Cost:
    """Run a layout once, and give its median step."""
    with tempfile.TemporaryDirectory() as folder:
        # Two processes without a group know nothing of each other.
        is_layout = name not in (ALONE, BESIDE)
        arguments = (folder, LAYOUTS[name], num_steps, sizes)
        num_processes = 1 if name == ALONE else NUM_RANKS
        ranks = run_ranks(_train, num_processes, *arguments, group=is_layout, timeout_seconds=600)
    return _of_ranks(ranks) if is_layout else median_fields([cost for of_process in ranks for cost in of_process])


def _measure_torch(name: str, num_steps: int, sizes: dict[str, Any]) -> Cost:
    return _of_ranks(run_ranks(_train_by_torch, NUM_RANKS, name, num_steps, sizes, timeout_seconds=600))


def _of_ranks(ranks: list[list[Cost]]) -> Cost:
    """Give the median step of a run; all ranks end a step together."""
    return median_fields(
        [
            Cost(max(cost.wall_seconds for cost in step), sum(cost.cpu_seconds for cost in step))
            for step in zip(*ranks, strict=True)
        ]
    )


def _train(folder: str, layout: dict[str, Any], num_steps: int, sizes: dict[str, Any]) -> list[Cost]:
    """Train for some steps on one rank; give what each took but the first ones."""
    clock = Clock()
    trainer = make_trainer(
        folder,
        layout,
        sizes,
        batch=(NUM_MICROBATCHES, 1),
        sequence_tokens=SEQUENCE_TOKENS,
        max_steps=NUM_WARMUP_STEPS + num_steps,
        callbacks=[clock],
    )
    trainer.train()
    return _costs(clock.readings[NUM_WARMUP_STEPS - 1 :])


def _costs(readings: Sequence[Cost]) -> list[Cost]:
    return [
        Cost(after.wall_seconds - before.wall_seconds, after.cpu_seconds - before.cpu_seconds)
        for before, after in pairwise(readings)
    ]


# ---- torch's own calls ----


def _train_by_torch(name: str, num_steps: int, sizes: dict[str, Any]) -> list[Cost]:
    """Train by torch's own calls in a bare loop: what a Trainer does besides is left out."""
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    _TORCH[name](model, mesh)
    # No operation on lists takes both kinds.
    kinds = [[p for p in model.parameters() if isinstance(p, DTensor) is is_sharded] for is_sharded in (True, False)]
    optimizer = torch.optim.AdamW([{"params": kind} for kind in kinds if kind], lr=5e-5, fused=True)
    shares_batch = name == "fsdp2"
    num_microbatches = NUM_MICROBATCHES // NUM_RANKS if shares_batch else NUM_MICROBATCHES
    readings = [Cost(perf_counter(), process_time())]
    for _ in range(NUM_WARMUP_STEPS + num_steps):
        tokens = torch.randint(sizes["vocab_size"], (NUM_MICROBATCHES, 1, SEQUENCE_TOKENS))
        for micro_batch in tokens[dist.get_rank() :: NUM_RANKS] if shares_batch else tokens:
            loss = model(input_ids=micro_batch, labels=micro_batch, use_cache=False).loss / num_microbatches
            loss.backward()
        _clip(kinds)
        optimizer.step()
        optimizer.zero_grad()
        readings.append(Cost(perf_counter(), process_time()))
    return _costs(readings[NUM_WARMUP_STEPS:])


def _clip(kinds: list[list[nn.Parameter]]) -> None:
    norms = [nn.utils.get_total_norm([p.grad for p in kind if p.grad is not None]) for kind in kinds if kind]
    norm = torch.stack([norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]).norm()
    for kind in kinds:
        nn.utils.clip_grads_with_norm_(kind, 1.0, norm)


def _shard_by_torch(model: LlamaForCausalLM, mesh: DeviceMesh) -> None:
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _split_by_torch(model: LlamaForCausalLM, mesh: DeviceMesh) -> None:
    for block in model.model.layers:
        parallelize_module(block, mesh, {name: style() for name, style in _PLAN.items()})


_TORCH = {"fsdp2": _shard_by_torch, "tensor": _split_by_torch}


# ---- what is shown ----


def _measures(medians: dict[str, Cost]) -> list[Measure]:
    """CPU time of each layout: a pipeline's is judged by that of one process, another's by that of torch."""
    alone = medians[ALONE].cpu_seconds
    measures = []
    for name in LAYOUTS.keys() - {ALONE, BESIDE}:
        ours, peer = medians[name].cpu_seconds, medians.get(f"{name}, torch")
        limits, goal, is_met = {ALONE: alone}, "", None
        if name in PIPELINES:
            limits |= {BESIDE: medians[BESIDE].cpu_seconds}
            goal, is_met = f"<= {MOST_OF_ALONE:g} x {ALONE}", ours <= MOST_OF_ALONE * alone
        elif peer is not None:
            goal, is_met = f"<= {MOST_OF_TORCH:g} x torch", ours <= MOST_OF_TORCH * peer.cpu_seconds
        measures.append(
            Measure(
                what=f"CPU time of a step, {name}, all {NUM_RANKS} ranks together",
                unit="s",
                ours=ours,
                peers={} if name in PIPELINES else {"torch": _NO_PEER if peer is None else peer.cpu_seconds},
                limits=limits,
                goal=goal,
                is_met=is_met,
            )
        )
    return sorted(measures, key=lambda measure: measure.what)


def _table(medians: dict[str, Cost]) -> str:
    """CPU time beside that of one process, and of pipelines the wall time beside the schedule's ideal."""
    alone, beside = medians[ALONE], medians[BESIDE]
    rows = []
    for name, cost in medians.items():
        cells = [cost.cpu_seconds, cost.cpu_seconds / alone.cpu_seconds, cost.cpu_seconds / beside.cpu_seconds]
        ideal = "-"
        if name in PIPELINES:
            ideal = f"{cost.wall_seconds / _ideal_seconds(PIPELINES[name], alone.wall_seconds):.3f}"
        rows.append([name, *(f"{cell:.3f}" for cell in [*cells, cost.wall_seconds]), ideal])
    return markdown(["layout", "CPU s", "x alone", "x beside another", "wall s", "x ideal"], rows)


def _ideal_seconds(schedule: Schedule, single_seconds: float) -> float:
    """All ranks compute at the speed of one process alone, and idle only where the schedule says so."""
    num_stages = stages_per_rank(schedule, None)
    bubble = bubble_fraction(
        schedule, num_ranks=NUM_RANKS, stages_per_rank=num_stages, num_microbatches=NUM_MICROBATCHES
    )
    return single_seconds / NUM_RANKS / (1 - bubble)


def _preamble(options: argparse.Namespace, sizes: dict[str, Any]) -> str:
    num_parameters = sum(p.numel() for p in LlamaForCausalLM(LlamaConfig(**sizes)).parameters())
    return (
        "## A small Llama on two ranks\n\n"
        f"{num_parameters / 1e6:.1f} M parameters in {sizes['num_hidden_layers']} blocks, float32, "
        f"{NUM_MICROBATCHES} micro batches of one sequence of {SEQUENCE_TOKENS} tokens a step, AdamW, one thread a "
        "rank, through `hfdist.Trainer`. 1f1b, zbv: a pipeline; fsdp2: each rank reads half of the sequences; tensor: "
        "both read all, and each has half of the matrices of a block; context: each computes half of each sequence. "
        "Beside them `fully_shard` and `parallelize_module` of torch in a bare loop, with the same micro batches. "
        "CPU: of all threads of all ranks in one step. Two processes that share a machine slow each other down even "
        "if they have nothing to do with each other, so one is also measured beside another like it. All keep the "
        "memory that they free (docs/performance.md). Ideal: the wall time of one process, divided by the ranks and by "
        "the share in which the schedule keeps them busy. accelerate's FSDP2 and ParallelismConfig, and torchtitan, do "
        f"not run on a CPU. Medians of {options.rounds} interleaved runs, each the median of {options.steps} steps "
        f"after {NUM_WARMUP_STEPS}.\n\n"
        f"{describe_run('benchmarks.mesh', 'torch', 'transformers')}"
    )


if __name__ == "__main__":
    main()
