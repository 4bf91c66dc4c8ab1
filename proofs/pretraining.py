"""The example of docs/encoders-and-decoders.md: a classifier from a pretrained encoder, beside one from random weights.

python -m proofs.pretraining docs/pretraining-proof.md docs/images/pretraining.png
"""

from __future__ import annotations

import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from benchmarks.table import markdown
from hfdist.records import RunFolder, read_lines
from proofs.follow_readme import ROOT, shown_programs
from proofs.reinforcement import Cost, run
from proofs.word_tags import TaggedWord, linear_accuracy, read_tagged

PROGRAM = "replaced.py"
SEEDS = (1, 2, 3)
PRETRAINING, CLASSIFIER = "stdlib_mlm", "stdlib_replaced"
PRETRAINED, RANDOM = "pretrained", "random weights"
SIDES = {PRETRAINED: (), RANDOM: ("model.name=replaced/encoder", "model.init=random", "model.allow_missing=false")}
"""What the command line says of each side's first weights."""
ONE_PROCESS = ("strategy=single", "launch.processes=1", "train.micro_batch_size=16")
BAG, NEIGHBOURS = "the word, and a bag of its function's words", "the word, and two words to each side"
MAJORITY = "the most frequent tag"


class Outcome(NamedTuple):
    """What both classifiers of a seed came to."""

    seed: int
    curves: dict[str, dict[int, float]]
    """The accuracy of held-out tags by step, by side."""
    costs: dict[str, Cost]

    def accuracy(self, side: str) -> float:
        """Give the accuracy of a side after the last step."""
        return self.curves[side][max(self.curves[side])]

    @property
    def gain(self) -> float:
        """By how much the pretrained one is better."""
        return self.accuracy(PRETRAINED) - self.accuracy(RANDOM)


def held_out(run_dir: Path, figure: str) -> dict[int, float]:
    """Give the held-out figure of a run, by step."""
    return {line["step"]: line[figure] for line in read_lines(RunFolder(run_dir).metrics) if figure in line}


def run_dir_of(side: str, seed: int) -> str:
    """Give the folder of a classifier's run."""
    return f"{side.partition(' ')[0]}-{seed}"


def classifying(side: str, seed: int) -> list[str]:
    """Give the words of `hfdist tune` for the classifier of a side."""
    own = (f"train.seed={seed}", f"run.dir={run_dir_of(side, seed)}")
    return [f"+experiment={CLASSIFIER}", *SIDES[side], *ONE_PROCESS, *own]


def learn(folder: Path, seed: int) -> Outcome:
    """Train both classifiers of a seed; the folder has the rows and the pretrained encoder."""
    costs, curves = {}, {}
    for side in SIDES:
        costs[side] = run(folder, "tune", *classifying(side, seed))
        curves[side] = held_out(folder / run_dir_of(side, seed), "eval_accuracy")
    return Outcome(seed, curves, costs)


def in_bag(word: TaggedWord) -> Iterator[str]:
    """Give what a classifier by words knows: the word, and which other ones its function has."""
    yield f"itself {word.words[word.place]}"
    yield from (f"has {other}" for other in set(word.words))


def beside(word: TaggedWord) -> Iterator[str]:
    """Give the word and its four neighbours, each with its place."""
    for offset in range(-2, 3):
        index = word.place + offset
        yield f"{offset} {word.words[index] if 0 <= index < len(word.words) else None}"


def by_words(folder: Path) -> dict[str, float]:
    """Give the accuracy of classifiers that are no neural networks, on the rows of a folder."""
    labelled, tested = (read_tagged(folder / f"{name}.jsonl") for name in ("labelled", "held_out"))
    most = statistics.mode(word.tag for word in labelled)
    return {
        MAJORITY: statistics.mean(word.tag == most for word in tested),
        BAG: linear_accuracy(labelled, tested, in_bag),
        NEIGHBOURS: linear_accuracy(labelled, tested, beside),
    }


