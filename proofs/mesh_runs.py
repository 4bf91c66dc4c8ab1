"""Families of models in the layouts of the mesh, trained on forked ranks and compared with one process.

The ranks of a layout are forked once, and train all families through `hfdist.Trainer`: packed documents, several micro
batches a step, clipped gradients. Then each goes on in this layout from a checkpoint of another.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import PrinterCallback, TrainerCallback, TrainingArguments

import hfdist
from hfdist.data.packing.sequence import IGNORED
from hfdist.errors import ConfigError
from hfdist.strategies.base import Strategy
from hfdist.testing import RankFailed, forget_parent, run_ranks
from hfdist.verify.certificate import Bounds, Row
from hfdist.verify.compare_runs import compare
from tests.zoo.models import tiny_model

FIRST, MIDDLE, END = 1, 2, 5
"""Steps after which a run saves: its gradients, what another goes on from, its weights."""
RESUMED = "resumed"
"""Folder of a run that goes on, in that of the same family and layout from its beginning."""
GLOBAL_BATCH, NUM_TOKENS, NUM_BLOCKS = 8, 32, 4
MAX_GRAD_NORM = 0.1
"""Below the norm of every gradient, so that all steps are clipped."""
BOUNDS = Bounds(loss=1e-5, grad_norm=1e-5, gradient=1e-4, weight=1e-5, resumed=1e-5)

EXPERTS = "mixtral"
FAMILIES: dict[str, dict[str, Any]] = {
    # Two axes can share these heads out.
    "llama": {"num_key_value_heads": 4},
    "qwen3": {},
    "gpt2": {},
    "gemma3_text": {},
    EXPERTS: {"output_router_logits": True, "router_aux_loss_coef": 0.02},
}
"""Types, and fields of their configs: untied; norms of queries and keys; tied, with learned positions; sliding windows
and tied; experts, with the loss of their routers."""


@dataclass(frozen=True)
class Layout:
    """How many ranks there are, and the keys of `strategy.*`."""

    num_ranks: int
    keys: Mapping[str, Any]
    families: tuple[str, ...] = tuple(FAMILIES)


FSDP = {"sharding": "fsdp2"}
HSDP = FSDP | {"replicate": 2}
TENSOR, EXPERT, PIPELINE = {"tensor": 2}, {"expert": 2}, {"pipeline": 2}
ULYSSES, GATHER, AUTO = ({"context": 2, "context_method": method} for method in ("ulysses", "gather", "auto"))
SINGLE = "one process"
DENSE = tuple(family for family in FAMILIES if family != EXPERTS)
LAYOUTS = {
    SINGLE: Layout(1, {}),
    "fsdp2 x2": Layout(2, FSDP),
    "tensor 2": Layout(2, TENSOR),
    "fsdp2 x4": Layout(4, FSDP),
    "context 2 ulysses": Layout(2, ULYSSES),
    "hsdp 2x2": Layout(4, HSDP),
    "pipeline 2, 1f1b": Layout(2, PIPELINE),
    "tensor 4": Layout(4, {"tensor": 4}),
    "fsdp2 x2, context 2 ulysses": Layout(4, FSDP | ULYSSES),
    "pipeline 2, tensor 2": Layout(4, PIPELINE | TENSOR),
    "context 4 gather": Layout(4, GATHER | {"context": 4}),
    "pipeline 2, fsdp2 x2": Layout(4, PIPELINE | FSDP),
    "tensor 2, context 2 auto": Layout(4, TENSOR | AUTO),
    "pipeline 2 zbv, fsdp2 x2": Layout(4, PIPELINE | FSDP | {"schedule": "zbv"}),
    "fsdp2 x2, tensor 2": Layout(4, FSDP | TENSOR),
    "pipeline 2, zero1 x2": Layout(4, PIPELINE | {"sharding": "zero1"}),
    "pipeline 2, fsdp2 x2, tensor 2": Layout(8, PIPELINE | FSDP | TENSOR),
    "pipeline 2, context 2 gather": Layout(4, PIPELINE | GATHER),
    "pipeline 2, hsdp 2x2 over context 2 ulysses": Layout(8, PIPELINE | HSDP | ULYSSES),
    "pipeline 2, tensor 2, fsdp2 x2 over context 2 auto": Layout(8, PIPELINE | FSDP | TENSOR | AUTO),
    "fsdp2 x4 over context 2 gather, tensor 2": Layout(8, FSDP | TENSOR | GATHER, DENSE),
    "expert 2": Layout(2, EXPERT, (EXPERTS,)),
    "fsdp2 x4, expert 2": Layout(4, FSDP | EXPERT, (EXPERTS,)),
    "pipeline 2, fsdp2 x2, tensor 2, expert 2": Layout(8, PIPELINE | FSDP | TENSOR | EXPERT, (EXPERTS,)),
}
"""Each goes on from the checkpoint of the one before. `over`: FSDP2 shards over the ranks that share sequences, too."""


# ---- a run ----


class SavesAt(TrainerCallback):
    """Saves after chosen steps."""

    def __init__(self, steps: Iterable[int]) -> None:
        self._steps = frozenset(steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """After each."""
        control.should_save = state.global_step in self._steps


def packed_items() -> list[dict[str, torch.Tensor]]:
    """Sequences of three documents, of which very different shares are targets."""
    random = torch.Generator().manual_seed(0)
    places = torch.arange(NUM_TOKENS)
    items = []
    for number in range(GLOBAL_BATCH * END):
        ids = torch.randint(3, 250, (NUM_TOKENS,), generator=random)
        starts = torch.tensor([0, 3 + number % 9, 17 + number % 11])
        document = torch.bucketize(places, starts, right=True) - 1
        positions = places - starts[document]
        is_target = (positions > 0) & (places >= number * 5 % (NUM_TOKENS - 6))
        items.append({"input_ids": ids, "labels": ids.where(is_target, IGNORED), "position_ids": positions})
    return items


def train(folder: Path, family: str, strategy: Strategy, *, seed: int = 0, start: Path | None = None) -> None:
    """Train a tiny model, from its weights of `seed` or from a checkpoint."""
    # What accelerate and DeepSpeed keep of the run before.
    forget_parent()
    args = TrainingArguments(
        str(folder), max_steps=END, use_cpu=True, report_to=[], logging_steps=1, save_strategy="no", disable_tqdm=True,
        max_grad_norm=MAX_GRAD_NORM, learning_rate=1e-2,
        # Adam divides by it where a gradient is by chance almost zero.
        adam_epsilon=1e-4, **strategy.training_arguments(),
    )  # fmt: skip
    strategy.start()
    trainer = hfdist.Trainer(
        tiny_model(family, NUM_BLOCKS, seed=seed, attention="sdpa", **FAMILIES[family]),
        args,
        strategy=strategy,
        train_dataset=packed_items(),
        callbacks=[SavesAt([FIRST, MIDDLE, END] if start is None else [END])],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=start and str(start))


def checkpoint(folder: Path, step: int) -> Path:
    """Where a run saves after a step."""
    return folder / f"checkpoint-{step}"


def train_families(
    folder: Path, layout: Layout, starts: Mapping[str, Path | None], spoil: Callable[[], None] | None = None
) -> dict[str, str]:
    """Train families in a layout, each from its beginning, and if there is a checkpoint of another layout from that.

    Returns:
        Reasons of those that were refused.
    """
    if spoil is not None:
        spoil()
    # One for all: each has a mesh, whose process groups have threads.
    strategy = hfdist.make_strategy(
        global_batch_size=GLOBAL_BATCH, sequence_length=NUM_TOKENS, max_grad_norm=MAX_GRAD_NORM, **layout.keys
    )
    refused = {}
    for family, start in starts.items():
        try:
            train(folder / family, family, strategy)
            if start is not None:
                # Other weights, so that nothing is right but what was read.
                train(folder / family / RESUMED, family, strategy, seed=1, start=start)
        except ConfigError as error:
            refused[family] = f"{error.what}: {error.found}"
    return refused


# ---- what it left ----


@dataclass(frozen=True)
class Course:
    """What a run has left: of each step the loss and the gradients' norm; gradients of the first, and weights."""

    losses: Mapping[str, torch.Tensor]
    norms: Mapping[str, torch.Tensor]
    gradients: Mapping[str, torch.Tensor]
    weights: Mapping[str, torch.Tensor]


