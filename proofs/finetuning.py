"""A real model fine-tuned on real conversations in several layouts, whole and by LoRA. `python -m` writes the table."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from transformers import AutoModelForCausalLM, AutoTokenizer

from hfdist.config.composition.compose import compose_config
from hfdist.testing import run_ranks
from recipes.finetune import main
from tests.distributed.runs import eval_losses, losses
from tests.imports import import_all
from tests.smollm2 import find_smollm2, write_smollm2

NUM_STEPS = 10
BOUND = 1e-4
"""Of relative differences of losses from one process."""

COMMON = (
    "data=docstrings",
    "data.sequence_length=160",
    "data.eval_sequences=8",
    "data.workers=1",
    "train.epochs=null",
    f"train.max_steps={NUM_STEPS}",
    "train.global_batch_size=8",
    "train.micro_batch_size=2",
    f"train.eval_every={NUM_STEPS}",
    "evaluate.at_start=true",
    "checkpoint=none",
    "checkpoint.keep_best=false",
    "report=quiet",
)
LAYOUTS = {"one process": ("single", 1), "ddp": ("ddp", 2), "zero2": ("zero2", 2), "pipeline": ("pipeline", 2)}
METHODS = {"all weights": ("optimizer.lr=1e-4",), "LoRA": ("adapter=lora", "optimizer.lr=1e-3")}

# Not in the standard library.
QUESTION = "What does `shapes.Circle.area` do?\n\ndef area(self) -> float"


def finetune(folder: Path, layout: str, method: str) -> Path:
    """Fine-tune SmolLM2-135M-Instruct, and give the run's folder."""
    strategy, num_ranks = LAYOUTS[layout]
    overrides = [*COMMON, *METHODS[method], f"strategy={strategy}", f"model.name={find_smollm2()}", f"run.dir={folder}"]
    config = compose_config(overrides, name="finetune")
    run_ranks(main.__wrapped__, num_ranks, config, group=num_ranks > 1, timeout_seconds=3600)
    return folder


def answer(model: Path, adapter: Path | None = None) -> str:
    """Open the exported model, or a base with the adapter in PEFT, and let it answer."""
    tokenizer, network = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    if adapter is not None:
        from peft import PeftModel

        network = PeftModel.from_pretrained(network, adapter)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = network.generate(**prompt, max_new_tokens=60, do_sample=False)
    return str(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)).strip()


class Outcome(NamedTuple):
    """What one run came to."""

    layout: str
    method: str
    before: float
    """Held-out loss before the first step."""
    after: float
    losses: list[float]
    seconds: float


def measure(folder: Path, layout: str, method: str) -> Outcome:
    """Fine-tune, and read what the run left."""
    start = time.monotonic()
    finetune(folder, layout, method)
    seconds = time.monotonic() - start
    held_out = eval_losses(folder)
    return Outcome(layout, method, held_out[0], held_out[-1], losses(folder), seconds)


def largest_difference(outcome: Outcome, outcomes: list[Outcome]) -> float:
    """Of training and held-out losses, relative to one process."""
    (single,) = (other for other in outcomes if (other.method, other.layout) == (outcome.method, "one process"))
    ours, reference = ([*found.losses, found.before, found.after] for found in (outcome, single))
    return max(abs(a - b) / b for a, b in zip(ours, reference, strict=True))


def describe(outcomes: list[Outcome], answers: dict[str, str]) -> str:
    """The page."""
    lines = [
        "# Fine-tuned: the same in every layout",
        "",
        "SmolLM2-135M-Instruct (from its GGUF file, dequantized) fine-tuned in float32 on conversations made of the "
        f"standard library's docstrings, {NUM_STEPS} steps of 8 sequences of 160 tokens, loss on the answers alone. "
        "The difference is the largest of all training and held-out losses, relative to one process. Seconds are of "
        "whole runs, beside whatever else ran. Written by `make finetuning`.",
        "",
        "```\nmake finetuning\n```",
        "",
        f"Python {platform.python_version()}, torch {version('torch')}, transformers {version('transformers')}, peft "
        f"{version('peft')}; gloo, {os.cpu_count()} cores",
        "",
        "| trained | layout | held-out loss before | after | first and last training loss | difference | seconds |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for outcome in outcomes:
        difference = largest_difference(outcome, outcomes)
        lines.append(
            f"| {outcome.method} | {outcome.layout} | {outcome.before:.4f} | {outcome.after:.4f} "
            f"| {outcome.losses[0]:.4f}, {outcome.losses[-1]:.4f} | {difference:.1e} | {outcome.seconds:.0f} |"
        )
    lines += ["", f"Asked, of a function that is not in the library: {json.dumps(QUESTION)}", ""]
    lines += [f"* {name}: {json.dumps(text)}" for name, text in answers.items()]
    return "\n".join(lines) + "\n"


def write_page(page: Path) -> bool:
    """Run all, write the page, and tell whether every layout was equal to one process."""
    outcomes, answers = [], {}
    with tempfile.TemporaryDirectory() as name:
        for method in METHODS:
            for layout in LAYOUTS:
                folder = Path(name) / f"{method}-{layout}".replace(" ", "_")
                outcomes.append(measure(folder, layout, method))
                print(outcomes[-1], flush=True)  # noqa: T201
            answers[f"{method}, trained in a pipeline, the exported model"] = answer(folder / "model")
            if (folder / "adapter").is_dir():
                base, adapter = write_smollm2(Path(name) / "smollm2"), folder / "adapter"
                answers["before the training"] = answer(base)
                answers[f"{method}, trained in a pipeline, its adapter opened by PEFT"] = answer(base, adapter)
    page.write_text(describe(outcomes, answers), encoding="utf-8")
    return all(largest_difference(outcome, outcomes) < BOUND and outcome.after < outcome.before for outcome in outcomes)


if __name__ == "__main__":
    import_all()
    sys.exit(0 if write_page(Path(sys.argv[1])) else 1)
