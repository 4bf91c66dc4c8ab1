"""TRL's `SFTTrainer` in any layout: its loss, its rows without padding, and its metrics in a pipeline.

No other of TRL's trainers has a loss that is a sum over targets, divided by their number in the global batch. So this
one can run in a pipeline, with three changes: the metrics that it gathers beside the loss, where only the last stage
has one; the logging of those metrics by rank 0; and rows without padding, which cannot be split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from typing import Any, TypeGuard

import torch
from torch.nn.utils.rnn import pad_sequence

from hfdist.collectives import gather_json
from hfdist.data.packing.sequence import IGNORED
from hfdist.models.routers import COUNTED
from hfdist.strategies.engine import Batch
from hfdist.trainer.engine_trainer import EngineTrainer
from hfdist.trainer.step.convention import Convention
from hfdist.trainer.trl_trainers import is_sft

_ROW = {"input_ids": 0, "labels": IGNORED, "position_ids": 0, COUNTED: False}
"""Tensors of a row, and the value that fills a shorter row up: position 0, so each such token is a document."""
_CONVENTION = Convention(shifts=True, divides=True, is_of_tokens=True)
"""The convention of SFTTrainer's loss, whatever the model's forward takes."""


class _SftTrainer(EngineTrainer):
    """The attributes of an SFTTrainer that this file reads and sets: TRL need not be installed.

    test_trl_seams.py compares those of the metrics with TRL's.
    """

    aux_loss_enabled: bool
    _metrics: dict[str, dict[str, list[float]]]
    """A value of each micro batch since the last training line, by `train` or `eval` and by name."""
    _total_train_tokens: float


def _is_sft(trainer: EngineTrainer) -> TypeGuard[_SftTrainer]:
    return is_sft(type(trainer))


def fit_sft(trainer: EngineTrainer) -> None:
    """Let an SFTTrainer that was just made train with its engine; do nothing to any other Trainer."""
    if not _is_sft(trainer) or trainer.engine is None:
        return
    # The loss divides by the targets of the global batch, whatever the model's forward takes: count them.
    trainer.model_accepts_loss_kwargs = True
    trainer.weighted_loss.convention = _CONVENTION
    # TRL would add the loss over routers of each micro batch.
    trainer.aux_loss_enabled = False
    # In a pipeline, only this path of TRL's forward runs the blocks of a stage.
    trainer.router_loss.options = {"fused_lm_head": True}
    if not trainer.engine.runs_whole_model and getattr(trainer.data_collator, "padding_free", False):
        trainer.data_collator = partial(collate_rows, trainer.data_collator)


def collate_rows(collate: Callable[[list[Any]], dict[str, Any]], items: Sequence[object]) -> Batch:
    """Put items below each other where TRL's `collate` puts them into one row, which a pipeline cannot split.

    Each item is one packed or single row of tokens. Gives tensors of shape [items, tokens of the longest]; where
    positions begin anew, so does a document.
    """
    rows = [collate([item]) for item in items]
    for row in rows:
        row[COUNTED] = torch.ones_like(row["input_ids"], dtype=torch.bool)
    return {
        name: pad_sequence([row[name][0] for row in rows], batch_first=True, padding_value=filler)
        for name, filler in _ROW.items()
    }


def count_rows(trainer: EngineTrainer, inputs: Batch, counted: torch.Tensor | None) -> None:
    """Count the tokens of all rows that `collate_rows` has put below each other; TRL counts the positions of one.

    Do nothing to any other Trainer or batch. A collective of the ranks that have a loss.
    """
    if counted is None or trainer.engine is None or trainer.engine.runs_whole_model or "attention_mask" in inputs:
        return
    if _is_sft(trainer) and trainer.training.model.training:
        missed = trainer.accelerator.gather_for_metrics(counted.sum() - inputs["position_ids"].size(1)).sum()
        trainer._total_train_tokens += missed.item()
        trainer._metrics["train"]["num_tokens"] = [trainer._total_train_tokens]


def share_metrics(trainer: EngineTrainer) -> None:
    """Give all ranks of a pipeline the metrics of an SFTTrainer; do nothing to any other. A collective."""
    if not _is_sft(trainer) or trainer.engine is None or trainer.engine.runs_whole_model:
        return
    mode = "train" if trainer.training.model.training else "eval"
    # Only those of this mode: shared metrics of the other mode would stay here, and count as this rank's own.
    by_rank = gather_json([trainer._metrics[mode], trainer._total_train_tokens])
    for metrics, num_tokens in by_rank:
        if metrics:
            # A last stage has them. All last stages have the same, since TRL has gathered them among these ranks.
            trainer._metrics[mode].update(_without_padding(metrics))
            trainer._total_train_tokens = num_tokens
            return


def _without_padding(metrics: dict[str, list[float]]) -> dict[str, list[float]]:
    """Leave out the values of micro batches of nothing but padding: they have no target, and were given zeros."""
    have_targets = [entropy > 0 for entropy in metrics.get("entropy", ())]
    return {
        name: list(compress(values, have_targets)) if len(values) == len(have_targets) else values
        for name, values in metrics.items()
    }
