"""Parameters that the ranks of an axis share: transformers' plan for them, and what this rank holds of each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hfdist.checkpoint.piece import Piece
from hfdist.errors import ConfigError
from hfdist.models.partitioning import is_on_other_stage

TENSOR, EXPERT = "tensor", "expert"
"""Axes of the mesh whose ranks hold different parts of a parameter."""


@dataclass(frozen=True, kw_only=True)
class ParameterShard:
    """What this rank holds of one parameter: along one dimension, one part or several."""

    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    dim: int
    parts: tuple[tuple[int, int], ...]
    """First index of each part and one past its last, along `dim`; the rank holds the parts one after the other."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of what this rank holds."""
        size = sum(stop - start for start, stop in self.parts)
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """Copy what this rank holds of a whole tensor."""
        return torch.cat([whole.narrow(self.dim, start, stop - start) for start, stop in self.parts], self.dim)

    def pieces(self, piece: Piece) -> Iterator[Piece]:
        """Give pieces of the whole tensor, from a piece of rows of what the rank holds as if that were whole."""
        if piece.view.numel() == 0:
            return iter([replace(piece, shape=self.shape, start=0)])
        first_row = piece.start // math.prod(self.local_shape[1:])
        return self._pieces_of_rows(piece, first_row) if self.dim == 0 else self._pieces_within_rows(piece, first_row)

    def _local_begins(self) -> Iterator[int]:
        """Give where each part begins in what the rank holds."""
        return accumulate((stop - start for start, stop in self.parts[:-1]), initial=0)

    def _pieces_of_rows(self, piece: Piece, first_row: int) -> Iterator[Piece]:
        """Give the rows of a piece that are in each part."""
        row = math.prod(self.shape[1:])
        for begin, (start, stop) in zip(self._local_begins(), self.parts, strict=True):
            low, high = max(first_row, begin), min(first_row + len(piece.view), begin + stop - start)
            if low < high:
                view = piece.view[low - first_row : high - first_row]
                yield replace(piece, shape=self.shape, start=(start + low - begin) * row, view=view)

    def _pieces_within_rows(self, piece: Piece, first_row: int) -> Iterator[Piece]:
        """Give what a piece has of each part: of each row of the whole tensor some elements."""
        inner, offset = math.prod(self.shape[self.dim + 1 :]), first_row * math.prod(self.shape[1:])
        if (period := self._period()) is not None:
            # The parts of a row repeat: together they are one part of each row of a matrix with shorter rows.
            start, stop = self.parts[0]
            run, pitch = (stop - start) * inner, period * inner
            yield replace(piece, shape=self.shape, start=offset + start * inner, run=run, pitch=pitch)
            return
        for begin, (start, stop) in zip(self._local_begins(), self.parts, strict=True):
            yield replace(
                piece,
                shape=self.shape,
                start=offset + start * inner,
                run=(stop - start) * inner,
                pitch=self.shape[self.dim] * inner,
                view=piece.view.narrow(self.dim, begin, stop - start),
            )

    def _period(self) -> int | None:
        """Give the distance along `dim` at which the first part repeats; None: the parts are not its repetitions."""
        period, (start, stop) = self.shape[self.dim] // len(self.parts), self.parts[0]
        repeated = tuple((number * period + start, number * period + stop) for number in range(len(self.parts)))
        return period if self.parts == repeated and period * len(self.parts) == self.shape[self.dim] else None


def check_is_of_transformers(model: nn.Module, axis: str) -> None:
    """Refuse what is no model of transformers, such as one that PEFT has wrapped."""
    if not isinstance(model, PreTrainedModel):
        what, found = f"only a model of transformers can be sharded over {axis} ranks", type(model).__name__
        hint = f"strategy.{axis}=1, with strategy=fsdp2; an adapter by model.add_adapter(config), not by get_peft_model"
        raise ConfigError(what, where=f"strategy.{axis}", found=found, hint=hint)


def no_plan_error(model: PreTrainedModel, axis: str) -> ConfigError:
    """Give the error for a type of model for which transformers has no plan, or none that is known here."""
    shared = "this type of model" if axis == TENSOR else "experts of this type of model"
    return ConfigError(
        f"transformers has no plan by which {shared} could be sharded over {axis} ranks",
        where=f"strategy.{axis}",
        found=model.config.model_type,
        hint=f"strategy.{axis}=1; strategy=fsdp2 shards any model",
    )


def indivisible_error(axis: str, num_ranks: int, size: int, *, what: str, found: str) -> ConfigError:
    """Give the error for a size that the number of ranks does not divide."""
    fitting = [n for n in range(1, size + 1) if size % n == 0]
    return ConfigError(
        what,
        where=f"strategy.{axis}",
        found=f"{num_ranks}, and {found}",
        allowed=", ".join(map(str, fitting)),
        hint=f"strategy.{axis}={max(n for n in fitting if n <= num_ranks)}",
    )


def rules_on_this_stage(model: nn.Module, rules: dict[str, str]) -> dict[str, str]:
    """Leave out the rules for what another rank of a pipeline holds."""
    here = {name for name, module in model.named_modules() if not is_on_other_stage(module)}
    here |= {name for name, _ in model.named_parameters()}
    return {name: style for name, style in rules.items() if name in here}


def shard_of_dtensor(parameter: DTensor) -> ParameterShard:
    """Say which part this rank holds of a parameter that is sharded along one dimension."""
    [placement], mesh = parameter.placements, parameter.device_mesh
    kind: Any = placement
    dim = kind.dim % parameter.dim()
    # Packed matrices are sharded one by one; one that is not packed is one of one.
    num_packed = getattr(kind, "split_factor", 1)
    packed = parameter.shape[dim] // num_packed
    part = packed // mesh.size()
    first = mesh.get_local_rank() * part
    parts = tuple((begin + first, begin + first + part) for begin in range(0, packed * num_packed, packed))
    shard = ParameterShard(shape=tuple(parameter.shape), dim=dim, parts=parts)
    assert shard.local_shape == tuple(parameter.to_local().shape), (shard, parameter.placements)
    return shard


def keep_local(module: nn.Module, placed: dict[str, DTensor]) -> None:
    """Leave in a module what this rank holds of its own parameters, as plain tensors."""
    for name, parameter in placed.items():
        # A copy: else all of the whole tensor's memory would stay.
        local = parameter.to_local().detach().clone()
        module._parameters[name] = nn.Parameter(local, requires_grad=parameter.requires_grad)
