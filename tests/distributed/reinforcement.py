"""The example of docs/reinforcement.md by three seeds, and the speed of its answers. `python -m` writes the page."""

from __future__ import annotations

import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.rounds import interleave
from benchmarks.table import markdown
from hfdist.records import METRICS, read_lines
from hfdist.topology import Topology
from hfdist.trainer.generation.limits import Limits
from hfdist.trainer.generation.sampling import Sampling, sample_completions
from tests.e2e.follow_readme import ROOT, shown_programs

SEEDS = (6, 7, 8)
"""Others than 0 to 5, by which the example was chosen."""
PROMPTS, ANSWERS, NEW_TOKENS, ROUNDS = 32, 8, 32, 15
GAIN = 2.0
"""The held-out accuracy at the end is at least so many times that at the start."""


class Learned(NamedTuple):
    """What one seed came to."""

    seed: int
    accuracies: dict[int, float]
    """Of greedy answers to held-out sums, by step."""
    sft_cpu_seconds: float
    grpo_cpu_seconds: float

    @property
    def start(self) -> float:
        """Before the first step."""
        return self.accuracies[0]

    @property
    def end(self) -> float:
        """After the last step."""
        return self.accuracies[max(self.accuracies)]


def run(folder: Path, *words: str) -> float:
    """Run hfdist with two processes in a folder; give the CPU seconds of all its processes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "hfdist", *words, "launch.processes=2", "report=quiet"]
    subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def learn(folder: Path, seed: int) -> Learned:
    """Fine-tune and reinforce; the folder has the rows."""
    sft, grpo = (f"runs/{name}-{seed}" for name in ("sft", "grpo"))
    of_sft = run(folder, "finetune", "+experiment=arithmetic_sft", f"train.seed={seed}", f"run.dir={sft}")
    words = (f"train.seed={seed}", f"run.dir={grpo}", f"model.name={sft}/model")
    of_grpo = run(folder, "tune", "+experiment=arithmetic_grpo", *words)
    lines = read_lines(folder / grpo / METRICS)
    rewards = {line["step"]: line["eval_reward"] for line in lines if "eval_reward" in line}
    return Learned(seed, rewards, of_sft, of_grpo)


def speeds(model_folder: Path) -> dict[str, float]:
    """Medians of new tokens a CPU second, by hfdist and by transformers, of the same prompts on one thread."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    sums = [f"{a}+{a + 7}=" for a in range(10, 10 + PROMPTS)]
    prompts = [tokenizer(text)["input_ids"] for text in sums for _ in range(ANSWERS)]
    ids = torch.tensor(prompts)
    limits = Limits(max_new_tokens=NEW_TOKENS, end_ids=frozenset(), most_tokens=None)
    # Equally many tokens: nothing ends an answer.
    model.generation_config.eos_token_id = None

    def ours() -> float:
        with torch.no_grad():
            found = sample_completions(
                prompts,
                range(len(prompts)),
                lambda batch, function, as_whole: [function(model, batch)],
                limits,
                Sampling(),
                topology=Topology(),
                rows_at_once=len(prompts),
                uses_cache=True,
            )
        return sum(map(len, found))

    def theirs() -> float:
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            # The exported generation config says false, and then all is computed again for each token.
            use_cache=True,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=0,
        )
        return found[:, ids.shape[1] :].numel()

    def rate(contender) -> float:  # the processor's time, so that other work on the machine counts little
        begin = time.process_time()
        return contender() / (time.process_time() - begin)

    measured = interleave({"hfdist": lambda: rate(ours), "transformers": lambda: rate(theirs)}, ROUNDS, num_warm_up=3)
    return {name: statistics.median(rates) for name, rates in measured.items()}


def describe(outcomes: list[Learned], rates: dict[str, float]) -> str:
    """The page."""
    steps = sorted(outcomes[0].accuracies)
    rows = [
        [
            str(one.seed),
            *(f"{one.accuracies[step]:.1%}" for step in steps),
            f"{one.end / one.start:.1f}",
            f"{one.sft_cpu_seconds:.0f}, {one.grpo_cpu_seconds:.0f}",
        ]
        for one in outcomes
    ]
    header = ["seed", *(f"step {step}" for step in steps), "end / start", "CPU seconds of SFT, GRPO"]
    ratio = rates["hfdist"] / rates["transformers"]
    return f"""\
# Reinforcement, measured

```
make reinforcement
```

The example of [reinforcement learning](reinforcement.md), by {len(outcomes)} seeds: the share of held-out
sums that the model answers rightly, greedily, before GRPO (step 0) and during it. `make reinforcement` writes
this page.

The example was chosen by other seeds. Two settings before it did not reach {GAIN:g} times the start with 3 of 6 seeds:
800 and 100 steps with 60 % mistakes (2.8, 1.5, 1.5 times), and 1,200 and 300 steps with 60 % (1.7, 2.7, 2.3 times).

Python {platform.python_version()}, torch {version("torch")}, transformers {version("transformers")}; two processes, \
gloo, {os.cpu_count()} cores

{markdown(header, rows)}

## Speed of answers

{PROMPTS} prompts, {ANSWERS} answers each, {NEW_TOKENS} new tokens, one thread, the model of the example. Tokens a CPU
second, medians of {ROUNDS} rounds that take turns:

{
        markdown(
            ["hfdist's sampling", "transformers' `generate` with sampling", "ratio"],
            [[f"{rates['hfdist']:,.0f}", f"{rates['transformers']:,.0f}", f"{ratio:.2f}"]],
        )
    }
"""


def write_page(page: Path) -> bool:
    """Run all, write the page, and tell whether each seed gained `GAIN`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = folder / "sums.py"
        program.write_text(shown_programs(ROOT / "docs" / "reinforcement.md")["sums.py"], encoding="utf-8")
        subprocess.run([sys.executable, program], cwd=folder, check=True)
        outcomes = [learn(folder, seed) for seed in SEEDS]
        rates = speeds(folder / f"runs/sft-{SEEDS[0]}/model")
    page.write_text(describe(outcomes, rates), encoding="utf-8")
    return all(one.start > 0 and one.end >= GAIN * one.start for one in outcomes)


if __name__ == "__main__":
    sys.exit(0 if write_page(Path(sys.argv[1])) else 1)
