"""A check before training: a small model of the run's class must train in the layout as it does on one process.

    the small model, whole       micro batches 0 1 2 ...    losses, gradients    on each rank
    the small model, shared      this rank's micro batches  losses, gradients    must agree with the above

The first micro batch has tokens alone, so that the inputs that a model makes by itself are compared, too. The others
also have positions of packed documents, a mask, types of tokens, or an image where the run has some. Without this
check, a plan of transformers or a model that mixes tokens outside of attention could train wrongly without a word.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from hfdist.checkpoint.piece import WEIGHT, Piece
from hfdist.collectives import is_planned
from hfdist.config.batch import IGNORED
from hfdist.errors import first_line
from hfdist.models.embeddings import has_token_loss, scores_sequences
from hfdist.models.image_text import image_example
from hfdist.models.positions import padding_id
from hfdist.models.probing import keeps_documents_apart, probe_loss

LOSS_BOUND, GRADIENT_BOUND = 1e-5, 1e-4
"""The largest relative differences of losses and of gradients that pass. Sums in another order make up to 4e-5 in a
gradient of recurrent types, which in float64 differ by 1e-15; wrong plans make 1e-2 and more."""

POSITIONS, MASK, TYPES, IMAGE = "position_ids", "attention_mask", "token_type_ids", "an image"
"""The inputs that a model may be given besides tokens."""

_NUM_TOKENS = 31
"""Tokens of a sequence; a prime number, so that no number of ranks divides it."""
_NOTHING = 1e-3
"""A gradient whose norm is below this share of the largest norm may be nothing but rounding, as a key's bias has it."""

Batch = dict[str, torch.Tensor]
"""Tensors by name, as a model's forward takes them."""


@dataclass(frozen=True, kw_only=True)
class LayoutHooks:
    """The parts of a step of the small model that a layout does itself."""

    reduce: Callable[[torch.Tensor], None]
    """Averages the model's gradients, and the losses that it gets, over the ranks with other tokens, in place."""
    sharded: Callable[[Batch], AbstractContextManager[Batch]] = nullcontext
    """Gives a context with this rank's share of a batch."""
    own_pieces: Callable[[Piece], Iterable[Piece]] = lambda piece: [piece]
    """Gives the pieces of the whole model's tensor that a piece of this rank's model is."""


class _Differences(NamedTuple):
    """The largest relative differences from the whole model."""

    loss: float
    """The largest relative difference of a loss; infinite: one is no number."""
    inputs: str
    """The inputs of the micro batch whose loss differs most, for people."""
    gradient: float
    """The largest relative difference of a gradient; infinite: one is missing, or is no number."""
    first_wrong: str
    """The first parameter, in the order of the model, whose gradient differs by more than the bound."""


@dataclass(frozen=True, kw_only=True)
class BatchSharding:
    """The way in which ranks that try a layout share the micro batches of a step."""

    token_ranks: int = 1
    """Number of ranks that read other tokens."""
    data_ranks: int = 1
    """Number of ranks that read other sequences: fewer than `token_ranks`, where ranks share sequences."""
    data_rank: int = 0
    """Index of this rank among the data ranks."""


def find_problem(
    make: Callable[[], PreTrainedModel],
    distribute: Callable[[PreTrainedModel], LayoutHooks],
    sharding: BatchSharding,
    device: torch.device,
    *,
    num_tokens: int = _NUM_TOKENS,
    inputs: Sequence[str] = (POSITIONS, MASK, TYPES),
) -> str | None:
    """Say why a small model does not train in a layout as it does whole. All ranks that try the layout call this.

    Args:
        make: makes the small model, whole and on the CPU.
        distribute: shares the small model over ranks, in place.
        sharding: how the ranks share micro batches.
        device: the device to train on.
        num_tokens: number of tokens of a sequence.
        inputs: names of inputs to try besides tokens alone, one after the other; those that the model does not take
            are left out.

    Returns:
        The problem, for people; None: there is none, or this process only plans for ranks that are not there.
    """
    if is_planned():
        # A plan has no other ranks to compute with.
        return None
    try:
        found = _compare_small(make, distribute, sharding, device, num_tokens, inputs)
    except Exception as error:  # whatever a model raises that cannot be made small, or is not made for the layout
        return f"it cannot be tried: {first_line(error)}"
    if found.loss <= LOSS_BOUND and found.gradient <= GRADIENT_BOUND:
        return None
    where = found.first_wrong or "no parameter"
    differences = f"the loss differs by {found.loss:.0e} with {found.inputs}, gradients by up to {found.gradient:.0e}"
    return f"{differences}; the first that is wrong: {where}"


