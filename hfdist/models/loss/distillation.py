"""The loss of a student that learns from a teacher: the divergence of their distributions at each target.

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
"""Keys of a batch, each with an entry for each target: the teacher's K likeliest tokens, [rows, tokens, K], and their
log-probabilities, then that of all other tokens together, [rows, tokens, K + 1]."""


def token_logits(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    *,
    temperature: float = 1.0,
    of_images: Collection[str] = (),
) -> Logits:
    """Run a model, and give its logits for all tokens but the first of each row.

    Args:
        model: a causal language model, or one stage of it.
        batch: tensors of shape [rows, tokens], and of images.
        temperature: the logits are divided by it.
        of_images: names of tensors of images, which the forward takes where the batch has them.

    Returns:
        Logits of shape [rows, tokens - 1, vocabulary], which may be deferred.
    """
    names = ("input_ids", "position_ids", "attention_mask", *of_images)
    inputs = {name: batch[name] for name in names if name in batch}
    logits: Logits = model(**inputs, use_cache=False).logits[:, :-1]
    return logits if temperature == 1.0 else logits / temperature


@contextmanager
def asking(
    teacher: PreTrainedModel, batch: Mapping[str, torch.Tensor], *, temperature: float, beta: float
) -> Iterator[WholeRows]:
    """Run a frozen teacher, and give its distributions at all tokens but the first of each row, in this context.

    Its logits are never held whole where its head can defer them.

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
    """Give the bytes of a target of which the `count` likeliest tokens are kept."""
    # An id of 4 bytes and a log-probability of 4 bytes each; then the log-probability of all other tokens.
    return 8 * count + 4


def top_rows(batch: Mapping[str, torch.Tensor], *, beta: float) -> TopRows:
    """Give the teacher's distributions that a batch holds, at all tokens but the first of each row.

    Args:
        batch: has the tensors of the keys `TOP_IDS` and `TOP_LOGS`.
        beta: which divergence, from 0 to 1: see `divergences_and_gradient`.
    """
    ids = batch[TOP_IDS][:, 1:].flatten(0, 1)
    log_probabilities = batch[TOP_LOGS][:, 1:].flatten(0, 1)
    return TopRows(ids, log_probabilities, beta)


def sum_from_teacher(
    head: LossHead | None,
    student: nn.Module,
    batch: Mapping[str, torch.Tensor],
    teacher: AbstractContextManager[TeacherRows],
    *,
    temperature: float,
) -> torch.Tensor:
    """Run the student and the teacher, and sum the divergences at the targets of a batch, in nats.

    Args:
        head: computes the loss without whole logits; None: the loss is computed from all logits.
        student: the model that is trained, perhaps one stage of it.
        batch: tensors of shape [rows, tokens].
        teacher: a context that gives the teacher's distributions; it is entered after the student has run.
        temperature: what the student's logits are divided by.
    """
    with nullcontext() if head is None else head.deferring(student):
        logits = token_logits(student, batch, temperature=temperature)
        # Second: in a pipeline, the model ends the call on each stage but the last, and these need no teacher.
        with teacher as rows:
            return sum_divergences(logits, rows, batch["labels"][:, 1:], ignore_index=IGNORED)


def _no_loss(rows: DeferredRows) -> torch.Tensor:
    raise AssertionError("a teacher has no loss")
