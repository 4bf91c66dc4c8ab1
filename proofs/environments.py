"""GRPO with a calculator beside GRPO in one turn, by three seeds. `python -m proofs.environments` writes the page."""

from __future__ import annotations

import json
import os
import platform
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from benchmarks.table import markdown
from hfdist.records import RunFolder, read_lines
from proofs.reinforcement import Cost, run

SEEDS = (1, 2, 3)
"""Others than 0, by which the settings were chosen."""
NUM_HELD_OUT = 200
KINDS: Mapping[str, tuple[str, ...]] = {
    "with a calculator": ("task.environment=calculator", "task.max_turns=3"),
    "in one turn": (),
}
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
    *("model=tiny", "model.tokenizer.vocab_size=320", "data=sheets.jsonl", "data.format=messages"),
    *("data.chat.template=turns.jinja", "data.sequence_length=96", "optimizer=adamw", "optimizer.lr=5e-3"),
    *("optimizer.warmup_steps=20", "train.max_steps=800", "train.eval_every=400"),
    "data.eval_sources={held: {path: held_out.jsonl, format: prompt_completion}}",
)
GRPO = (
    *("model=hub", "task=grpo", "task.rewards={arithmetic: 1.0}", "task.max_new_tokens=64", "optimizer.lr=5e-4"),
    *("data=products.jsonl", "data.format=prompt_completion", "data.sequence_length=32", "train.max_steps=40"),
    *("train.eval_every=20", f"data.eval_sequences={NUM_HELD_OUT}", f"evaluate.num_generations={NUM_HELD_OUT}"),
    "data.eval_sources={held: {path: held_out.jsonl}}",
)


def _says(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _asked(a: int, b: int) -> dict[str, object]:
    """A row of GRPO."""
    return {"prompt": [_says("user", f"{a}*{b}")], "completion": [_says("assistant", str(a * b))]}


def _shown(a: int, b: int) -> dict[str, object]:
    """A conversation of the fine-tuning: every other one has a call, the others have the answer alone."""
    question, answer = _says("user", f"{a}*{b}"), _says("assistant", str(a * b))
    call = json.dumps({"name": "calculator", "arguments": {"expression": f"{a}*{b}"}})
    called = [_says("assistant", f"<tool_call>{call}</tool_call>"), _says("tool", str(a * b))]
    return {"messages": [question, *(called if random.random() < 0.5 else []), answer]}


def write_rows(folder: Path) -> None:
    """Write products of two numbers of two digits: held out, for GRPO, and conversations; and the template."""
    random.seed(0)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.shuffle(pairs)
    held_out, others = pairs[:NUM_HELD_OUT], pairs[NUM_HELD_OUT:]
    for name, rows in (
        ("held_out", [_asked(a, b) for a, b in held_out]),
        ("products", [_asked(a, b) for a, b in others]),
        ("sheets", [_shown(a, b) for a, b in 2 * others]),
    ):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "turns.jinja").write_text(TEMPLATE)


def reinforce(folder: Path, seed: int, name: str, *own: str) -> tuple[dict[int, float], Cost]:
    """Let GRPO go on with the fine-tuned model of a seed; give the held-out accuracy by step, and the cost."""
    run_dir = f"{name}-{seed}"
    ids = (f"train.seed={seed}", f"run.dir={run_dir}", f"model.name=sft-{seed}/model")
    cost = run(folder, "tune", *COMMON, *GRPO, *own, *ids)
    lines = read_lines(RunFolder(folder / run_dir).metrics)
    return {line["step"]: line["eval_reward"] for line in lines if "eval_reward" in line}, cost


class Learned(NamedTuple):
    """What one seed came to."""

    seed: int
    of_sft: Cost
    runs: dict[str, tuple[dict[int, float], Cost]]
    """By the kind of GRPO: the held-out accuracy by step, and the cost."""

    @property
    def is_better(self) -> bool:
        """Whether the calculator ended higher than it began, and than one turn did."""
        (acted, _), (plain, _) = (self.runs[kind] for kind in KINDS)
        return acted[max(acted)] > max(acted[0], plain[max(plain)])


def learn(folder: Path, seed: int) -> Learned:
    """Fine-tune a model, and let GRPO go on with it in both ways; the folder has the rows."""
    of_sft = run(folder, "finetune", *COMMON, *SFT, f"train.seed={seed}", f"run.dir=sft-{seed}")
    runs = {kind: reinforce(folder, seed, kind.replace(" ", "-"), *own) for kind, own in KINDS.items()}
    return Learned(seed, of_sft, runs)


def _table(outcomes: Sequence[Learned]) -> str:
    rows = [
        [
            str(one.seed),
            kind,
            *(f"{share:.1%}" for _, share in sorted(by_step.items())),
            f"{cost.wall_seconds:.0f}",
            f"{cost.cpu_seconds:.0f}",
        ]
        for one in outcomes
        for kind, (by_step, cost) in one.runs.items()
    ]
    return markdown(["seed", "GRPO", "step 0", "step 20", "step 40", "seconds", "CPU seconds"], rows)


def describe(outcomes: Sequence[Learned]) -> str:
    """The page."""
    sft_seconds = ", ".join(f"{one.of_sft.cpu_seconds:.0f}" for one in outcomes)
    versions = f"torch {version('torch')}, transformers {version('transformers')}"
    return f"""\
# Environments, measured

The share of {NUM_HELD_OUT} held-out products of two numbers of two digits that a model answers rightly, greedily,
before GRPO (step 0) and during it: with a [calculator](environments.md), and in one turn. `make environments` writes
this page.

```
make environments
```

A Llama of 90,000 parameters is fine-tuned on conversations. In every other one the assistant calls a calculator; in the
others it gives the product alone, which the model cannot learn. From there GRPO learns by the reward `arithmetic`, from
32 prompts a step with 8 answers each. With `task.environment=calculator` a call has a result. Without an environment it
has none, and an answer is one turn. The settings were chosen by another seed.

Python {platform.python_version()}, {versions}; {os.cpu_count()} cores.

{_table(outcomes)}

CPU seconds are the cost: other work on the same cores makes the seconds of the clock longer. The fine-tuning before it
took {sft_seconds} CPU seconds.
"""


def main() -> int:
    """Run all, and write the page; 0: each seed ended higher with a calculator than in one turn, and than it began."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder)
        outcomes = [learn(folder, seed) for seed in SEEDS]
    Path(sys.argv[1]).write_text(describe(outcomes), encoding="utf-8")
    return 0 if all(one.is_better for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
