"""What is wrong with the rows of a program's own dataset, before a step would fail within torch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence, Sized
from contextlib import suppress

import torch
from torch import nn
from torch.utils.data import IterableDataset
from transformers import PreTrainedModel

from hfdist.errors import ConfigError

_MOST_LOOKED_AT = 16
_WHERE = "train_dataset"
_TOKENIZE = 'dataset.map(lambda row: tokenizer(row["text"]))'


def check_rows(arguments: Mapping[str, object], *, micro_batch_size: int) -> None:
    """Look at the first rows of a dataset that has a length; an iterable one is read by its training alone.

    Args:
        arguments: of a Trainer of transformers, by name; its model is whole.
        micro_batch_size: rows that become one tensor.

    Raises:
        ConfigError: there are no rows, none of their columns is an input of the model, a token is none of the model's,
            or rows of different lengths come without what pads them.
    """
    dataset, model = arguments.get(_WHERE), arguments.get("model")
    if not isinstance(dataset, Sized) or isinstance(dataset, IterableDataset) or not isinstance(model, nn.Module):
        return
    if len(dataset) == 0:
        raise ConfigError("the dataset is empty", where=_WHERE, found="0 rows", allowed="a row or more")
    rows = _first_rows(dataset)
    if not rows:
        return
    named = arguments.get("data_collator") is not None
    inputs = set(inspect.signature(model.forward).parameters)
    if not named and all(not inputs & row.keys() for row in rows):
        what, found = "no column of the rows is an input of the model", ", ".join(map(str, rows[0]))
        raise ConfigError(what, where=_WHERE, found=found, allowed="input_ids, labels", hint=_TOKENIZE)
    ids = [_ids_of(row) for row in rows]
    _check_vocabulary([one for one in ids if one is not None], model)
    lengths = {len(one) for one in ids if one is not None}
    if not named and arguments.get("processing_class") is None and len(lengths) > 1 < micro_batch_size:
        what, found = "rows have different lengths, and nothing pads them", f"{min(lengths)} to {max(lengths)} tokens"
        hint = "data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False), or processing_class=tokenizer"
        raise ConfigError(what, where=_WHERE, found=found, hint=hint)


def _first_rows(dataset: object) -> list[Mapping[object, object]]:
    rows: list[object] = []
    # Whatever a dataset of somebody else's does; the training says what is wrong with it.
    with suppress(Exception):
        rows = [dataset[place] for place in range(min(len(dataset), _MOST_LOOKED_AT))]  # type: ignore[index, arg-type]
    return [row for row in rows if isinstance(row, Mapping)] if all(isinstance(row, Mapping) for row in rows) else []


def _ids_of(row: Mapping[object, object]) -> Sequence[int] | None:
    ids = row.get("input_ids")
    with suppress(Exception):
        tensor = torch.as_tensor(ids)
        return [int(one) for one in tensor.tolist()] if tensor.ndim == 1 and tensor.numel() else None
    return None


def _check_vocabulary(rows: Sequence[Sequence[int]], model: nn.Module) -> None:
    embeddings = model.get_input_embeddings() if isinstance(model, PreTrainedModel) else None
    if not isinstance(embeddings, nn.Embedding):
        return
    size = embeddings.num_embeddings
    for place, ids in enumerate(rows):
        wrong = [one for one in ids if not 0 <= one < size]
        if wrong:
            what, hint = "a token is none of the model's", "the tokenizer of this model, or resize_token_embeddings"
            found, allowed = f"{wrong[0]} in row {place}", f"0 to {size - 1}"
            raise ConfigError(what, where=f"{_WHERE}, input_ids", found=found, allowed=allowed, hint=hint)
