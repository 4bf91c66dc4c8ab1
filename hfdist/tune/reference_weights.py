"""The weights of a reference model, kept on the CPU and put into the trained model while the two are compared.

They are the trained weights as a run begins with them. They may follow the model (TR-DPO, arXiv 2404.09656): after
every `ref_model_sync_steps` steps they become alpha x the model's weights + (1 - alpha) x themselves. Then each
checkpoint has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState

from hfdist.checkpoint.piece import MASTER, WEIGHT, Piece
from hfdist.config.task import TaskConfig
from hfdist.strategies.engine import Engine

KEY = "reference"
"""The key of pieces of a reference that follows the model."""
_HALF = (torch.bfloat16, torch.float16)
"""Types of weights of which an optimizer may hold copies in float32."""


class ReferenceWeights:
    """This rank's part of the reference's weights: a copy of the trained weights. Each call is a collective.

    Args:
        engine: an engine that has its optimizer.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._kept = [piece.view.to("cpu", copy=True) for piece in self._pieces()]
        """The weights, in the order of `_pieces`."""

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Exchange the model's weights for these in the block, and back after it, bit for bit. Nothing is gathered."""
        self._exchange()
        yield
        # What fails in between ends the run on all ranks: no rank may wait here for the others.
        self._exchange()

    @torch.no_grad()
    def follow(self, alpha: float) -> None:
        """Move towards the model's weights by the share `alpha` of the way. Nothing is sent."""
        for piece, kept in zip(self._pieces(), self._kept, strict=True):
            kept.lerp_(piece.view.to("cpu"), alpha)

    def before_save(self) -> None:
        """Do nothing: these weights are always ready to be saved."""

    def pieces(self, of_engine: Iterable[Piece]) -> Iterable[Piece]:
        """List the pieces that a checkpoint holds of this rank: the engine's, and these weights under KEY."""
        kept_pieces = (
            replace(piece, key=KEY, view=kept, set_number=None)
            for piece, kept in zip(self._pieces(), self._kept, strict=True)
        )
        return chain(of_engine, kept_pieces)

    @torch.no_grad()
    def _exchange(self) -> None:
        """Swap the model's weights and these, a piece at a time: no more than one piece is in memory twice."""
        for piece, kept in zip(self._pieces(), self._kept, strict=True):
            present = piece.view.clone()
            piece.view.copy_(kept)
            kept.copy_(present)
        self._engine.after_load()

    def _pieces(self) -> list[Piece]:
        """List the trained weights. Where weights of half precision have float32 copies, list the copies alone.

        `Engine.after_load` makes the weights of half precision from their copies.
        """
        trained = {name for name, parameter in self._engine.model.named_parameters() if parameter.requires_grad}
        pieces = [piece for piece in self._engine.pieces() if piece.name in trained and piece.key in (WEIGHT, MASTER)]
        if not any(piece.key == MASTER for piece in pieces):
            return pieces
        return [piece for piece in pieces if piece.key == MASTER or piece.view.dtype not in _HALF]


def following(task: TaskConfig, reference: Callable[[], ReferenceWeights]) -> list[TrainerCallback]:
    """Give the callback that lets a reference follow the model, as `task.*` says; none if the reference stays.

    `reference` is called after the training has begun.
    """
    every = task.ref_model_sync_steps
    return [] if every is None else [Following(reference, every=every, alpha=task.ref_model_mixup_alpha)]


class Following(TrainerCallback):
    """Lets a reference follow the model.

    Args:
        reference: gives the reference's weights, once the training has begun.
        every: number of steps between two moves of the reference.
        alpha: share of the way to the model's weights that a move goes.
    """

    def __init__(self, reference: Callable[[], ReferenceWeights], *, every: int, alpha: float) -> None:
        self._reference, self._every, self._alpha = reference, every, alpha

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Move the reference if the step says so, before a checkpoint of the step is written. A collective."""
        if state.global_step % self._every == 0:
            self._reference().follow(self._alpha)
