"""GRPO with a calculator beside GRPO in one turn, by three seeds. `python -m proofs.environments` writes the page."""

from __future__ import annotations

import json
import os
import platform
import random
import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from benchmarks.table import markdown
from hfdist.records import RunFolder, read_lines
from proofs.reinforcement import Cost, run

SEEDS = (1, 2, 3)
"""Others than 0, by which the settings were chosen."""
NUM_HELD_OUT = 200
SFT_STEPS, GRPO_STEPS = 400, 40


class Side(NamedTuple):
    """One of the two that are compared."""

    name: str
    share_of_calls: float
    """Conversations of the fine-tuning in which the assistant calls the calculator."""
    environment: tuple[str, ...]

    @property
    def label(self) -> str:
        """Its name in names of files."""
        return self.name.replace(" ", "-")


ACTED = Side("with a calculator", 0.5, ("task.environment=calculator", "task.max_turns=3"))
PLAIN = Side("in one turn", 0.0, ())
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}={% generation %}{{ message.content }}"
    "{{ eos_token }}{% endgeneration %}{% elif message.role == 'tool' %}<tool_response>{{ message.content }}"
    "</tool_response>{% else %}{{ message.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
"""A chat template of few tokens."""
COMMON = (
    *("data.lanes=8", "data.workers=0", "data.eval_fraction=0", "checkpoint=none", "strategy=single"),
    *("launch.processes=1", "train.epochs=null", "train.global_batch_size=32", "train.micro_batch_size=32"),
)
SFT = (
    *("model=tiny", "model.tokenizer.vocab_size=320", "data.format=messages"),
    *("data.chat.template=turns.jinja", "data.sequence_length=96", "optimizer=adamw", "optimizer.lr=5e-3"),
    *("optimizer.warmup_steps=20", f"train.max_steps={SFT_STEPS}", f"train.eval_every={SFT_STEPS}"),
    "data.eval_sources={held: {path: held_out.jsonl, format: prompt_completion}}",
)
GRPO = (
    *("model=hub", "task=grpo", "task.rewards={arithmetic: 1.0}", "task.max_new_tokens=64", "optimizer.lr=5e-4"),
    *("data=products.jsonl", "data.format=prompt_completion", "data.sequence_length=32"),
    *(f"train.max_steps={GRPO_STEPS}", f"train.eval_every={GRPO_STEPS // 4}"),
    *(f"data.eval_sequences={NUM_HELD_OUT}", f"evaluate.num_generations={NUM_HELD_OUT}"),
    "data.eval_sources={held: {path: held_out.jsonl}}",
)


def _says(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _asked(a: int, b: int) -> dict[str, object]:
    """A row of GRPO."""
    return {"prompt": [_says("user", f"{a}*{b}")], "completion": [_says("assistant", str(a * b))]}


def _shown(a: int, b: int, has_call: bool) -> dict[str, object]:
    """A conversation of the fine-tuning: a call before the answer, or the answer alone."""
    question, answer = _says("user", f"{a}*{b}"), _says("assistant", str(a * b))
    call = json.dumps({"name": "calculator", "arguments": {"expression": f"{a}*{b}"}})
    called = [_says("assistant", f"<tool_call>{call}</tool_call>"), _says("tool", str(a * b))]
    return {"messages": [question, *(called if has_call else []), answer]}


def write_rows(folder: Path) -> None:
    """Write products of two numbers of two digits: held out, for GRPO, and conversations of each side; a template."""
    draw = random.Random(0)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    draw.shuffle(pairs)
    held_out, others = pairs[:NUM_HELD_OUT], pairs[NUM_HELD_OUT:]
    files = {"held_out": [_asked(a, b) for a, b in held_out], "products": [_asked(a, b) for a, b in others]}
    for side in (ACTED, PLAIN):
        files[side.label] = [_shown(a, b, draw.random() < side.share_of_calls) for a, b in 2 * others]
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "turns.jinja").write_text(TEMPLATE)


class Wrong(NamedTuple):
    """Wrong answers that a run has kept of the second half of its steps."""

    number: int
    miscopied: int
    """Those after a right result of the tool."""


class Outcome(NamedTuple):
    """What one side came to, by one seed."""

    seed: int
    side: Side
    accuracies: dict[int, float]
    """Of greedy answers to held-out products, by step of GRPO."""
    calls: dict[int, float]
    """Mean calls of the tool in such an answer, by step; empty without an environment."""
    wrong: Wrong
    of_sft: Cost
    of_grpo: Cost

    @property
    def start(self) -> float:
        """Before the first step of GRPO."""
        return self.accuracies[0]

    @property
    def end(self) -> float:
        """After its last step."""
        return self.accuracies[max(self.accuracies)]


def fine_tuning(seed: int, side: Side) -> list[str]:
    """The words of `hfdist finetune` for a side."""
    return [*COMMON, *SFT, f"data={side.label}.jsonl", f"train.seed={seed}", f"run.dir=sft-{side.label}-{seed}"]


def tuning(seed: int, side: Side) -> list[str]:
    """The words of `hfdist tune` that go on with the model of `fine_tuning`."""
    own = (f"model.name=sft-{side.label}-{seed}/model", f"train.seed={seed}", f"run.dir=grpo-{side.label}-{seed}")
    return [*COMMON, *GRPO, *side.environment, *own]