def draw(outcomes: Sequence[Outcome], others: dict[str, float]) -> Figure:
    """Draw the accuracy over steps of each seed and side, beside that of a bag of words."""
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for side, colour in zip(SIDES, ("C0", "C1"), strict=True):
        for one in outcomes:
            curve = one.curves[side]
            named = side if one is outcomes[0] else None
            axes.plot(list(curve), list(curve.values()), marker="o", color=colour, label=named)
    axes.axhline(others[BAG], color="0.3", linestyle="--", label="bag of words")
    axes.set(xlabel="steps of the classifier", ylabel="accuracy of held-out tags")
    axes.legend(frameon=False)
    return figure


def describe(
    losses: dict[int, float], cost: Cost, outcomes: Sequence[Outcome], others: dict[str, float], sizes: tuple[int, int]
) -> str:
    """The page; `losses`: of held-out hidden tokens by step; `sizes`: tags to learn from, and held-out ones."""
    rows = [
        [str(one.seed), *(f"{one.accuracy(side):.1%}" for side in SIDES), f"{100 * one.gain:+.1f}"] for one in outcomes
    ]
    means = {side: statistics.mean(one.accuracy(side) for one in outcomes) for side in SIDES}
    all_rows = [
        *([f"the encoder, {side}", f"{mean:.1%}"] for side, mean in means.items()),
        *([name, f"{accuracy:.1%}"] for name, accuracy in others.items()),
    ]
    seconds = statistics.mean(one.costs[side].cpu_seconds for one in outcomes for side in SIDES)
    return f"""\
# Pretraining, measured

A small encoder learns hidden words of the standard library's functions. Then it learns from 200 functions which of
their words were replaced by words of other functions: [the example](encoders-and-decoders.md#an-example-that-learns) of
masked models. The table has its accuracy on tagged words of 400 functions in other files, after the last step, beside
the same classifier from random weights, by {len(outcomes)} seeds. `make pretraining` writes this page and the picture.

```
make pretraining
```

{markdown(["seed", *SIDES, "gain, points"], rows)}

With {sum(one.gain > 0 for one in outcomes)} of {len(outcomes)} seeds the pretrained one is better.

![Accuracy of held-out tags by step of the classifier, by three seeds, beside a bag of words](images/pretraining.png)

Both means, beside classifiers that are no neural networks:

{markdown(["by", "accuracy"], all_rows)}

The last two are logistic regressions on the same {sizes[0]:,} tags. There are {sizes[1]:,} held-out ones. Written and
replaced words are alike by themselves: the replaced ones of all functions were exchanged among each other. So a word
without its place says little.

## What is compared

* **The pretraining** is `+experiment={PRETRAINING}`, once for all seeds. The loss of hidden tokens in held-out texts
  fell from {losses[0]:.2f} to {losses[max(losses)]:.2f} nats in {cost.cpu_seconds:.0f} CPU seconds. Its texts have the
  functions that are learned from, as they were written, and none that the classifiers are measured with.
* **The classifiers** are `+experiment={CLASSIFIER}` on both sides, with the same rows, rate and number of steps, in the
  same order for a seed. A run takes {seconds:.0f} CPU seconds. The seed draws the layer that classifies, and without
  pretraining all weights.

One process, Python {platform.python_version()}, torch {version("torch")}, transformers {version("transformers")}.
"""


def main() -> int:
    """Run all, and write the page and the picture; 0: the pretrained one beats all others, with each seed."""
    page, picture = map(Path, sys.argv[1:])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = folder / PROGRAM
        program.write_text(shown_programs(ROOT / "docs" / "encoders-and-decoders.md")[PROGRAM], encoding="utf-8")
        subprocess.run([sys.executable, program], cwd=folder, check=True)
        cost = run(folder, "tune", f"+experiment={PRETRAINING}", *ONE_PROCESS)
        losses = held_out(folder / "runs" / PRETRAINING, "eval_loss")
        outcomes = [learn(folder, seed) for seed in SEEDS]
        rows = folder / "replaced"
        others = by_words(rows)
        num_labelled, num_tested = (len(read_tagged(rows / f"{name}.jsonl")) for name in ("labelled", "held_out"))
    draw(outcomes, others).savefig(picture, dpi=100)
    page.write_text(describe(losses, cost, outcomes, others, (num_labelled, num_tested)), encoding="utf-8")
    best = max(others.values())
    return 0 if all(one.gain > 0 and one.accuracy(PRETRAINED) > best for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
