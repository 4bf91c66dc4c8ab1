"""A parameter server with one slow island of three: `python -m proofs.slow_island docs/islands.md`.

Islands sleep before each step, so that the machine's own speed hardly counts. The table between the marks is new then.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from hfdist.records import RunFolder, read_lines
from proofs.plan_search import write
from tests.distributed.island_runs import Island, before_steps, overrides_of, served
from tests.distributed.runs import eval_losses
from tests.imports import import_all

BEGIN, END = "<!-- slow island: begin -->", "<!-- slow island: end -->"
FAST_SECONDS, SLOW_SECONDS = 0.3, 1.5
NUM_ISLANDS, NUM_STEPS = 3, 60
COMMON = ("islands=parameter_server", "data.lanes=24", "data.eval_sequences=64", "checkpoint=none",
          "train.global_batch_size=4", "train.micro_batch_size=4", "optimizer.warmup_steps=5")  # fmt: skip
ARMS = (
    ("synchronous", "0", NUM_STEPS),
    ("staleness 2", "2", NUM_STEPS),
    ("asynchronous", "null", NUM_STEPS),
    ("asynchronous, a third of the tokens", "null", NUM_STEPS // NUM_ISLANDS),
)
RATES = (1e-3, 2e-3, 4e-3)


def run_arm(staleness: str, num_steps: int, lr: float) -> tuple[float, float, float, float]:
    """Give the held-out loss after all updates, their number, and when the first and the last island had ended."""
    keys = (*COMMON, f"islands.staleness={staleness}", f"train.max_steps={num_steps}", f"optimizer.lr={lr}")
    with tempfile.TemporaryDirectory() as folder, served() as address:

        def sleeping(index: int) -> Callable[[], None]:
            def act(step: int) -> None:
                with (Path(folder) / f"{index}.times").open("a") as file:
                    file.write(f"{time.time()}\n")
                time.sleep(FAST_SECONDS if index else SLOW_SECONDS)

            return before_steps(act)

        islands = [
            Island(
                Path(folder) / f"{index}",
                1,
                *overrides_of(address, index, NUM_ISLANDS, *keys),
                at_start=sleeping(index),
            )
            for index in range(NUM_ISLANDS)
        ]
        failures = [found for island in islands if (found := island.wait(600)) is not None]
        for island in islands:
            island.kill()
        assert not failures, failures[0]
        times = [[float(line) for line in path.read_text().split()] for path in sorted(Path(folder).glob("*.times"))]
        seconds = [own[-1] - own[0] for own in times]
        lines = [line for line in read_lines(RunFolder(islands[0].folder).metrics) if "islands/updates" in line]
        # The slow one ends after all updates.
        updates = lines[-1]["islands/updates"]
        return eval_losses(islands[0].folder)[-1], updates, min(seconds), max(seconds)


def table() -> str:
    """The rows of the page, each with its best rate."""
    lines = ["| | updates | sequences | a fast island | the slow one | held-out loss | lr |",
             "|---|---:|---:|---:|---:|---:|---:|"]  # fmt: skip
    for name, staleness, num_steps in ARMS:
        found = {lr: run_arm(staleness, num_steps, lr) for lr in RATES}
        lr = min(found, key=lambda rate: found[rate][0])
        loss, updates, first, last = found[lr]
        sequences = NUM_ISLANDS * num_steps * 4
        lines.append(f"| {name} | {updates:.0f} | {sequences} | {first:.0f} s | {last:.0f} s | {loss:.3f} | {lr:g} |")
    return "\n".join(lines)


if __name__ == "__main__":
    import_all()
    write(Path(sys.argv[1]), table(), BEGIN, END)
