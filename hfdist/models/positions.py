"""Positions that a model makes by itself, of the whole sequence, where it is given none."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import PreTrainedModel

from hfdist.models.embeddings import token_reader
from hfdist.models.probing import small_model

Positions = Callable[[torch.Tensor, torch.Tensor | None, int | None], torch.Tensor]
"""(token ids, mask or None, id of the padding token or None) -> positions; all of shape [sequences, tokens]."""

_NUM_TOKENS, _NUM_HIDDEN = 11, 3
"""Tokens of a row in the trial, and how many of them its mask hides."""


def all_tokens(ids: torch.Tensor, mask: torch.Tensor | None, padding: int | None) -> torch.Tensor:
    """Count from 0, as most models do."""
    return torch.arange(ids.shape[1], device=ids.device).expand_as(ids)


def _shown_tokens(ids: torch.Tensor, mask: torch.Tensor | None, padding: int | None) -> torch.Tensor:
    """Give positions as OPT counts them."""
    return all_tokens(ids, mask, padding) if mask is None else mask.long().cumsum(1) * mask - 1


def _after_padding(ids: torch.Tensor, mask: torch.Tensor | None, padding: int | None) -> torch.Tensor:
    """Give positions as RoBERTa counts them."""
    if padding is None:
        return all_tokens(ids, mask, padding)
    is_text = ids.ne(padding).long()
    return is_text.cumsum(1) * is_text + padding


_RULES: tuple[Positions, ...] = (all_tokens, _shown_tokens, _after_padding)


def padding_id(model: PreTrainedModel) -> int | None:
    """Give the id of the model's padding token, if it has one."""
    padding: int | None = getattr(model.config.get_text_config(decoder=True), "pad_token_id", None)
    return padding


@torch.no_grad()
def find_positions(model: PreTrainedModel) -> Positions | None:
    """Find by trying, with and without padding and a mask, which positions a model makes by itself.

    Args:
        model: whole and small, on the CPU.

    Returns:
        None: by no rule that is known here, or the model takes no positions.
    """
    padding = padding_id(model)
    ids = torch.arange(2 * _NUM_TOKENS).add(2).remainder(model.config.get_text_config(decoder=True).vocab_size)
    ids = ids.view(2, _NUM_TOKENS)
    mask = torch.ones_like(ids)
    mask[0, :_NUM_HIDDEN] = mask[1, -_NUM_HIDDEN:] = 0
    if padding is not None and padding >= 0:
        # One that is nothing but a token, and what a mask hides.
        ids[1, _NUM_TOKENS // 2] = padding
        ids[mask == 0] = padding
    was_training = model.training
    model.eval()
    try:
        wanted = [(shown, _states(model, ids, shown)) for shown in (None, mask)]
        rules = (rule for rule in _RULES if all(_agrees(model, ids, *pair, rule) for pair in wanted))
        return next(rules, None)
    except (TypeError, ValueError, RuntimeError, IndexError, ImportError):
        return None
    finally:
        model.train(was_training)


def _agrees(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor | None, wanted: torch.Tensor, rule: Positions
) -> bool:
    try:
        found = _states(model, ids, mask, position_ids=rule(ids, mask, padding_id(model)))
    except IndexError:
        # The rule gives positions that the model does not have.
        return False
    # What a mask hides, too: a token after padding is predicted from there.
    return torch.allclose(found, wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max()))


def _states(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor | None, **more: object) -> torch.Tensor:
    masked = {} if mask is None else {"attention_mask": mask}
    states: torch.Tensor = token_reader(model)(input_ids=ids, **masked, **more, use_cache=False)[0]
    return states


@unset_fake_temporarily()
def counts_from_zero(model: PreTrainedModel) -> bool:
    """Whether positions from 0, as packed documents have, are those of a document alone. A small model is asked.

    Returns:
        True also where it cannot be asked.
    """
    # All of RoBERTa's family make positions by this name; most models need no trial.
    if not any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        return True
    with torch.random.fork_rng(devices=[]):
        try:
            found = find_positions(small_model(model))
        except Exception:  # whatever a model raises that cannot be made small
            return True
    return found is not _after_padding


def count_unused_positions(model: PreTrainedModel) -> int:
    """Count the positions before that of a text's first token, which no token ever has.

    Args:
        model: whole and small, on the CPU.
    """
    if not any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        return 0
    padding = padding_id(model)
    return 0 if padding is None or find_positions(model) is not _after_padding else padding + 1
