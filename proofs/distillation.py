"""A student with a teacher beside the same student without, by three seeds. `python -m proofs.distillation PAGE`."""

from __future__ import annotations

import math
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from benchmarks.table import markdown
from hfdist.config.batch import IGNORED
from hfdist.config.composition.compose import compose_config
from hfdist.run import prepare_run
from proofs.reinforcement import Cost, run

SEEDS = (1, 2, 3)
TEACHER_STEPS, STUDENT_STEPS = 300, 100
TEACHER = "teacher"
NEXT_TOKENS, DISTILLED = "next tokens", "from the teacher"
_ROWS_AT_ONCE = 16

COMMON = (
    *("data=stdlib", "data.format=text", "data.packing=concat", "data.too_long=split", "data.lanes=16"),
    *("data.sequence_length=128", "data.eval_sequences=256", "data.workers=0"),
    *("model.tokenizer.vocab_size=512", "model.tokenizer.train_bytes=1000000"),
    *("train.epochs=null", "train.global_batch_size=16", "train.micro_batch_size=16", "train.eval_every=null"),
    *("optimizer=adamw", "optimizer.warmup_steps=10", "evaluate.at_start=false", "report.sample_prompt=null"),
    *("checkpoint=none", "checkpoint.keep_best=false", "strategy=single", "launch.processes=1"),
)
OF_TEACHER = ("model=demo", "optimizer.lr=2e-3", f"train.max_steps={TEACHER_STEPS}", "train.seed=0")
OF_STUDENT = ("model=tiny", "optimizer.lr=4e-3", f"train.max_steps={STUDENT_STEPS}")


class Outcome(NamedTuple):
    """What both students of a seed came to."""

    seed: int
    losses: dict[str, float]
    """Held-out losses of next tokens, in nats, by side."""
    costs: dict[str, Cost]

    @property
    def gain(self) -> float:
        """By how much the distilled one is lower."""
        return self.losses[NEXT_TOKENS] - self.losses[DISTILLED]


def teaching() -> list[str]:
    """The words of `hfdist pretrain` for the teacher."""
    return [*COMMON, *OF_TEACHER, f"run.dir={TEACHER}"]


def pretraining(seed: int) -> list[str]:
    """The words of `hfdist pretrain` for a student without a teacher."""
    return [*COMMON, *OF_STUDENT, f"train.seed={seed}", f"run.dir=plain-{seed}"]


def distilling(seed: int) -> list[str]:
    """The words of `hfdist tune` for the same student with one: the same weights, data, order and steps."""
    own = ("task=distill", f"task.teacher={TEACHER}/model", f"train.seed={seed}", f"run.dir=distilled-{seed}")
    return [*COMMON, *OF_STUDENT, *own]


@torch.no_grad()
def held_out_loss(folder: Path, words: Sequence[str], model: Path) -> float:
    """Give the mean loss of next tokens of a Hub folder on the held-out sequences of a pretraining, in nats."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        prepared = prepare_run(compose_config([*words, "report=quiet"], name="pretrain"))
        prepared.find_model()
        prepared.open_data()
    finally:
        os.chdir(before)
    items = list(prepared.data.held_out)
    own, total, count = AutoModelForCausalLM.from_pretrained(model, dtype="float32").eval(), 0.0, 0
    for first in range(0, len(items), _ROWS_AT_ONCE):
        some = items[first : first + _ROWS_AT_ONCE]
        batch = {name: torch.stack([one[name] for one in some]) for name in some[0]}
        labels = batch.pop("labels")[:, 1:]
        logits = own(input_ids=batch["input_ids"]).logits[:, :-1]
        total += float(cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"))
        count += int((labels != IGNORED).sum())
    return total / count


def learn(folder: Path, seed: int) -> Outcome:
    """Train both students of a seed; the folder has the teacher."""
    costs = {NEXT_TOKENS: run(folder, "pretrain", *pretraining(seed))}
    costs[DISTILLED] = run(folder, "tune", *distilling(seed))
    names = {NEXT_TOKENS: f"plain-{seed}", DISTILLED: f"distilled-{seed}"}
    words = pretraining(seed)
    losses = {side: held_out_loss(folder, words, folder / name / "model") for side, name in names.items()}
    return Outcome(seed, losses, costs)


def _table(outcomes: Sequence[Outcome]) -> str:
    sides = (NEXT_TOKENS, DISTILLED)
    rows = [
        [
            str(one.seed),
            *(f"{one.losses[side]:.3f}" for side in sides),
            f"{one.gain:+.3f}",
            *(f"{one.costs[side].cpu_seconds:.0f}" for side in sides),
        ]
        for one in outcomes
    ]
    return markdown(["seed", *sides, "gain", *(f"CPU seconds, {side}" for side in sides)], rows)


def describe(of_teacher: float, cost: Cost, outcomes: Sequence[Outcome]) -> str:
    """The page."""
    versions = f"torch {version('torch')}, transformers {version('transformers')}"
    num_better = sum(one.gain > 0 for one in outcomes)
    gain = statistics.mean(one.gain for one in outcomes)
    return f"""\
# Distillation, measured

A small student learns the standard library's source twice, with the same first weights, sequences, order and number
of steps: once the next tokens alone, and once what [a teacher](distill.md) says of each of them. The table has the loss
of next tokens in the held-out sequences after the last step, in nats a token. `make distillation` writes this page.

```
make distillation
```

With {num_better} of {len(outcomes)} seeds the distilled student has the lower loss. The mean gain is {gain:.3f} nats a
token, a perplexity that is {1 - math.exp(-gain):.1%} lower. The teacher's own loss is {of_teacher:.3f}.

{_table(outcomes)}

Python {platform.python_version()}, {versions}; {os.cpu_count()} cores. CPU seconds are those of all processes of a run,
from its start to its end. The teacher took {cost.cpu_seconds:.0f}.

## What is compared

* **The teacher** is the Llama of `model=demo`, {TEACHER_STEPS} steps of 16 sequences of 128 tokens; there is one for
  all seeds. It has a tokenizer of 512 tokens, and has never seen the held-out sequences.
* **The students** are the Llama of `model=tiny`, {STUDENT_STEPS} steps of as many tokens. Rate and schedule are the
  same on both sides. They were chosen once, before the first run, and not tuned.
* **The loss** is computed from the exported folders by transformers, in the same way on both sides: the held-out loss
  of a distilled run itself is a divergence.

The teacher's distribution tells the student of each token how likely all others are, so that a gradient has less noise.
It costs the teacher's forward: with the same CPU seconds the other student could take more steps.
"""


def main() -> int:
    """Run all, and write the page; 0: each seed ended lower with the teacher."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cost = run(folder, "pretrain", *teaching())
        of_teacher = held_out_loss(folder, pretraining(SEEDS[0]), folder / TEACHER / "model")
        outcomes = [learn(folder, seed) for seed in SEEDS]
    Path(sys.argv[1]).write_text(describe(of_teacher, cost, outcomes), encoding="utf-8")
    return 0 if all(one.gain > 0 for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
