"""The memory of an evaluation beside that of a training step, in each layout: `python -m benchmarks.evaluation`.

Both are counted above what the process held when they began, by its largest resident size, of the rank that took most.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch

from benchmarks.head import Peak, give_back
from benchmarks.table import Measure, describe_run, markdown, publish, read_options
from hfdist.config.composition.compose import compose_config
from hfdist.testing import run_ranks
from hfdist.trainer.engine_trainer import EngineTrainer
from hfdist.trainer.evaluation.loop import Evaluator
from recipes.pretrain import main as recipe

LAYOUTS = {"single": 1, "ddp": 2, "fsdp2": 2, "zero3": 2, "pipeline": 2, "tensor": 2}
VOCABULARY, TOKENS, ROWS = 151_000, 512, 4


class Peaks(NamedTuple):
    """Largest growth, in MiB."""

    step: float
    evaluation: float


def main() -> None:
    """Measure all layouts, and print or write the section."""
    options = read_options("evaluation", __doc__)
    layouts = ["single"] if options.quick else [*LAYOUTS]
    vocabulary = 4_000 if options.quick else VOCABULARY
    peaks = {name: _most(name, vocabulary, "auto") for name in layouts}
    whole = _most("single", vocabulary, "full")
    rows = [
        [name, f"{one.step:,.0f}", f"{one.evaluation:,.0f}", f"{one.evaluation / one.step:.2f}"]
        for name, one in {**peaks, "single, model.loss=full": whole}.items()
    ]
    text = (
        f"A small Llama with {vocabulary:,} tokens, micro batches of {ROWS} x {TOKENS} tokens, float32, memory above "
        "that of the beginning, the rank with most."
    )
    header = ["layout", "a step, MiB", "an evaluation, MiB", "ratio"]
    title = "## Memory of an evaluation"
    section = "\n\n".join([title, text, describe_run("benchmarks.evaluation", "torch"), markdown(header, rows)])
    measures = [
        Measure(
            what=f"memory of an evaluation, {name}",
            unit="MiB",
            ours=one.evaluation,
            peers={"a step": one.step, "whole logits": whole.evaluation},
            goal="<= 1x a step",
            is_met=one.evaluation <= one.step,
        )
        for name, one in peaks.items()
    ]
    publish(options, "evaluation", section, measures)


def _most(layout: str, vocabulary: int, loss: str) -> Peaks:
    processes = LAYOUTS[layout]
    with tempfile.TemporaryDirectory() as folder:
        asked = (layout, vocabulary, loss, folder)
        found = run_ranks(_measure, processes, *asked, group=processes > 1, timeout_seconds=600)
    return Peaks(*map(max, zip(*found, strict=True)))


def _measure(layout: str, vocabulary: int, loss: str, folder: str) -> Peaks:
    config = compose_config(
        [
            "model=tiny",
            f"model.config.vocab_size={vocabulary}",
            f"model.loss={loss}",
            f"strategy={layout}",
            f"data.sequence_length={TOKENS}",
            f"data.eval_sequences={2 * ROWS}",
            "data.workers=0",
            "train.max_steps=4",
            "train.eval_every=2",
            f"train.global_batch_size={2 * ROWS}",
            f"train.micro_batch_size={ROWS}",
            "checkpoint=none",
            "report=quiet",
            f"run.dir={Path(folder) / layout}",
        ]
    )
    largest: dict[str, float] = {}
    steps, evaluations = (
        mock.patch.object(kind, name, _counting(largest, name, getattr(kind, name)))
        for kind, name in ((EngineTrainer, "training_step"), (Evaluator, "__call__"))
    )
    with steps, evaluations:
        recipe.__wrapped__(config)
    return Peaks(largest["training_step"], largest["__call__"])


def _counting(largest: dict[str, float], name: str, function: Callable[..., object]) -> Callable[..., object]:
    def call(*args: object, **kwargs: object) -> object:
        give_back()
        with Peak(torch.device("cpu")) as peak:
            result = function(*args, **kwargs)
        largest[name] = max(largest.get(name, 0.0), peak.mib)
        return result

    return call


if __name__ == "__main__":
    main()
