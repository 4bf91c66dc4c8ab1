"""A small Llama on two ranks that shard its state, its matrices or its sequences, beside torch's own calls.

python -m benchmarks.mesh --write
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.pipeline_llama import (
    NUM_MICROBATCHES,
    NUM_WARMUP_STEPS,
    QUICK_SIZES,
    SEQUENCE_TOKENS,
    SIZES,
    Cost,
    keep_freed_memory,
    train,
)
from benchmarks.rounds import interleave, median_fields
from benchmarks.table import Measure, add_options, describe_run, markdown, publish
from hfdist.testing import run_ranks

NUM_RANKS = 2
MOST_OF_PEER = 0.9
ALONE = "one process"
LAYOUTS: dict[str, dict[str, Any]] = {
    ALONE: {},
    "fsdp2": {"sharding": "fsdp2"},
    "tensor": {"tensor": NUM_RANKS},
    "context": {"context": NUM_RANKS},
}
_EVEN_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
_PLAN = {
    **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ColwiseParallel),
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), ColwiseParallel),
    **dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), RowwiseParallel),
}
_NO_PEER = {"context": "torch's context_parallel has no kernel for the CPU"}


def main() -> None:
    """Measure, print the table, and write it down if asked to."""
    options = _options()
    keep_freed_memory()
    sizes = (QUICK_SIZES if options.quick else SIZES) | _EVEN_HEADS
    turns: dict[str, Callable[[], Cost]] = {name: partial(_measure_own, name, options.steps, sizes) for name in LAYOUTS}
    turns |= {f"{name}, torch": partial(_measure_torch, name, options.steps, sizes) for name in _TORCH}
    costs: dict[str, list[Cost]] = {name: [] for name in turns}

    def turn(name: str) -> float:
        costs[name].append(turns[name]())
        return costs[name][-1].cpu_seconds

    interleave({name: partial(turn, name) for name in turns}, options.rounds, num_warm_up=0)
    medians = {name: median_fields(of_layout) for name, of_layout in costs.items()}
    publish(options, "mesh", "\n\n".join([_preamble(options), _table(medians)]), _measures(medians))


def _measure_own(name: str, num_steps: int, sizes: dict[str, Any]) -> Cost:
    with tempfile.TemporaryDirectory() as folder:
        num_ranks = 1 if name == ALONE else NUM_RANKS
        return _of_ranks(run_ranks(train, num_ranks, folder, LAYOUTS[name], num_steps, sizes, timeout_seconds=600))


def _measure_torch(name: str, num_steps: int, sizes: dict[str, Any]) -> Cost:
    return _of_ranks(run_ranks(_train_by_torch, NUM_RANKS, name, num_steps, sizes, timeout_seconds=600))


def _of_ranks(ranks: list[list[Cost]]) -> Cost:
    """The median step of a run; all ranks end a step together."""
    return median_fields(
        [
            Cost(max(cost.wall_seconds for cost in step), sum(cost.cpu_seconds for cost in step))
            for step in zip(*ranks, strict=True)
        ]
    )


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
    return [
        Cost(after.wall_seconds - before.wall_seconds, after.cpu_seconds - before.cpu_seconds)
        for before, after in pairwise(readings[NUM_WARMUP_STEPS:])
    ]


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


def _measures(medians: dict[str, Cost]) -> list[Measure]:
    measures = []
    for name in LAYOUTS.keys() - {ALONE}:
        ours, peer = medians[name].cpu_seconds, medians.get(f"{name}, torch")
        measures.append(
            Measure(
                what=f"CPU time of a step, {name}, both ranks together",
                unit="s",
                ours=ours,
                peers={"torch": _NO_PEER[name] if peer is None else peer.cpu_seconds},
                limits={ALONE: medians[ALONE].cpu_seconds},
                goal="" if peer is None else f"<= {MOST_OF_PEER:g} x torch",
                is_met=None if peer is None else ours <= MOST_OF_PEER * peer.cpu_seconds,
            )
        )
    return sorted(measures, key=lambda measure: measure.what)


def _table(medians: dict[str, Cost]) -> str:
    alone = medians[ALONE]
    rows = [
        [name, f"{cost.cpu_seconds:.3f}", f"{cost.cpu_seconds / alone.cpu_seconds:.3f}", f"{cost.wall_seconds:.3f}"]
        for name, cost in medians.items()
    ]
    return markdown(["layout", "CPU s", "x one process", "wall s"], rows)


def _preamble(options: argparse.Namespace) -> str:
    return (
        "## A small Llama on two ranks\n\n"
        f"{NUM_MICROBATCHES} sequences of {SEQUENCE_TOKENS} tokens a step, one a micro batch, float32, AdamW, one "
        "thread a rank, through `hfdist.Trainer`. fsdp2: each rank reads half of the sequences; tensor: both read all, "
        "and each has half of the matrices of a block; context: each computes half of each sequence. Beside them "
        "`fully_shard` and `parallelize_module` of torch in a bare loop, with the same micro batches. CPU: of all "
        "threads of both ranks. accelerate's FSDP2 and ParallelismConfig, and torchtitan, do not run on a CPU. "
        f"Medians of {options.rounds} interleaved runs, each the median of {options.steps} steps after "
        f"{NUM_WARMUP_STEPS}.\n\n"
        f"{describe_run('benchmarks.mesh', 'torch', 'transformers')}"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mesh", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="runs of each layout, interleaved")
    parser.add_argument("--steps", type=int, default=4, help="timed optimizer steps of one run")
    options = add_options(parser).parse_args()
    if options.quick:
        options.rounds = options.steps = 1
    return options


if __name__ == "__main__":
    main()
