"""Mistakes of layouts, each of which the comparison with one process must show."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hfdist
from hfdist.strategies import context_check, fsdp_units, parallel_plans
from hfdist.strategies.context import ContextParallel
from hfdist.strategies.engine import Engine
from hfdist.strategies.fsdp import FsdpEngine
from hfdist.strategies.pipelines.pipeline import PipelineEngine
from hfdist.strategies.tensor import plan
from hfdist.testing import run_ranks
from hfdist.verify.certificate import Row
from proofs.mesh_runs import LAYOUTS, MIDDLE, SINGLE, checkpoint, compare_cell, read_course, train_families


def unsummed_norms_of_queries() -> None:
    """Each tensor rank keeps the gradient of its own heads."""
    make_plan = plan.make_plan

    def forgetful(*arguments: Any) -> plan.TensorPlan:
        made = make_plan(*arguments)
        return dataclasses.replace(made, partial=frozenset(name for name in made.partial if "q_norm" not in name))

    plan.make_plan = forgetful
    # Before training, the check of a small model finds it.
    parallel_plans.check_plans = lambda *arguments: None


def documents_that_see_each_other() -> None:
    """The mask where ranks share sequences is that of one document."""
    describe = ContextParallel._describe

    def undivided(*arguments: Any) -> Any:
        return dataclasses.replace(describe(*arguments), documents=None)

    ContextParallel._describe = undivided
    context_check.find_problem = lambda *arguments, **named: None


def weights_gathered_once() -> None:
    """What is gathered for a step stays for the next one."""
    shard = fsdp_units._shard

    def keeping(unit: Any, *arguments: Any) -> None:
        shard(unit, *arguments)
        unit.set_reshard_after_backward(False, recurse=False)

    fsdp_units._shard = keeping


def unaveraged_replicas() -> None:
    """Each replica keeps the gradients of its own tokens."""
    accumulating = FsdpEngine.accumulating

    @contextmanager
    def forgetful(engine: FsdpEngine) -> Iterator[None]:
        with accumulating(engine):
            yield
        engine._root.set_requires_all_reduce(False)

    FsdpEngine.accumulating = forgetful


def unsummed_tied_weights() -> None:
    """First and last stage keep their own gradient of the embedding."""
    PipelineEngine._sum_shared = lambda engine: None


def tensor_ranks_in_the_loss() -> None:
    """Each rank counts as one with other tokens."""
    hfdist.Trainer.get_tp_size = lambda trainer: 1


def moments_that_stay_behind() -> None:
    """Adam's averages begin anew after a resume."""
    after_load = Engine.after_load

    def forgetful(engine: Engine) -> None:
        for piece in engine.pieces():
            if piece.key == "exp_avg":
                piece.view.zero_()
        after_load(engine)

    Engine.after_load = forgetful


@dataclass(frozen=True)
class Control:
    """A mistake, and the comparison that must show it."""

    what: str
    spoil: Callable[[], None]
    family: str
    layout: str
    shows_in: str


CONTROLS = (
    Control("gradients of queries' norms are not summed over tensor ranks", unsummed_norms_of_queries,
            "qwen3", "tensor 2", "gradients"),
    Control("packed documents see each other where ranks share sequences", documents_that_see_each_other,
            "llama", "context 2 ulysses", "loss"),
    Control("weights that are gathered for a step stay for the next", weights_gathered_once,
            "llama", "fsdp2 x2", "loss"),
    Control("gradients are not averaged over replicas", unaveraged_replicas,
            "llama", "hsdp 2x2", "gradients"),
    Control("gradients of tied weights are not summed over stages", unsummed_tied_weights,
            "gpt2", "pipeline 2, 1f1b", "gradients"),
    Control("tensor ranks are counted into the loss", tensor_ranks_in_the_loss,
            "llama", "tensor 2", "gradient norm"),
    Control("Adam's averages are lost at a resume", moments_that_stay_behind,
            "llama", "tensor 2", "resumed weights"),
)  # fmt: skip


def run_control(root: Path, control: Control, folder: Path) -> Row:
    """Train with the mistake, beside the reference in `root`, and give the comparison that must show it."""
    layout, start = LAYOUTS[control.layout], checkpoint(root / SINGLE / control.family, MIDDLE)
    run_ranks(train_families, layout.num_ranks, folder, layout, {control.family: start}, control.spoil)
    rows = compare_cell(folder / control.family, read_course(root / SINGLE / control.family))
    return next(row for row in rows if row.what == control.shows_in)


def is_seen(row: Row) -> bool:
    """Whether a mistake shows beyond doubt."""
    return not row.difference <= 10 * row.bound
