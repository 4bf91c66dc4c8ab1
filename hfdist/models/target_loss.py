"""The loss of the targets of an encoder-decoder, and a check that a type's own loss is this sum over targets.

    source                  target         decoder reads          loss at
    a b c </s> . .          x y </s>       start x y              x y </s>
    d e f g h </s>          z </s> .       start z .              z </s>

The type's own forward moves the labels by one and puts its start token in front. A sum over targets does not depend on
which rows stand together, so micro batches of any sizes add up to the global batch. A small model of the type is tried.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import PreTrainedConfig, PreTrainedModel

from hfdist.config.batch import IGNORED
from hfdist.config.model import Init, ModelConfig
from hfdist.config.task import Head
from hfdist.errors import ConfigError, first_line
from hfdist.models.probing import make_of_config
from hfdist.models.shrink import shrink

_BOUND = 1e-5
"""Largest relative difference in float32; another loss, or rows that change each other, make 1e-4 and more."""
_SIZES = ((12, 4), (7, 6))
"""Tokens of the source and of the target, for each row of the trial."""
_START = "decoder_start_token_id"
"""Field of a config: the token that the decoder reads first."""


def sum_target_losses(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Give the sum of the losses of all targets, in float32.

    Args:
        model: an encoder-decoder, perhaps in the wrapper of a layout.
        batch: `input_ids` and `attention_mask` of sources, shape [rows, tokens]; `labels` of targets, shape
            [rows, target tokens], IGNORED where a row has fewer.
    """
    inputs: dict[str, Any] = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
    logits: torch.Tensor = model(**inputs, use_cache=False).logits
    targets = batch["labels"].flatten()
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets, ignore_index=IGNORED, reduction="sum")


def sum_hidden_losses(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Give the sum of the losses of the tokens that are hidden from an encoder, in float32.

    Args:
        model: as the engine gives it.
        batch: `input_ids`, `attention_mask` and `labels`, each of shape [rows, tokens]; labels are IGNORED but for
            hidden tokens.
    """
    inputs: dict[str, Any] = {name: batch[name] for name in ("input_ids", "attention_mask")}
    logits: torch.Tensor = model(**inputs).logits
    is_hidden = batch["labels"] != IGNORED
    return nn.functional.cross_entropy(logits[is_hidden].float(), batch["labels"][is_hidden], reduction="sum")


def check_target_loss(config: ModelConfig, architecture: PreTrainedConfig) -> None:
    """Check that a type's loss is the sum over its targets, whatever else is in a batch. Needs no weights.

    Args:
        config: the run's config of the model. A model with random weights may lack a start token: the tokenizer gives
            it one later.
        architecture: the model's config, as `find_architecture` gives it.

    Raises:
        ConfigError: the loss is another one, there is no start token, or blocks are left out at random.
    """
    where = "model.name" if config.name else "model.type"
    for field in ("encoder_layerdrop", "decoder_layerdrop"):
        if getattr(architecture, field, 0):
            what = "ranks would leave out other blocks of the model than one process does (LayerDrop)"
            found, key = getattr(architecture, field), f"model.config.{field}"
            raise ConfigError(what, where=key, found=found, allowed="0", hint=f"{key}=0")
    reason = _find_problem(architecture, is_new=config.init is Init.random)
    if reason is not None and config.init is not Init.random and getattr(architecture, _START, None) is None:
        what = "the model does not say with which token a target begins"
        hint = f"model.config.{_START}=ID, as of the model that it was made from"
        raise ConfigError(what, where=f"model.config.{_START}", found="null", allowed="a token id", hint=hint)
    if reason is not None:
        what = "the loss of a target depends on what stands beside it in this type, or is not that of its tokens alone"
        hint = "another encoder-decoder, such as t5, bart, mbart, marian or pegasus"
        raise ConfigError(what, where=where, found=f"{architecture.model_type}: {reason}", hint=hint)


@unset_fake_temporarily()
def _find_problem(architecture: PreTrainedConfig, *, is_new: bool) -> str | None:
    """Say why the loss of a small model is not the sum over its targets; None: it is. `is_new`: with random weights."""
    with torch.random.fork_rng(devices=[]):
        try:
            small = shrink(architecture)
            if is_new:
                fill_special_ids(small, 0)
            elif getattr(architecture, _START, None) is None:
                # The class would set a default, which the files of the model do not have.
                setattr(small, _START, None)
            small._attn_implementation = "eager"
            return _difference(make_of_config(small, Head.targets))
        except Exception as error:  # whatever a model raises that cannot be made small, or takes other inputs
            return f"a small model cannot be tried: {first_line(error)}"


@torch.no_grad()
def _difference(model: PreTrainedModel) -> str | None:
    """Say how the sum of two rows' losses differs from the model's own or from that row by row; None: it does not."""
    generator = torch.Generator().manual_seed(0)
    vocab_size = min(model.config.get_text_config(decoder=True).vocab_size, 100)
    # Low ids may be special tokens.
    rows = [
        [torch.randint(vocab_size // 4, vocab_size, (size,), generator=generator) for size in sizes] for sizes in _SIZES
    ]
    together = pad_pairs(rows)
    num_targets = sum(size for _, size in _SIZES)
    ours = sum_target_losses(model, together)
    theirs = model(**together, use_cache=False).loss * num_targets
    alone = torch.stack([sum_target_losses(model, pad_pairs([row])) for row in rows]).sum()
    for what, other in (("its own loss is", theirs), ("row by row it is", alone)):
        # `not <=` is true of NaN, too.
        if not float((ours - other).abs() / other.abs()) <= _BOUND:
            return f"of a small model it is {float(ours):.4f}, and {what} {float(other):.4f}"
    return None


def fill_special_ids(architecture: PreTrainedConfig, token: int) -> None:
    """Give a new model's config, in place, the ids of padding and of the start of a target that it lacks.

    They are one token, as in T5.

    Args:
        architecture: the model's config.
        token: the id of padding, where the config has none.
    """
    if getattr(architecture, "pad_token_id", None) is None:
        architecture.pad_token_id = token
    if getattr(architecture, _START, None) is None:
        setattr(architecture, _START, architecture.pad_token_id)


def pad_pairs(rows: list[list[torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Stack rows of source and target, each of shape [tokens], filled up at their ends.

    Sources are filled with token 0, which the mask hides.

    Returns:
        input_ids and attention_mask of shape [rows, tokens], labels of shape [rows, target tokens]; one token of each
        at least, so that a row of nothing can be computed, too.
    """
    sources, targets = zip(*rows, strict=True)
    lengths = [len(source) for source in sources]
    ids = _stack(sources, 0)
    mask = (torch.arange(ids.shape[1]) < torch.tensor(lengths).clamp(min=1)[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": _stack(targets, IGNORED)}


def _stack(rows: tuple[torch.Tensor, ...], fill: int) -> torch.Tensor:
    """Stack rows of tokens, filled up at their ends to the longest; shape [rows, tokens]."""
    stacked = torch.full((len(rows), max(1, *map(len, rows))), fill)
    for number, row in enumerate(rows):
        stacked[number, : len(row)] = row
    return stacked
