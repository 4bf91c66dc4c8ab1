"""Numbers that the optimizer keeps for each parameter, such as step counts: they go into the JSON of a checkpoint.

All numbers of a key are usually equal, and then ranks tell each other one value a key.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from hfdist.checkpoint.holders import gather_numbers
from hfdist.checkpoint.piece import NUMBER, STEP, Piece
from hfdist.checkpoint.safetensors_io import TensorId
from hfdist.errors import NumericsError

Numbers = dict[str, dict[str, float]]
"""Numbers of the optimizer, such as step counts: by key, and then by parameter."""


def read_numbers(pieces: Sequence[Piece]) -> dict[TensorId, float]:
    """Read the numbers of this rank; NumericsError: a number is NaN, or a step count is infinite."""
    # Stacked into one read: on a GPU each read waits for everything that runs there.
    by_kind: dict[tuple[str, torch.device], list[torch.Tensor]] = {}
    for piece in pieces:
        by_kind.setdefault((piece.key, piece.view.device), []).append(piece.view.detach().reshape(()))
    read = {kind: iter(torch.stack(views).tolist()) for kind, views in by_kind.items()}
    values = {(piece.name, piece.key): next(read[piece.key, piece.view.device]) for piece in pieces}
    for (name, key), value in values.items():
        # A step becomes a whole number; others may be infinite.
        if math.isnan(value) or (key == STEP and math.isinf(value)):
            what = f"a number of the optimizer is {'NaN' if math.isnan(value) else 'infinite'}"
            raise NumericsError(what, where=f"{name}/{key.removeprefix(NUMBER)}")
    return {(name, key): int(value) if key == STEP else value for (name, key), value in values.items()}


def common_values(numbers: Mapping[TensorId, float]) -> dict[str, float | None]:
    """Give the value that all numbers of a key have, as is usual; None: they have several."""
    values: dict[str, float | None] = {}
    for (_, key), value in numbers.items():
        values[key] = value if values.get(key, value) == value else None
    return values


def merge_numbers(
    ids: Iterable[TensorId], own: Mapping[TensorId, float], of_ranks: Sequence[Mapping[str, float | None]]
) -> Numbers:
    """Give the numbers of all ranks, equal on all of them. A collective where those of a key differ.

    Args:
        ids: of all numbers that any rank holds.
        own: of this rank.
        of_ranks: what `common_values` gives on each rank.
    """
    of_keys: dict[str, set[float | None]] = {}
    for key, value in (item for values in of_ranks for item in values.items()):
        of_keys.setdefault(key, set()).add(value)
    if all(len(values) == 1 and None not in values for values in of_keys.values()):
        common = {key: value for key, values in of_keys.items() for value in values if value is not None}
        merged = {(name, key): common[key] for name, key in ids}
    else:
        merged = gather_numbers(own)
    numbers: Numbers = {}
    for (name, key), value in sorted(merged.items(), key=lambda item: (item[0][1], item[0][0])):
        numbers.setdefault(key, {})[name] = value
    return numbers


def numbers_as_json(numbers: Numbers) -> dict[str, object]:
    """Give the step counts, and other numbers if the optimizer has some, in the form of `save_plan.STATE_FILE`."""
    others = {key.removeprefix(NUMBER): of_key for key, of_key in numbers.items() if key != STEP}
    return {"steps": numbers.get(STEP, {})} | ({"numbers": others} if others else {})
