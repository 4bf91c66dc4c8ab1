"""The loss of a student that learns from a teacher: how far its distribution is at each target.

A teacher is a model that runs beside the student, or its likeliest tokens, which come with the batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from hfdist.config.batch import IGNORED
from hfdist.models.loss.choose import LossHead
from hfdist.models.loss.deferred_rows import DeferredRows
from hfdist.models.loss.lazy_logits import Logits, deferring, sum_divergences, teacher_rows
from hfdist.models.loss.teacher_rows import TeacherRows, TopRows, WholeRows

TOP_IDS, TOP_LOGS = "teacher_ids", "teacher_log_probabilities"
"""Keys of a batch: at each target, the teacher's likeliest tokens and their log-probabilities, and the one of all other
tokens together; shapes [rows, tokens, K] and [rows, tokens, K + 1]."""


def token_logits(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    *,
    temperature: float = 1.0,
    of_images: Collection[str] = (),
) -> Logits:
    """Run the model, and give what it predicts for all tokens but the first of each row, divided by `temperature`.

    `of_images`: names of what the forward takes besides, where the batch has it.
    """
    names = ("input_ids", "position_ids", "attention_mask", *of_images)
    inputs = {name: batch[name] for name in names if name in batch}
    logits: Logits = model(**inputs, use_cache=False).logits[:, :-1]
    return logits if temperature == 1.0 else logits / temperature


@contextmanager
def asking(
    teacher: PreTrainedModel, batch: Mapping[str, torch.Tensor], *, temperature: float, beta: float
) -> Iterator[WholeRows]:
    """Run a frozen teacher; give what it says of all tokens but the first of each row. Its logits need not be whole.

    Args:
        teacher: a causal language model of transformers, whole or sharded by FSDP2.
        batch: tensors of shape [rows, tokens].
        temperature: what logits are divided by.
        beta: which divergence, from 0 to 1: see `divergences_and_gradient`.
    """
    # Any: transformers says of an embedding that it is a module or a tensor.
    head: Any = teacher.get_output_embeddings()
    vocabulary = getattr(head, "out_features", None)
    with nullcontext() if vocabulary is None else deferring(head, vocabulary, _no_loss):
        with torch.no_grad():
            logits = token_logits(teacher, batch, temperature=temperature)
        yield teacher_rows(logits, beta=beta)
    if isinstance(teacher, FSDPModule):
        # FSDP2 keeps what is in no block, embeddings and head, for a backward, and a teacher has none.
        teacher.reshard()


def top_bytes(count: int) -> int:
    """Give the bytes that a target takes of which the `count` likeliest tokens are kept."""
    return 8 * count + 4


def top_rows(batch: Mapping[str, torch.Tensor], *, beta: float) -> TopRows:
    """Give what a batch says of the teacher, for all tokens but the first of each row."""
    ids, logs = (batch[name][:, 1:].flatten(0, 1) for name in (TOP_IDS, TOP_LOGS))
    return TopRows(ids, logs, beta)


def sum_from_teacher(
    head: LossHead | None,
    student: nn.Module,
    batch: Mapping[str, torch.Tensor],
    teacher: AbstractContextManager[TeacherRows],
    *,
    temperature: float,
) -> torch.Tensor:
    """Sum the divergences at the targets of a batch.

    Args:
        head: computes losses without whole logits; None: from all of them.
        student: the model that is trained, perhaps one stage of it.
        batch: tensors of shape [rows, tokens].
        teacher: gives what the teacher says, after the student has run.
        temperature: what the student's logits are divided by.
    """
    with nullcontext() if head is None else head.deferring(student):
        logits = token_logits(student, batch, temperature=temperature)
        # Second: in a pipeline, the model ends the call on each stage but the last, and these need no teacher.
        with teacher as rows:
            return sum_divergences(logits, rows, batch["labels"][:, 1:], ignore_index=IGNORED)


def _no_loss(rows: DeferredRows) -> torch.Tensor:
    raise AssertionError("a teacher has no loss")
