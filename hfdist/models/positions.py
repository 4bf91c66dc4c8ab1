"""Finds the rule by which a model counts the positions of a whole sequence where it is given none.

tokens     .  .  a  b  c        two padding tokens, hidden by a mask; padding has the id 1
all        0  1  2  3  4        most models
shown     -1 -1  0  1  2        OPT
padded     1  1  2  3  4        RoBERTa: counted from the id of the padding token plus one
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import PreTrainedModel

from hfdist.models.embeddings import token_reader
from hfdist.models.probing import small_model

Positions = Callable[[torch.Tensor, torch.Tensor | None, int | None], torch.Tensor]
"""Takes token ids, a mask or None, and the id of the padding token or None; gives positions.

Ids, mask and positions have the shape [sequences, tokens].
"""

_NUM_TOKENS = 11
"""Number of tokens of a row in the trial."""
_NUM_HIDDEN = 3
"""Number of these tokens that the row's mask hides."""


def all_tokens(ids: torch.Tensor, mask: torch.Tensor | None, padding: int | None) -> torch.Tensor:
    """Count all tokens from 0, as most models do."""
    return torch.arange(ids.shape[1], device=ids.device).expand_as(ids)


def _shown_tokens(ids: torch.Tensor, mask: torch.Tensor | None, padding: int | None) -> torch.Tensor:
    """Count from 0 the tokens that the mask shows, as OPT does."""
    return all_tokens(ids, mask, padding) if mask is None else mask.long().cumsum(1) * mask - 1


def _after_padding(ids: torch.Tensor, mask: torch.Tensor | None, padding: int | None) -> torch.Tensor:
    """Count the tokens that are no padding, from the id of the padding token plus one, as RoBERTa does."""
    if padding is None:
        return all_tokens(ids, mask, padding)
    is_text = ids.ne(padding).long()
    return is_text.cumsum(1) * is_text + padding


_RULES: tuple[Positions, ...] = (all_tokens, _shown_tokens, _after_padding)
"""The known rules, the most usual first: the first one that agrees with a model is taken."""


def padding_id(model: PreTrainedModel) -> int | None:
    """Give the id of the model's padding token; None: its config has none."""
    padding: int | None = getattr(model.config.get_text_config(decoder=True), "pad_token_id", None)
    return padding


@torch.no_grad()
def find_positions(model: PreTrainedModel) -> Positions | None:
    """Find, by trying the known rules, which positions a model makes by itself, with and without padding and a mask.

    Args:
        model: a small whole model on the CPU.

    Returns:
        The rule; None: none of the known ones, or the model takes no positions.
    """
    padding = padding_id(model)
    ids = torch.arange(2 * _NUM_TOKENS).add(2).remainder(model.config.get_text_config(decoder=True).vocab_size)
    ids = ids.view(2, _NUM_TOKENS)
    mask = torch.ones_like(ids)
    mask[0, :_NUM_HIDDEN] = mask[1, -_NUM_HIDDEN:] = 0
    if padding is not None and padding >= 0:
        # One padding token that the mask shows, and those that it hides.
        ids[1, _NUM_TOKENS // 2] = padding
        ids[mask == 0] = padding
    was_training = model.training
    model.eval()
    try:
        without_mask, with_mask = _states(model, ids, None), _states(model, ids, mask)
        for rule in _RULES:
            if _agrees(model, ids, None, without_mask, rule) and _agrees(model, ids, mask, with_mask, rule):
                return rule
        return None
    except (TypeError, ValueError, RuntimeError, IndexError, ImportError):
        return None
    finally:
        model.train(was_training)


def _agrees(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor | None, wanted: torch.Tensor, rule: Positions
) -> bool:
    """Whether the model gives the states `wanted` with the positions of a rule."""
    try:
        found = _states(model, ids, mask, position_ids=rule(ids, mask, padding_id(model)))
    except IndexError:
        # The rule gives a position that the model does not have.
        return False
    # States of hidden tokens are compared, too: the token after padding is predicted from the last one.
    return torch.allclose(found, wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max()))


def _states(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor | None, **more: object) -> torch.Tensor:
    """Run a model, and give the states or logits of each token."""
    masked = {} if mask is None else {"attention_mask": mask}
    states: torch.Tensor = token_reader(model)(input_ids=ids, **masked, **more, use_cache=False)[0]
    return states


@unset_fake_temporarily()
def counts_from_zero(model: PreTrainedModel) -> bool:
    """Whether the model counts the positions of a document from 0, as packed documents are counted.

    A small model of the same class is tried; True also where none can be made.
    """
    # All of RoBERTa's family make positions by a method of this name; other models need no trial.
    if not any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        return True
    with torch.random.fork_rng(devices=[]):
        try:
            found = find_positions(small_model(model))
        except Exception:  # whatever a model raises that cannot be made small
            return True
    return found is not _after_padding


def count_unused_positions(model: PreTrainedModel) -> int:
    """Count the positions before the first one that a token can have: those up to the id of RoBERTa's padding token.

    Args:
        model: a small whole model on the CPU.
    """
    if not any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        return 0
    padding = padding_id(model)
    if padding is None or find_positions(model) is not _after_padding:
        return 0
    return padding + 1
