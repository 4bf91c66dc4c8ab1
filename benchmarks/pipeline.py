"""Pipeline schedules of hfdist and its peers, timed with emulated stages against DeepSpeed and against their bound.

python -m benchmarks.pipeline --write
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist

from benchmarks.contenders import CONTENDERS, Contender, Work
from benchmarks.emulated import Leg
from benchmarks.table import Measure, describe_run, markdown, publish, read_options
from hfdist.testing import run_ranks

LEG_SECONDS, QUICK_LEG_SECONDS = 0.02, 0.004
MICROBATCHES_PER_RANK = 2
_MOST_OF_BOUND, _MOST_OF_DEEPSPEED = 1.05, 0.8


class Run(NamedTuple):
    """One step of one contender on one rank."""

    start_seconds: float
    end_seconds: float
    legs: list[Leg]


class Timing(NamedTuple):
    """What a contender took at one number of ranks."""

    work: Work
    step_seconds: float


def main() -> None:
    """Measure, print the table, and write it down if asked to."""
    ranks = {"type": int, "nargs": "+", "default": [2, 4, 8], "help": "numbers of pipeline ranks"}
    options = read_options("pipeline", __doc__, rounds=5, ranks=ranks)
    if options.quick:
        options.ranks = [2]
    leg_seconds = QUICK_LEG_SECONDS if options.quick else LEG_SECONDS
    works = [Work(num_ranks, MICROBATCHES_PER_RANK * num_ranks, leg_seconds) for num_ranks in options.ranks]
    timings = {work.num_ranks: measure(work, options.rounds) for work in works}
    section = f"{_preamble(options.rounds, leg_seconds)}\n\n{times_table(timings)}"
    publish(options, "pipeline", section, measures_of(timings))


def measure(work: Work, num_repeats: int) -> list[Timing]:
    """The median step of every contender; all take their turn in each repeat, so that a busy spell hits all alike."""
    ranks: list[list[list[Run]]] = run_ranks(_run_rank, work.num_ranks, work, num_repeats, timeout_seconds=600)
    timings = []
    for index, contender in enumerate(CONTENDERS):
        repeats = list(zip(*(rank[index] for rank in ranks), strict=True))
        check_legs(contender, work, [run.legs for runs in repeats for run in runs])
        timings.append(Timing(work, statistics.median(map(_length_seconds, repeats))))
    return timings


def check_legs(contender: Contender, work: Work, logs: list[list[Leg]]) -> None:
    """Raise if a contender left out work, or split its backwards when it should not, or did not when it should.

    Where autograd runs both gradients in one backward, the weight's comes first; an input gradient that comes first
    was asked for alone.
    """
    num_split = 0
    for log in logs:
        counts = Counter(leg.kind for leg in log)
        expected = work.num_microbatches * contender.stages_per_rank
        if [counts[kind] for kind in "FIW"] != [expected] * 3:
            raise RuntimeError(f"{contender.runtime} {contender.schedule} ran {dict(counts)} legs, not {expected} each")
        for stage in {leg.stage for leg in log}:
            ends = [[leg.end_seconds for leg in log if (leg.stage, leg.kind) == (stage, kind)] for kind in "IW"]
            num_split += sum(own < weight for own, weight in zip(*ends, strict=True))
    if (num_split > 0) != contender.splits:
        raise RuntimeError(f"{contender.runtime} {contender.schedule} split {num_split} backwards")


def measures_of(timings: dict[int, list[Timing]]) -> list[Measure]:
    """For each number of ranks: hfdist's fastest schedule beside DeepSpeed, torch's fastest, and its own bound."""
    measures = []
    for num_ranks, at_size in timings.items():
        fastest: dict[str, tuple[float, Contender]] = {}
        for contender, timing in zip(CONTENDERS, at_size, strict=True):
            best = fastest.get(contender.runtime)
            if best is None or timing.step_seconds < best[0]:
                fastest[contender.runtime] = timing.step_seconds, contender
        seconds, ours = fastest["hfdist"]
        bound_seconds = at_size[0].work.bound_seconds(ours.stages_per_rank)
        deepspeed_seconds, torch_seconds = fastest["DeepSpeed"][0], fastest["torch"][0]
        measures.append(
            Measure(
                what=f"step of {num_ranks} emulated ranks, {ours.schedule}",
                unit="ms",
                ours=1e3 * seconds,
                peers={"DeepSpeed": 1e3 * deepspeed_seconds, "torch's fastest": 1e3 * torch_seconds},
                limits={"bound": 1e3 * bound_seconds, "legs of one rank": 1e3 * fastest["none"][0]},
                goal=f"<= {_MOST_OF_BOUND:g} x bound, <= {_MOST_OF_DEEPSPEED:g} x DeepSpeed",
                is_met=seconds <= min(_MOST_OF_BOUND * bound_seconds, _MOST_OF_DEEPSPEED * deepspeed_seconds),
            )
        )
    return measures


def times_table(timings: dict[int, list[Timing]]) -> str:
    """Milliseconds a step, and as a multiple of the bound and of DeepSpeed, the first contender."""
    header = ["runtime", "schedule", "v"]
    for num_ranks in timings:
        header += [f"p={num_ranks} ms", "bound ms", "x bound", "x DeepSpeed"]
    rows = []
    for index, contender in enumerate(CONTENDERS):
        row = [contender.runtime, contender.schedule, str(contender.stages_per_rank)]
        for at_size in timings.values():
            work, step_seconds = at_size[index]
            bound_seconds = work.bound_seconds(contender.stages_per_rank)
            row += [f"{1e3 * step_seconds:.1f}", f"{1e3 * bound_seconds:.0f}"]
            row += [f"{step_seconds / bound_seconds:.3f}", f"{step_seconds / at_size[0].step_seconds:.3f}"]
        rows.append(row)
    return markdown(header, rows)


def _run_rank(work: Work, num_repeats: int) -> list[list[Run]]:
    logs: list[list[Leg]] = [[] for _ in CONTENDERS]
    steps = [contender.build(work, log) for contender, log in zip(CONTENDERS, logs, strict=True)]
    for step in steps:
        step()
    # The collector would stop one contender or another for many milliseconds.
    gc.collect()
    gc.freeze()
    runs: list[list[Run]] = [[] for _ in CONTENDERS]
    for _ in range(num_repeats):
        for step, log, own in zip(steps, logs, runs, strict=True):
            log.clear()
            dist.barrier()
            start_seconds = time.monotonic()
            step()
            own.append(Run(start_seconds, time.monotonic(), list(log)))
    return runs


def _length_seconds(runs: Sequence[Run]) -> float:
    return max(run.end_seconds for run in runs) - min(run.start_seconds for run in runs)


def _preamble(num_rounds: int, leg_seconds: float) -> str:
    return (
        "## Pipeline schedules, emulated stages\n\n"
        f"Each rank sleeps {1e3 * leg_seconds:g} ms each for a forward (F), an input gradient and a weight gradient "
        f"(together B) of one micro batch, divided over its stages; m = {MICROBATCHES_PER_RANK}p micro batches. Time "
        f"from the first rank's start after a barrier to the last rank's end, median of {num_rounds} interleaved "
        "rounds; v stages a rank. "
        "Bound: m(F+B) + (p-1)F/v. "
        "The row without a runtime is one rank's legs without a pipeline: what no runtime can avoid here.\n\n"
        f"{describe_run('benchmarks.pipeline', 'torch', 'deepspeed')}"
    )


if __name__ == "__main__":
    main()
