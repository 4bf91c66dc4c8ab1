"""TRL's `SFTTrainer` in any layout: its loss, its rows without padding, and its metrics in a pipeline.

Of TRL's trainers it alone has a loss that is a sum over targets divided by their number in the global batch. So it can
run in a pipeline, with three changes: the metrics that it gathers beside the loss, where only the last stage has one;
the logging of those metrics by rank 0; and rows without padding, which cannot be split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from hfdist.collectives import gather_json
from hfdist.data.packing.sequence import IGNORED
from hfdist.models.routers import COUNTED
from hfdist.trainer.engine_trainer import EngineTrainer
from hfdist.trainer.step.loss import Convention
from hfdist.trainer.trl_trainers import is_sft

_ROW = {"input_ids": 0, "labels": IGNORED, "position_ids": 0, COUNTED: False}
"""What is kept of a row without padding, and what pads a shorter one: each such token is a document of its own."""
_CONVENTION = Convention(shifts=True, divides=True, is_of_tokens=True)
"""What the loss of SFTTrainer counts, whatever the model's forward takes."""


def fit_sft(trainer: EngineTrainer) -> None:
    """Let an SFTTrainer that was just made train with its engine; do nothing to any other Trainer."""
    if trainer.engine is None or not is_sft(type(trainer)):
        return
    # It divides by the targets of the global batch, whatever the model's forward takes: count them.
    trainer.model_accepts_loss_kwargs = True
    trainer.weighted_loss.convention = _CONVENTION
    sft: Any = trainer
    # It would add the loss over routers of each micro batch.
    sft.aux_loss_enabled = False
    # Of the stages of a pipeline only this path of TRL's forward runs their own blocks.
    trainer.router_loss.options = {"fused_lm_head": True}
    if not trainer.engine.runs_whole_model and getattr(trainer.data_collator, "padding_free", False):
        trainer.data_collator = partial(collate_rows, trainer.data_collator)


def collate_rows(collate: Callable[[list[Any]], dict[str, Any]], items: Sequence[object]) -> dict[str, torch.Tensor]:
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


def count_rows(trainer: EngineTrainer, inputs: dict[str, torch.Tensor], counted: torch.Tensor | None) -> None:
    """Count the tokens of all rows that `collate_rows` has put below each other; TRL counts the positions of one.

    Do nothing to any other Trainer or batch. A collective of the ranks that have a loss.
    """
    if counted is None or trainer.engine is None or trainer.engine.runs_whole_model or "attention_mask" in inputs:
        return
    own: Any = trainer
    if is_sft(type(trainer)) and own.model.training:
        missed = own.accelerator.gather_for_metrics(counted.sum() - inputs["position_ids"].size(1)).sum()
        own._total_train_tokens += missed.item()
        own._metrics["train"]["num_tokens"] = [own._total_train_tokens]


def share_metrics(trainer: EngineTrainer) -> None:
    """Give all ranks of a pipeline the metrics of an SFTTrainer; do nothing to any other. A collective."""
    if trainer.engine is None or trainer.engine.runs_whole_model or not is_sft(type(trainer)):
        return
    sft: Any = trainer
    mode = "train" if sft.model.training else "eval"
    # Only those of this mode: shared metrics of the other mode would stay here, and count as this rank's own.
    shared = _shared(sft._metrics[mode], sft._total_train_tokens)
    if shared is not None:
        metrics, sft._total_train_tokens = shared
        sft._metrics[mode].update(metrics)


def _shared(metrics: dict[str, list[float]], num_tokens: float) -> tuple[dict[str, list[float]], float] | None:
    """Give all ranks the metrics that the last stages have made beside the loss, so that rank 0 can log them.

    All ranks call it. None: no rank has any.
    """
    # Those of several last stages are equal, since they were gathered among them.
    found = next((rank for rank in gather_json([metrics, num_tokens]) if rank[0]), None)
    if found is None:
        return None
    metrics, num_tokens = found
    # A micro batch of nothing but padding has no target, and was given zeros.
    counts = [entropy > 0 for entropy in metrics.get("entropy", ())]
    same = {k: list(compress(v, counts)) if len(v) == len(counts) else v for k, v in metrics.items()}
    return same, num_tokens
