"""A small Llama on two ranks that shard its state, its matrices or its sequences, beside torch and accelerate.

python -m benchmarks.mesh --write
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.mesh import peers
from benchmarks.overlay import UnavailableError
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
from benchmarks.rounds import median_fields, medians_or_reasons
from benchmarks.table import Measure, add_options, describe_run, last_said, markdown, publish
from hfdist.models.loss import LossHead
from hfdist.testing import RankFailed, run_ranks
from hfdist.trainer.run_options import RunOptions

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
_NO_KERNEL = "torch's context_parallel has no kernel for the CPU"
_NO_BACKWARD = "its Llama takes FlexAttention, which has no backward on a CPU (0.3.0)"
PEERS: dict[str, dict[str, str]] = {
    "fsdp2": {"torchtitan": _NO_BACKWARD},
    "tensor": {"torchtitan": _NO_BACKWARD},
    "context": {"torch": _NO_KERNEL, "torchtitan": _NO_BACKWARD},
}
"""Peers that are not run, and why."""


def main() -> None:
    """Measure, print the table, and write it down if asked to."""
    options = _options()
    keep_freed_memory()
    sizes = (QUICK_SIZES if options.quick else SIZES) | _EVEN_HEADS
    turns: dict[str, Callable[[], Cost]] = {name: partial(_measure_own, name, options.steps, sizes) for name in LAYOUTS}
    for name, reasons in PEERS.items():
        for library in ("torch", "accelerate"):
            if library not in reasons:
                turns[f"{name}, {library}"] = partial(_measure_peer, library, name, options.steps, sizes)
    costs: dict[str, list[Cost]] = {name: [] for name in turns}

    def turn(name: str) -> float:
        costs[name].append(turns[name]())
        return costs[name][-1].cpu_seconds

    contenders = {name: partial(turn, name) for name in turns}
    outcomes = medians_or_reasons(contenders, options.rounds, num_warm_up=0)
    reasons = {name: reason for name, reason in outcomes.items() if isinstance(reason, str)}
    medians = {name: median_fields(of_layout) for name, of_layout in costs.items() if name not in reasons}
    publish(options, "mesh", "\n\n".join([_preamble(options), _table(medians)]), _measures(medians, reasons))


def _measure_own(name: str, num_steps: int, sizes: dict[str, Any]) -> Cost:
    with tempfile.TemporaryDirectory() as folder:
        num_ranks = 1 if name == ALONE else NUM_RANKS
        # As `model.loss=auto` has it for this model.
        arguments = LAYOUTS[name], num_steps, sizes, RunOptions(loss_head=LossHead())
        return _of_ranks(run_ranks(train, num_ranks, folder, *arguments, timeout_seconds=600))


def _measure_peer(library: str, layout: str, num_steps: int, sizes: dict[str, Any]) -> Cost:
    try:
        return _of_ranks(run_ranks(peers.train, NUM_RANKS, library, layout, num_steps, sizes, timeout_seconds=600))
    except RankFailed as error:
        raise UnavailableError(last_said(str(error))) from error


def _of_ranks(ranks: list[list[Cost]]) -> Cost:
    """The median step of a run; all ranks end a step together."""
    return median_fields(
        [
            Cost(max(cost.wall_seconds for cost in step), sum(cost.cpu_seconds for cost in step))
            for step in zip(*ranks, strict=True)
        ]
    )


def _measures(medians: dict[str, Cost], failed: dict[str, str]) -> list[Measure]:
    measures = []
    for name, reasons in sorted(PEERS.items()):
        ours = medians[name].cpu_seconds
        ran = {library: medians.get(f"{name}, {library}") for library in ("torch", "accelerate")}
        figures = {library: cost.cpu_seconds for library, cost in ran.items() if cost is not None}
        said = {library: failed[f"{name}, {library}"] for library in ran if f"{name}, {library}" in failed}
        measures.append(
            Measure(
                what=f"CPU time of a step, {name}, both ranks together",
                unit="s",
                ours=ours,
                peers={**figures, **said, **reasons},
                limits={ALONE: medians[ALONE].cpu_seconds},
                goal=f"<= {MOST_OF_PEER:g} x the best peer" if figures else "",
                is_met=ours <= MOST_OF_PEER * min(figures.values()) if figures else None,
            )
        )
    return measures


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
        "thread a rank, through `hfdist.Trainer` with the loss in chunks, as recipes have it. fsdp2: each rank reads "
        "half of the sequences; tensor: both read all, and each has half of the matrices of a block; context: each "
        "computes half of each sequence. Beside them `fully_shard` and `parallelize_module` of torch, and FSDP2 and "
        "ParallelismConfig of accelerate, in a bare loop with the same micro batches and the model's own loss. "
        "accelerate's FSDP2 holds whole gradients until the last micro batch, and reduces them once; hfdist and torch "
        "reduce them to shards in each. accelerate refuses both on a CPU, so it is told that its ranks have GPUs. "
        "torchtitan does not run on a CPU. CPU: of all threads of both ranks. "
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