def read_course(folder: Path) -> Course:
    """Read a run's folder."""
    history = json.loads((checkpoint(folder, END) / "trainer_state.json").read_text())["log_history"]
    steps = [entry for entry in history if "loss" in entry]

    def of_steps(key: str) -> dict[str, torch.Tensor]:
        return {f"step {entry['step']}": torch.tensor(entry[key]) for entry in steps}

    return Course(
        losses=of_steps("loss"),
        norms=of_steps("grad_norm"),
        # The average of gradients that starts from zero is after one step the gradient times a constant.
        gradients={
            name: tensor
            for path in checkpoint(folder, FIRST).glob("training_state/optimizer-*.safetensors")
            for name, tensor in load_file(path).items()
            if name.endswith("/exp_avg")
        },
        weights=load_file(checkpoint(folder, END) / "model.safetensors"),
    )


def compare_cell(ours: Path, reference: Course) -> list[Row]:
    """Compare a run, and the one that goes on if there is one, with one process that goes through."""
    course = read_course(ours)
    rows = [
        compare("loss", course.losses, reference.losses, BOUNDS.loss),
        compare("gradient norm", course.norms, reference.norms, BOUNDS.grad_norm),
        compare("gradients", course.gradients, reference.gradients, BOUNDS.gradient),
        compare("weights", course.weights, reference.weights, BOUNDS.weight),
    ]
    if (ours / RESUMED).exists():
        resumed = read_course(ours / RESUMED)
        rows += [
            compare("resumed loss", resumed.losses, reference.losses, BOUNDS.resumed),
            compare("resumed weights", resumed.weights, reference.weights, BOUNDS.resumed),
        ]
    return rows


Outcome = list[Row] | str
"""Comparisons, or why a family was not trained."""


def run_layout(root: Path, name: str, starts: Mapping[str, Path | None]) -> dict[str, Outcome]:
    """Train families in a layout below `root`, where one process has trained, and compare.

    Args:
        root: of all layouts.
        name: of the layout.
        starts: checkpoints that the families go on from; None: that family does not.
    """
    layout = LAYOUTS[name]
    try:
        reasons = run_ranks(train_families, layout.num_ranks, root / name, layout, starts, timeout_seconds=1200)[0]
    except RankFailed as error:
        reasons = dict.fromkeys(starts, str(error).strip().splitlines()[-1])
    return {
        family: reasons.get(family) or compare_cell(root / name / family, read_course(root / SINGLE / family))
        for family in starts
    }
