"""Whether stages work with what travels between them: a few tokens run through all, on the real ranks.

Whatever a stage does not receive is NaN in it, so a loss that is finite has seen only what travelled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from hfdist.collectives import is_planned
from hfdist.errors import HfdistError, named_line
from hfdist.models.value_head import is_of_value_head
from hfdist.pipeline.channel import P2PChannel
from hfdist.pipeline.split import SplitModel
from hfdist.pipeline.stage_io import Activations, Carry, tensors_of, unpack
from hfdist.pipeline.stage_module import StageModule, preserve_state

_OUTPUTS = ("loss", "logits", "last_hidden_state")


@dataclass(frozen=True)
class ProbeResult:
    """What one rank saw."""

    problem: str | None
    """Why its stages do not work with what they received; None: they do, or an earlier rank's do not."""
    needed: frozenset[str]
    """Names of the parameters around the blocks that a gradient reaches in its stages."""
    checksum: float | None = None
    """Sum of loss and logits, or of hidden states, on the rank of the last stage, so that two runs can be compared."""


def probe(split: SplitModel, carry: Carry, batch: dict[str, torch.Tensor], channel: P2PChannel) -> ProbeResult:
    """Run a few tokens with labels through the stages of all ranks, whose weights are finite, and let `carry` travel.

    Call on all ranks of a pipeline.
    """
    problem: str | None = None
    checksum: float | None = None
    needed: set[str] = set()
    with _everything_wants_gradients(split.model), torch.compiler.set_stance("force_eager"), torch.enable_grad():
        for stage in split.mine:
            module = split.stage_module(stage, carry)
            incoming = None if module.is_first else channel.receive(stage)
            outgoing: Any = None
            if problem is None and (module.is_first or incoming is not None):
                outgoing, problem = _try(module, batch, incoming)
            if outgoing is not None:
                reached = _leaves(outgoing)
                around = split.surrounding()
                needed |= {name for name, parameter in around.items() if id(parameter) in reached}
                # The loss calls a head of values, and not the model.
                needed |= set(filter(is_of_value_head, around)) if module.is_last else set()
            if outgoing is not None and module.is_last and not is_planned():
                checksum = sum(float(tensor.detach().double().sum()) for tensor in _outputs_of(outgoing))
            if not module.is_last:
                channel.send(stage + 1, outgoing)
        channel.flush()
    return ProbeResult(problem, frozenset(needed), checksum)


def _try(
    module: StageModule, batch: dict[str, torch.Tensor], incoming: Activations | None
) -> tuple[object, str | None]:
    try:
        with preserve_state(module.model):
            value = module.run(lambda model: model(**batch), incoming)
        problem = _find_problem(value, incoming, is_last=module.is_last)
        if problem is None and not module.is_last:
            # What cannot be described cannot be sent.
            unpack(value)[0].to_json()
    except HfdistError as error:
        return None, ", ".join(str(part) for part in (error.what, error.found) if part)
    except Exception as error:
        return None, named_line(error)
    return (None if problem else value), problem


def _find_problem(value: object, incoming: Activations | None, *, is_last: bool) -> str | None:
    # A plan has no values.
    if is_last and not is_planned() and not all(bool(torch.isfinite(tensor).all()) for tensor in _outputs_of(value)):
        return "its loss needs more than what travels (NaN stands for the rest, and reached it)"
    reached = _leaves(value)
    if not reached:
        return "the outputs of its blocks carry no autograd graph (reversible layers, or a forward without gradients)"
    received = () if incoming is None else tensors_of(incoming)
    if incoming is not None and not any(id(tensor) in reached for tensor in received):
        return "no gradient flows back through its blocks"
    return None


def _leaves(value: object) -> set[int]:
    """Give the identities of the leaf tensors that a backward from `value` would give a gradient to."""
    tensors = _outputs_of(value)
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


def _outputs_of(value: Any) -> Sequence[torch.Tensor]:
    """Give what goes to the next stage; of a model's own output loss and logits, or hidden states."""
    # Models return these by name or in order.
    if isinstance(value, Activations):
        return tensors_of(value)
    return value[:2] if isinstance(value, tuple) else [value[key] for key in _OUTPUTS if key in value]


@contextmanager
def _everything_wants_gradients(model: PreTrainedModel) -> Iterator[None]:
    """Let frozen parameters want gradients, and put the model in training: what is needed is found by gradients."""
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
