"""The example of docs/encoders-and-decoders.md: a classifier from a pretrained encoder, beside one from random weights.

python -m proofs.pretraining docs/pretraining-proof.md
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from benchmarks.table import markdown
from hfdist.records import RunFolder, read_lines
from proofs.follow_readme import ROOT, shown_programs
from proofs.reinforcement import Cost, run

PROGRAM = "packages.py"
SEEDS = (1, 2, 3)
PRETRAINING, CLASSIFIER = "docstrings_mlm", "docstrings_packages"
PRETRAINED, RANDOM = "pretrained", "random weights"
SIDES = {PRETRAINED: (), RANDOM: ("model.name=packages/encoder", "model.init=random", "model.allow_missing=false")}
"""What the command line says of each side's first weights."""
ONE_PROCESS = ("strategy=single", "launch.processes=1")


class Outcome(NamedTuple):
    """What both classifiers of a seed came to."""

    seed: int
    accuracies: dict[str, float]
    """Of held-out docstrings, after the last step, by side."""
    costs: dict[str, Cost]

    @property
    def gain(self) -> float:
        """By how much the pretrained one is better."""
        return self.accuracies[PRETRAINED] - self.accuracies[RANDOM]


def classifying(side: str, seed: int) -> list[str]:
    """Give the words of `hfdist tune` for the classifier of a side."""
    own = (f"train.seed={seed}", f"run.dir={side.partition(' ')[0]}-{seed}")
    return [f"+experiment={CLASSIFIER}", *SIDES[side], *ONE_PROCESS, "train.micro_batch_size=16", *own]


def held_out(run_dir: Path, figure: str) -> list[float]:
    """Give the held-out figure of each evaluation of a run, in order."""
    return [line[figure] for line in read_lines(RunFolder(run_dir).metrics) if figure in line]


def learn(folder: Path, seed: int) -> Outcome:
    """Train both classifiers of a seed; the folder has the rows and the pretrained encoder."""
    costs, accuracies = {}, {}
    for side in SIDES:
        words = classifying(side, seed)
        costs[side] = run(folder, "tune", *words)
        accuracies[side] = held_out(folder / words[-1].partition("=")[2], "eval_accuracy")[-1]
    return Outcome(seed, accuracies, costs)


def describe(losses: Sequence[float], cost: Cost, outcomes: Sequence[Outcome]) -> str:
    """The page; `losses`: of held-out hidden tokens, before and after the pretraining."""
    rows = [
        [
            str(one.seed),
            *(f"{one.accuracies[side]:.1%}" for side in SIDES),
            f"{100 * one.gain:+.1f}",
            *(f"{one.costs[side].cpu_seconds:.0f}" for side in SIDES),
        ]
        for one in outcomes
    ]
    table = markdown(["seed", *SIDES, "gain, points", *(f"CPU seconds, {side}" for side in SIDES)], rows)
    means = {side: statistics.mean(one.accuracies[side] for one in outcomes) for side in SIDES}
    return f"""\
# Pretraining, measured

An encoder is pretrained on the docstrings of the standard library. Then it learns from 400 of them which of ten
packages each is of: [the example](encoders-and-decoders.md#an-example-that-learns) of masked models. The table has its
accuracy on 400 held-out docstrings after the last step, beside the same classifier from random weights, by
{len(outcomes)} seeds. `make pretraining` writes this page.

```
make pretraining
```

With {sum(one.gain > 0 for one in outcomes)} of {len(outcomes)} seeds the pretrained one is better. The mean accuracy
is {means[PRETRAINED]:.1%} with pretraining, and {means[RANDOM]:.1%} without. Guessing gives 10 %.

{table}

Python {platform.python_version()}, torch {version("torch")}, transformers {version("transformers")}; \
{os.cpu_count()} cores. CPU seconds are those of a run from its start to its end.

## What is compared

* **The pretraining** is `+experiment={PRETRAINING}`, once for all seeds. The loss of hidden tokens in held-out texts
  fell from {losses[0]:.2f} to {losses[-1]:.2f} nats in {cost.cpu_seconds:.0f} CPU seconds. It has never seen the
  docstrings that the classifiers are measured with.
* **The classifiers** are `+experiment={CLASSIFIER}` on both sides, with the same rows, order, rate and number of steps.
  The seed draws the layer that classifies, and without pretraining all weights.
"""


def main() -> int:
    """Run all, and write the page; 0: the pretrained one is better with each seed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = folder / PROGRAM
        program.write_text(shown_programs(ROOT / "docs" / "encoders-and-decoders.md")[PROGRAM], encoding="utf-8")
        subprocess.run([sys.executable, program], cwd=folder, check=True)
        cost = run(folder, "tune", f"+experiment={PRETRAINING}", *ONE_PROCESS, "train.micro_batch_size=32")
        losses = held_out(folder / "runs" / PRETRAINING, "eval_loss")
        outcomes = [learn(folder, seed) for seed in SEEDS]
    Path(sys.argv[1]).write_text(describe(losses, cost, outcomes), encoding="utf-8")
    return 0 if all(one.gain > 0 for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