def _wrong_answers(path: Path) -> Wrong:
    rows = [row for row in read_lines(path) if row["step"] > GRPO_STEPS // 2 and not row["reward"]]
    results = [[turn["text"] for turn in row.get("turns", ()) if turn["role"] == "tool"] for row in rows]
    factors = [re.findall(r"\d+", row["prompt"]) for row in rows]
    return Wrong(len(rows), sum(str(int(a) * int(b)) in seen for (a, b), seen in zip(factors, results, strict=True)))


def read_outcome(folder: Path, seed: int, side: Side, of_sft: Cost, of_grpo: Cost) -> Outcome:
    """Read what a run of GRPO has written."""
    files = RunFolder(folder / f"grpo-{side.label}-{seed}")
    lines = [line for line in read_lines(files.metrics) if "eval_reward" in line]
    accuracies = {line["step"]: line["eval_reward"] for line in lines}
    calls = {line["step"]: line["eval_tool_calls"] for line in lines if "eval_tool_calls" in line}
    return Outcome(seed, side, accuracies, calls, _wrong_answers(files.rollouts), of_sft, of_grpo)


def learn(folder: Path, seed: int, side: Side) -> Outcome:
    """Fine-tune a model on the side's conversations, and let GRPO go on with it; the folder has the rows."""
    of_sft = run(folder, "finetune", *fine_tuning(seed, side))
    return read_outcome(folder, seed, side, of_sft, run(folder, "tune", *tuning(seed, side)))


def _table(outcomes: Sequence[Outcome]) -> str:
    steps = sorted(outcomes[0].accuracies)
    rows = [
        [
            str(one.seed),
            one.side.name,
            *(f"{one.accuracies[step]:.1%}" for step in steps),
            *(f"{cost.cpu_seconds:.0f}" for cost in (one.of_sft, one.of_grpo)),
        ]
        for one in outcomes
    ]
    costs = ["CPU seconds of fine-tuning", "CPU seconds of GRPO"]
    return markdown(["seed", "side", *(f"step {step}" for step in steps), *costs], rows)


def _table_of_calls(acted: Sequence[Outcome]) -> str:
    rows = [
        [str(one.seed), *(f"{one.calls[step]:.2f}" for step in sorted(one.calls)), *(str(count) for count in one.wrong)]
        for one in acted
    ]
    steps = [f"calls at step {step}" for step in sorted(acted[0].calls)]
    return markdown(["seed", *steps, "wrong answers kept", "with the right result"], rows)


def is_better(acted: Outcome, plain: Outcome) -> bool:
    """Whether the calculator ended higher than it began, and than one turn did."""
    return acted.end > max(acted.start, plain.end)


def _verdict(outcomes: Sequence[Outcome]) -> str:
    acted, plain = ([one for one in outcomes if one.side is side] for side in (ACTED, PLAIN))
    num_better = sum(is_better(*pair) for pair in zip(acted, plain, strict=True))
    means = [
        f"from {statistics.mean(one.start for one in side):.1%} to {statistics.mean(one.end for one in side):.1%}"
        for side in (acted, plain)
    ]
    return f"""\
With {num_better} of {len(acted)} seeds the calculator ends higher than it began, and higher than one turn. In the mean
the side with a calculator goes {means[0]}, and one turn goes {means[1]}."""


def describe(outcomes: Sequence[Outcome]) -> str:
    """The page."""
    versions = f"torch {version('torch')}, transformers {version('transformers')}"
    return f"""\
# Environments, measured

A small model answers products of two numbers of two digits, as `57*83`. On one side it acts with a
[calculator](environments.md), on the other it writes the product itself, in one turn. The table has the share of
{NUM_HELD_OUT} held-out products that it answers rightly, greedily, before GRPO (step 0) and during it.
`make environments` writes this page.

```
make environments
```

{_verdict(outcomes)}

{_table(outcomes)}

Python {platform.python_version()}, {versions}; {os.cpu_count()} cores. CPU seconds are those of all
processes of a run, from its start to its end.

## What it learns

The mean calls in an answer to a held-out product show whether the model has learned to call. Beside them are wrong
answers to training prompts, as `rollouts.jsonl` keeps them, of the second half of the steps. In those "with the right
result" the tool gave the product, and the model copied it wrongly.

{_table_of_calls([one for one in outcomes if one.side is ACTED])}

## What is compared

Both sides are a Llama of 90,000 parameters with random weights, for which each digit is a token. Both are fine-tuned
for {SFT_STEPS} steps of 32 sequences on conversations about the same products, with the same settings.

* **With a calculator**: in half of the conversations the assistant calls the calculator and reads its result before it
  answers; in the others it gives the product alone. So the model must learn from the reward when to call.
* **In one turn**: the assistant gives the product alone in each conversation. These are shorter, so the model sees more
  of them in as many steps.

From there GRPO goes on for {GRPO_STEPS} steps with the reward `arithmetic` alone: 32 prompts a step, 8 answers to each.
Neither sees a held-out product. The sides differ in `task.environment=calculator` and `task.max_turns=3`.

The settings were tried by seed 0. There the side with a calculator went from 62.5% to 80.5%, and one turn from 3.0% to
0.5%; with `optimizer.lr=1e-4` one turn ended at 0.5%, too. The tables have other seeds.
"""


def main() -> int:
    """Run all, and write the page; 0: each seed ended higher with a calculator than in one turn, and than it began."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder)
        pairs = [(learn(folder, seed, ACTED), learn(folder, seed, PLAIN)) for seed in SEEDS]
    Path(sys.argv[1]).write_text(describe([one for pair in pairs for one in pair]), encoding="utf-8")
    return 0 if all(is_better(*pair) for pair in pairs) else 1


if __name__ == "__main__":
    sys.exit(main())
