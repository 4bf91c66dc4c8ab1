"""The batches that a traced step reads, with real token ids, and the loss that it computes of them.

Rows have the sizes that `row_sizes` gives. In a micro batch of several rows one is a little shorter, so that there is
a mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import nn

# Not public; see fake_ranks.py.
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from transformers import PreTrainedModel

from hfdist.config.batch import IGNORED
from hfdist.config.data import Packing
from hfdist.config.run import RunConfig
from hfdist.config.task import Head, Pooling, TaskConfig, TaskLoss
from hfdist.models.encoders import takes_texts_apart
from hfdist.models.loss import LossHead
from hfdist.models.loss.distillation import TOP_IDS, TOP_LOGS
from hfdist.models.loss.embedding_losses import NEGATIVE, POSITIVE, QUERY, Texts, losses_of
from hfdist.models.pooling import TextTokens, pool_texts
from hfdist.models.target_loss import sum_hidden_losses, sum_target_losses
from hfdist.models.texts_apart import TextsApart
from hfdist.planning.row_sizes import row_sizes
from hfdist.planning.tracing.fake_teacher import Teaching
from hfdist.strategies.engine import Batch

SHORT_DOCUMENT = 2
"""Number of tokens of the second document in each traced sequence; one padded row is shorter by as many."""


class FakeTask:
    """The batches and the loss of a traced step.

    Args:
        config: the run's config.
        model: the model on fake tensors, whole or one rank's part.
        loss_head: the loss head of the run, which computes logits in chunks; None: all logits are computed at once.
        teaching: the loss of a distillation; None: the run is none.
    """

    def __init__(
        self, config: RunConfig, model: PreTrainedModel, loss_head: LossHead | None, teaching: Teaching | None
    ) -> None:
        self._config, self._loss_head, self._teaching = config, loss_head, teaching
        self._head = config.task.name.traits.head
        is_apart = takes_texts_apart(model, self._head)
        self.sizes = row_sizes(config, is_apart=is_apart)
        """Rows and tokens that a forward reads of a sequence."""
        self._is_apart = is_apart and self._head is Head.none
        pooling = config.task.pooling
        self._pooling = (Pooling.mean if is_apart else Pooling.last) if pooling is Pooling.auto else pooling
        self._width = model.config.get_text_config().hidden_size if self._head is Head.none else 0
        parameters = inspect.signature(type(model).forward).parameters.values()
        self._takes_counts = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)

    # ---- what is read ----

    @unset_fake_temporarily()
    def batch(self, num_sequences: int, *, is_alone: bool = False) -> Batch:
        """Make a batch of real token ids and labels; with those of a teacher that are kept on disk.

        Args:
            num_sequences: number of sequences, as `train.micro_batch_size` counts them.
            is_alone: whether each row of next tokens is one document, without a mask.
        """
        if self._head in (Head.tokens, Head.score, Head.none):
            return self._packed(num_sequences, is_alone=is_alone)
        sizes = self.sizes
        ids = torch.zeros(num_sequences * sizes.rows, sizes.tokens, dtype=torch.int64)
        mask = torch.ones_like(ids)
        if len(ids) > 1 and sizes.tokens > SHORT_DOCUMENT:
            mask[0, -SHORT_DOCUMENT:] = 0
        return {"input_ids": ids, "attention_mask": mask, "labels": self._labels(ids)}

    def _labels(self, ids: torch.Tensor) -> torch.Tensor:
        if self._head is Head.targets:
            return ids.new_zeros(len(ids), self.sizes.targets)
        if self._head is Head.labels:
            return ids[:, 0].clone()
        if self._head is Head.masked:
            every = max(1, round(1 / self._config.task.mlm_probability))
            return torch.where(torch.arange(ids.shape[1]) % every == 0, ids, IGNORED)
        return ids.clone()

    def _packed(self, num_sequences: int, *, is_alone: bool) -> Batch:
        """Without packing a document a sequence, else another of two tokens after it; or the texts of a sequence.

        Nothing is known of the run's documents. Longer ones hold more: attention with dropout or soft caps keeps scores
        of tokens x tokens. A second one makes borders, or a mask.
        """
        shape = num_sequences, self._config.data.sequence_length
        ids, kept = torch.zeros(shape, dtype=torch.int64), _make_kept(self._config.task, shape)
        if is_alone and self._head is Head.tokens:
            return {"input_ids": ids, "labels": ids, **kept}
        if self._config.data.packing is Packing.none and self._head is Head.tokens:
            return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids), **kept}
        positions, start = torch.arange(shape[1]).repeat(shape[0], 1), max(shape[1] - SHORT_DOCUMENT, 1)
        if self._head is Head.none:
            positions, start = positions % self.sizes.text_tokens, self.sizes.texts * self.sizes.text_tokens
            positions[:, start:] = torch.arange(shape[1] - start)
        else:
            positions[:, start:] -= start
        return {"input_ids": ids, "labels": ids.masked_fill(positions == 0, IGNORED), "position_ids": positions, **kept}

    def count(self, batch: Batch) -> torch.Tensor:
        """Count the targets of a batch, over which the loss is a mean."""
        labels = batch["labels"]
        return ((labels[:, 1:] if self._head is Head.tokens else labels) != IGNORED).sum()

    def teacher_tensors(self) -> Iterator[torch.Tensor]:
        """Give the weights and buffers of a teacher, as this rank holds them."""
        return iter(()) if self._teaching is None else self._teaching.tensors()

    # ---- what is computed ----

    def loss(self, prepared: nn.Module, batch: Batch, num_items: torch.Tensor | None) -> torch.Tensor:
        """Give the loss of a micro batch, a scalar, as the Trainer computes it.

        Args:
            prepared: the model as the engine gives it, or one stage of a pipeline.
            batch: a batch that `batch` has made.
            num_items: number of targets by which the sum of the losses is divided, a scalar; None: it is not divided.
        """
        if self._head is Head.tokens and self._teaching is None:
            named = {"num_items_in_batch": num_items} if self._takes_counts else {}
            with nullcontext() if self._loss_head is None else self._loss_head.deferring(prepared):
                return cast(torch.Tensor, prepared(**batch, **named).loss)
        return self._sum(prepared, batch) / (1 if num_items is None else num_items)

    def _sum(self, prepared: nn.Module, batch: Batch) -> torch.Tensor:
        match self._head:
            case Head.tokens:
                assert self._teaching is not None
                return self._teaching.loss(self._loss_head, prepared, batch)
            case Head.masked:
                return sum_hidden_losses(prepared, batch)
            case Head.targets:
                return sum_target_losses(prepared, batch)
            case Head.none:
                embeddings = self._embed(prepared, batch)
                gradients = torch.empty(1, self._width).expand(embeddings.shape)
                return (embeddings * gradients).sum()
        names = ("input_ids", "position_ids") if self._head is Head.score else ("input_ids", "attention_mask")
        logits: torch.Tensor = prepared(**{name: batch[name] for name in names})[0].float()
        if logits.shape[-1] == 1:
            return binary_cross_entropy_with_logits(logits, torch.zeros_like(logits), reduction="sum")
        return cross_entropy(logits.flatten(0, -2), batch["labels"].flatten(), reduction="sum")

    def _embed(self, prepared: nn.Module, batch: Batch) -> torch.Tensor:
        """Give the embedding of each text; shape [texts, width], float32."""
        ids, positions = batch["input_ids"], batch["position_ids"]
        with unset_fake_temporarily():
            tokens, apart = self._places(positions)
        if apart is None:
            states = prepared(input_ids=ids, position_ids=positions, use_cache=False)[0].float().flatten(0, 1)
            return pool_texts(states, tokens, self._pooling)
        states = prepared(input_ids=apart.take_apart(ids), attention_mask=apart.mask)[0]
        return pool_texts(apart.put_back(states.float(), ids.numel()), tokens, self._pooling)

    def _places(self, positions: torch.Tensor) -> tuple[TextTokens, TextsApart | None]:
        """Find the places of the texts in a batch; and those in rows of their own, where each text gets one."""
        num_rows, length = positions.shape
        used, size = self.sizes.texts * self.sizes.text_tokens, self.sizes.text_tokens
        is_text = (torch.arange(length) < used).repeat(num_rows, 1)
        first = (torch.arange(num_rows)[:, None] * length + torch.arange(0, used, size)).flatten()
        of_token = (torch.arange(num_rows)[:, None] * self.sizes.texts + torch.arange(length) // size).flatten()
        of_token = of_token.masked_fill(~is_text.flatten(), len(first))
        apart = TextsApart.of(positions == 0, is_text) if self._is_apart else None
        return TextTokens(first, first + size - 1, of_token), apart

    def compute_once(self) -> None:
        """Compute what comes once a step: the loss of all embeddings of the global batch, and their gradients.

        A run computes it before its first micro batch. A trace begins later, so it comes after the optimizer's step.
        Tasks without embeddings compute nothing here.
        """
        if self._head is not Head.none:
            return
        task, number = self._config.task, self.sizes.texts * self._config.train.global_batch_size
        with unset_fake_temporarily():
            # Only a negative gives a query of `triplet` a loss.
            of_query = [QUERY, POSITIVE, *([NEGATIVE] if task.loss is TaskLoss.triplet else [])]
            kinds = torch.tensor(of_query).repeat(max(1, number // len(of_query)))
            numbers = torch.arange(len(kinds)) if task.mask_duplicates else None
            scores = torch.arange(float((kinds == QUERY).sum())) if task.loss is TaskLoss.cosent else None
        embeddings: Any = torch.empty(len(kinds), self._width).requires_grad_()
        losses = losses_of(Texts(embeddings, kinds, numbers, scores), task)
        torch.autograd.grad(losses.sum(), embeddings)


def _make_kept(task: TaskConfig, shape: tuple[int, int]) -> Batch:
    """Make the teacher's likeliest tokens, as they are kept on disk, for `shape` tokens; empty: the run keeps none."""
    count = task.teacher_top_k
    if count is None:
        return {}
    # One number, expanded to all tokens: real ones of so many tokens may be gigabytes.
    ids, logs = torch.zeros(count, dtype=torch.int32), torch.zeros(count + 1)
    return {TOP_IDS: ids.expand(*shape, count), TOP_LOGS: logs.expand(*shape, count + 1)}
