"""Checks of the first rows of a program's own dataset, so that no step fails within torch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence, Sized
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import IterableDataset
from transformers import PreTrainedModel

from hfdist.errors import ConfigError
from hfdist.kept_generators import keeping_generators
from hfdist.models.embeddings import input_embeddings

_MOST_LOOKED_AT = 16
"""The most rows that are read."""
_WHERE = "train_dataset"
_TOKENIZE = 'dataset.map(lambda row: tokenizer(row["text"]))'
_PAD = "data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False), or processing_class=tokenizer"


def check_is_dataset(dataset: object, where: str) -> None:
    """Raise a ConfigError where the argument `where` of a Trainer is a path in place of a dataset."""
    if isinstance(dataset, str | Path):
        hint = f"load_dataset('json', data_files={str(dataset)!r}, split='train')"
        raise ConfigError("a dataset is no path", where=where, found=repr(dataset), hint=hint)


def check_rows(dataset: object, model: object, *, collates_itself: bool) -> None:
    """Look at the first rows of a dataset that has a length; an iterable one is read by its training alone.

    Args:
        dataset: the dataset that a Trainer is given.
        model: the whole model.
        collates_itself: whether a collator of the program's own makes batches of rows.

    Raises:
        ConfigError: it is no dataset; it has no rows; no column is an input of the model; the model lacks a token.
    """
    check_is_dataset(dataset, _WHERE)
    if isinstance(dataset, Mapping):
        hint = f"train_dataset=dataset[{str(next(iter(dataset), 'train'))!r}]"
        raise ConfigError("these are several datasets", where=_WHERE, found=", ".join(map(str, dataset)), hint=hint)
    if isinstance(dataset, Sized) and not isinstance(dataset, IterableDataset) and len(dataset) == 0:
        raise ConfigError("the dataset is empty", where=_WHERE, found="0 rows", allowed="a row or more")
    rows = _first_rows(dataset)
    if not rows or not isinstance(model, nn.Module):
        return
    takes = inspect.signature(model.forward).parameters
    takes_any_name = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in takes.values())
    if takes_any_name and not isinstance(model, PreTrainedModel):
        # A module of the program's own may read any column. transformers' models name theirs, beside **kwargs.
        return
    inputs = set(takes)
    if not collates_itself and all(not inputs & row.keys() for row in rows):
        raise ConfigError(
            "no column of the rows is an input of the model",
            where=_WHERE,
            found=", ".join(map(str, rows[0])),
            allowed="input_ids, labels",
            hint=_TOKENIZE,
        )
    if isinstance(model, PreTrainedModel):
        _check_vocabulary([_ids_of(row) for row in rows], model)


def check_lengths(dataset: object) -> None:
    """Raise a ConfigError where the first rows have different lengths; for a collator that does not pad them."""
    lengths = {len(ids) for row in _first_rows(dataset) if (ids := _ids_of(row)) is not None}
    if len(lengths) > 1:
        found = f"{min(lengths)} to {max(lengths)} tokens"
        raise ConfigError("rows have different lengths, and nothing pads them", where=_WHERE, found=found, hint=_PAD)


def _first_rows(dataset: object) -> list[Mapping[object, object]]:
    """Read the first rows; none where the dataset has no length, cannot be read, or has other rows than mappings."""
    if not isinstance(dataset, Sized) or isinstance(dataset, IterableDataset):
        return []
    rows: list[object] = []
    # A row may draw random numbers, which the training must not miss. An error comes again when the training reads.
    with suppress(Exception), keeping_generators():
        rows = [dataset[place] for place in range(min(len(dataset), _MOST_LOOKED_AT))]  # type: ignore[index]
    mappings = [row for row in rows if isinstance(row, Mapping)]
    return mappings if len(mappings) == len(rows) else []


def _ids_of(row: Mapping[object, object]) -> Sequence[int] | None:
    """Give the tokens of a row; None: it has none, or they are not one list of numbers."""
    ids = row.get("input_ids")
    # A column may hold anything, and torch raises several kinds of errors for what is no tensor.
    with suppress(Exception):
        tensor = torch.as_tensor(ids)
        return [int(one) for one in tensor.tolist()] if tensor.ndim == 1 and tensor.numel() else None
    return None


def _check_vocabulary(rows: Sequence[Sequence[int] | None], model: PreTrainedModel) -> None:
    """Refuse rows with a token that the model's embeddings do not have: on a GPU, a step would end within CUDA."""
    embeddings = input_embeddings(model)
    if not isinstance(embeddings, nn.Embedding):
        return
    size = embeddings.num_embeddings
    for place, ids in enumerate(rows):
        unknown = next((token for token in ids or () if not 0 <= token < size), None)
        if unknown is not None:
            raise ConfigError(
                "the model does not have this token",
                where=f"{_WHERE}, input_ids",
                found=f"{unknown} in row {place}",
                allowed=f"0 to {size - 1}",
                hint="the tokenizer of this model, or resize_token_embeddings",
            )