def _compare_small(
    make: Callable[[], PreTrainedModel],
    distribute: Callable[[PreTrainedModel], LayoutHooks],
    sharding: BatchSharding,
    device: torch.device,
    num_tokens: int,
    inputs: Sequence[str],
) -> _Differences:
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would seed GPUs, too, which are not set back.
        torch.default_generator.manual_seed(0)
        small = make()
        with torch.no_grad():
            for parameter in small.parameters():
                # Norms and biases begin with ones and zeros, which would hide what is wrong.
                parameter.add_(0.02 * torch.randn(parameter.shape))
    tried = [None, *(name for name in inputs if _takes(small, name, num_tokens))]
    tried += [] if image_example(small) is None else [IMAGE]
    nn.Module.to(small, device)
    distributed = copy.deepcopy(small)
    batches = [
        _make_batch(small, num_tokens, name, seed=number * sharding.data_ranks + rank)
        for number, name in enumerate(tried)
        for rank in range(sharding.data_ranks)
    ]
    num_items = torch.stack([(batch["labels"][..., 1:] != IGNORED).sum() for batch in batches]).sum()
    whole_losses = _accumulate(small, batches, num_items).view(len(tried), -1).sum(1)
    hooks = distribute(distributed)
    of_rank = batches[sharding.data_rank :: sharding.data_ranks]
    # Gradients are averaged over ranks, so each rank's loss is multiplied by their number, as the Trainer does it.
    losses = _accumulate(distributed, of_rank, num_items, hooks.sharded, factor=sharding.token_ranks)
    hooks.reduce(losses)
    differences = ((losses - whole_losses).abs() / whole_losses.abs()).tolist()
    loss, number = max((_ordered(difference), number) for number, difference in enumerate(differences))
    gradient, first_wrong = _compare_gradients(hooks, distributed, small)
    return _Differences(loss, tried[number] or "tokens alone", gradient, first_wrong)


def _ordered(difference: float) -> float:
    """Give a difference that can be compared: infinity in place of NaN."""
    return math.inf if math.isnan(difference) else difference


def _takes(model: PreTrainedModel, name: str, num_tokens: int) -> bool:
    """Whether a model, whole and on the CPU, takes an input of this name."""
    if name == POSITIONS:
        # None: the model takes no positions, or cannot be asked without a GPU.
        return keeps_documents_apart(model) is not None
    if name not in inspect.signature(model.forward).parameters:
        return False
    try:
        with torch.no_grad():
            probe_loss(model, _make_batch(model, num_tokens, name, seed=0), use_cache=False)
    except (TypeError, ValueError, RuntimeError, IndexError):
        return False
    return True


def _make_batch(model: PreTrainedModel, num_tokens: int, extra: str | None, *, seed: int) -> Batch:
    """Make a batch of two sequences, not all of whose tokens are targets, with the input `extra` besides tokens.

    With `POSITIONS` each sequence is three documents. With `IMAGE` the batch is the run's example of one sequence.
    """
    if extra == IMAGE and (example := image_example(model)) is not None:
        return {name: tensor.to(model.device) for name, tensor in example.tensors.items()}
    generator = torch.Generator().manual_seed(seed)
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(min(vocab_size, 100), (2, num_tokens), generator=generator)
    labels, positions = ids.clone(), torch.arange(num_tokens).repeat(2, 1)
    labels[0, 4:7] = IGNORED
    padding = padding_id(model)
    if padding is not None and padding >= 0 and not scores_sequences(model):
        # A token of padding, of which some models make positions or masks.
        ids[0, 5] = padding
    inputs: Batch = {}
    if extra == POSITIONS:
        for row, starts in enumerate(((5, 19), (11, 14))):
            for start in starts:
                positions[row, start:] = torch.arange(num_tokens - start)
                labels[row, start] = IGNORED
        inputs = {POSITIONS: positions}
    elif extra == MASK:
        # The first sequence is filled up on its left side, the second on its right.
        mask = torch.stack([positions[0] >= 4, positions[1] < num_tokens - 6])
        labels[~mask] = IGNORED
        inputs = {MASK: mask.long()}
    elif extra == TYPES:
        inputs = {TYPES: (positions >= num_tokens // 2).long()}
    batch = {"input_ids": ids, "labels": labels} | inputs
    return {name: tensor.to(model.device) for name, tensor in batch.items()}


def _accumulate(
    model: PreTrainedModel,
    batches: Iterable[Batch],
    num_items: torch.Tensor,
    sharded: Callable[[Batch], AbstractContextManager[Batch]] = nullcontext,
    factor: int = 1,
) -> torch.Tensor:
    """Run forward and backward on each micro batch, and give their losses times `factor`; shape [micro batches]."""
    parameters = inspect.signature(model.forward).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    counts = takes_any and has_token_loss(model)
    counted = {"num_items_in_batch": num_items} if counts else {}
    losses = []
    for batch in batches:
        with sharded(batch) as share:
            loss = factor * probe_loss(model, share, **counted, use_cache=False)
            loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses)


def _compare_gradients(hooks: LayoutHooks, distributed: nn.Module, whole: nn.Module) -> tuple[float, str]:
    """Compare this rank's part of each gradient with the same part of the whole model's gradient.

    Returns:
        The largest relative difference, and the name of the first parameter with one over the bound; "": none.
    """
    gradients = {name: p.grad for name, p in whole.named_parameters()}
    norms = {name: float(tensor.norm()) for name, tensor in gradients.items() if tensor is not None}
    least = _NOTHING * max(norms.values())
    found: list[tuple[float, str]] = []
    for name, parameter in distributed.named_parameters():
        reference, gradient = gradients[name], parameter.grad
        if reference is None or gradient is None:
            found.append((0.0 if reference is gradient else math.inf, name))
            continue
        pieces = hooks.own_pieces(Piece(name=name, key=WEIGHT, shape=tuple(gradient.shape), start=0, view=gradient))
        squared = sum(float((piece.view - piece.of_whole(reference)).norm()) ** 2 for piece in pieces)
        found.append((math.sqrt(squared) / max(norms[name], least), name))
    worst = max(_ordered(difference) for difference, _ in found)
    first = next((name for difference, name in found if not difference <= GRADIENT_BOUND), "")
    return worst, first
