"""Find out, before training, what must travel between the stages of a model, and refuse what cannot be split.

A few tokens go through all stages on the real ranks. Whatever a stage does not receive is NaN in it, so a loss that
is finite has seen only what travelled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from hfdist.errors import HfdistError
from hfdist.pipeline.p2p import P2PChannel
from hfdist.pipeline.preserve_state import preserve_state
from hfdist.pipeline.split import SplitModel
from hfdist.pipeline.stage_io import Activations, Carry, unpack
from hfdist.pipeline.stage_module import StageModule


@dataclass(frozen=True)
class ProbeResult:
    """What one rank saw."""

    problem: str | None
    """Why its stages do not work with what they were given; None: they do, or an earlier rank's do not."""
    needed: frozenset[str]
    """Names of the parameters around the blocks that a gradient reaches in its stages."""
    checksum: float | None = None
    """On the rank of the last stage: the sum of loss and logits, so that two runs can be compared."""


def probe(cut: SplitModel, carry: Carry, batch: dict[str, torch.Tensor], link: P2PChannel) -> ProbeResult:
    """Run `batch` through the stages of all ranks. Call on all ranks of a pipeline.

    Args:
        cut: this rank's part of the model, with finite weights.
        carry: what to let travel.
        batch: a few tokens, with labels, as the model takes them.
        link: to the neighbours.
    """
    problem: str | None = None
    checksum: float | None = None
    needed: set[str] = set()
    with _everything_wants_gradients(cut.model), torch.compiler.set_stance("force_eager"), torch.enable_grad():
        for stage in cut.mine:
            view = cut.view(stage, carry)
            incoming = None if view.is_first else link.receive(stage)
            outgoing: Any = None
            if problem is None and (view.is_first or incoming is not None):
                outgoing, problem = _try(view, batch, incoming)
            if outgoing is not None:
                needed |= _reached(cut, outgoing)
            if outgoing is not None and view.is_last:
                checksum = sum(float(tensor.detach().double().sum()) for tensor in _tensors(outgoing))
            if not view.is_last:
                link.send(stage + 1, outgoing)
        link.flush()
    return ProbeResult(problem, frozenset(needed), checksum)


def _try(view: StageModule, batch: dict[str, torch.Tensor], incoming: Activations | None) -> tuple[Any, str | None]:
    try:
        with preserve_state(view.model):
            value = view.run(lambda model: model(**batch), incoming)
        problem = (_check_outputs(value) if view.is_last else None) or _check_graph(value, incoming)
        if problem is None and not view.is_last:
            # What cannot be described cannot be sent.
            unpack(value)[0].to_json()
    except HfdistError as error:
        return None, ", ".join(str(part) for part in (error.what, error.found) if part)
    except Exception as error:
        return None, f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    return (None if problem else value), problem


def _check_outputs(outputs: Any) -> str | None:
    if all(bool(torch.isfinite(tensor).all()) for tensor in _tensors(outputs)):
        return None
    return "its loss needs more than what travels (NaN stands for the rest, and reached it)"


def _check_graph(value: Any, incoming: Activations | None) -> str | None:
    reached = _leaves(value)
    if not reached:
        return "the outputs of its blocks carry no autograd graph (reversible layers, or a forward without gradients)"
    received = () if incoming is None else unpack(incoming)[1]
    if incoming is not None and not any(id(tensor) in reached for tensor in received):
        return "no gradient flows back through its blocks"
    return None


def _reached(cut: SplitModel, value: Any) -> set[str]:
    reached = _leaves(value)
    return {name for name, parameter in cut.surrounding().items() if id(parameter) in reached}


def _leaves(value: Any) -> set[int]:
    """Identities of the leaf tensors that a backward from `value` would give a gradient to."""
    tensors = _tensors(value)
    # A stage that skips all its blocks hands on what it received.
    leaves = {id(tensor) for tensor in tensors if tensor.is_leaf and tensor.requires_grad}
    todo = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return leaves


def _tensors(value: Any) -> Sequence[torch.Tensor]:
    """What goes to the next stage, or the loss and the logits, which models return by name or as a tuple."""
    if isinstance(value, Activations):
        return unpack(value)[1]
    return value[:2] if isinstance(value, tuple) else [value[key] for key in ("loss", "logits") if key in value]


@contextmanager
def _everything_wants_gradients(model: PreTrainedModel) -> Iterator[None]:
    """Frozen parameters must be found too."""
    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    was_training = model.training
    for parameter in frozen:
        parameter.requires_grad_(True)
    model.train()
    try:
        yield
    finally:
        model.train(was_training)
        for parameter in frozen:
            parameter.requires_grad_(False)
