"""The teacher of a distillation in a plan: a model without values, shared by ranks as in the run, and what it costs.

Where the teacher's likeliest tokens are kept on disk, no teacher runs: they come with the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

# Not public; see fake_ranks.py.
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from hfdist.config.run import RunConfig
from hfdist.config.task import TaskConfig
from hfdist.config.train import Precision
from hfdist.models.blocks import find_block_parts
from hfdist.models.flops import flops_per_token, measure_size
from hfdist.models.frozen import find_frozen
from hfdist.models.hub_client import reading_from_hub
from hfdist.models.loss import LossHead
from hfdist.models.loss.distillation import asking, sum_from_teacher, top_rows
from hfdist.models.loss.teacher_rows import TeacherRows, WholeRows
from hfdist.planning.tracing.fake_model import move_to_cpu
from hfdist.strategies.base import Strategy
from hfdist.strategies.engine import Batch
from hfdist.strategies.frozen import shard_frozen
from hfdist.strategies.traffic import FrozenSizes

_KEY = "task.teacher"
_PASSES = 3
"""Passes as `flops_per_token` counts them: a forward, and a backward of twice its work."""


@dataclass(frozen=True)
class Teaching:
    """The loss of a distillation, which a traced step computes in place of the loss of next tokens."""

    task: TaskConfig
    model: PreTrainedModel | None
    """The teacher; None: no teacher runs on this rank, or its likeliest tokens are kept on disk."""
    vocabulary: int = 0
    """Size of the vocabulary of a teacher whose costs are left out: logits of this width stand for its own. 0: there is
    no such teacher."""

    def tensors(self) -> Iterator[torch.Tensor]:
        """Give the teacher's weights and buffers, as this rank holds them."""
        if self.model is not None:
            yield from (*self.model.parameters(), *self.model.buffers())

    def loss(self, head: LossHead | None, student: nn.Module, batch: Batch) -> torch.Tensor:
        """Give the sum of the divergences from the teacher over the targets of a batch, a scalar."""
        return sum_from_teacher(head, student, batch, self._rows(batch), temperature=self.task.temperature)

    def _rows(self, batch: Batch) -> AbstractContextManager[TeacherRows]:
        beta, temperature = self.task.divergence_beta, self.task.temperature
        if self.task.teacher_top_k is not None:
            return nullcontext(top_rows(batch, beta=beta))
        if self.vocabulary:
            rows, vocabulary = batch["labels"][:, 1:].numel(), self.vocabulary
            given = torch.empty(rows, 1)
            return nullcontext(WholeRows(given, lambda part: part.new_empty(len(part), vocabulary), beta))
        # A pipeline's stages without a teacher end their calls before they ask it.
        return asking(cast(PreTrainedModel, self.model), batch, temperature=temperature, beta=beta)


def make_teaching(config: RunConfig, strategy: Strategy) -> Teaching | None:
    """Make the teacher as this rank holds it; None: the run has no teacher. Call it in a FakeTensorMode.

    Raises:
        ConfigError: the folder of `task.teacher` holds no causal language model.
    """
    if not config.task.name.traits.has_teacher:
        return None
    if config.task.teacher_top_k is not None or not strategy.computes_losses:
        return Teaching(config.task, None)
    with unset_fake_temporarily():
        model = _make_without_values(config)
    move_to_cpu(model)
    shard_frozen(model, strategy, config.task.teacher_sharding)
    return Teaching(config.task, model)


def teaching_without_teacher(config: RunConfig) -> Teaching | None:
    """Give the loss of a distillation alone, without what its teacher costs; None: the run has no teacher."""
    if not config.task.name.traits.has_teacher:
        return None
    with unset_fake_temporarily():
        return Teaching(config.task, None, _find_architecture(config).get_text_config().vocab_size)


def measure_teacher(config: RunConfig) -> FrozenSizes | None:
    """Measure a teacher that runs beside the student; None: there is none."""
    if not config.task.name.traits.has_teacher or config.task.teacher_top_k is not None:
        return None
    with unset_fake_temporarily():
        model = _make_without_values(config)
    blocks = [sum(p.nbytes for part in parts for p in part.parameters()) for parts in find_block_parts(model)]
    num_bytes, length = sum(p.nbytes for p in model.parameters()), config.data.sequence_length
    return FrozenSizes(
        weight_bytes=num_bytes,
        gathered_bytes=max(blocks) + num_bytes - sum(blocks),
        num_blocks=len(blocks),
        sequence_flops=flops_per_token(model.config, measure_size(model), length) * length / _PASSES,
        sharding=config.task.teacher_sharding,
    )


def _make_without_values(config: RunConfig) -> PreTrainedModel:
    path, precision, architecture = str(config.task.teacher), config.train.precision, _find_architecture(config)
    half = torch.float16 if precision is Precision.fp16 else torch.bfloat16
    dtype = torch.float32 if precision is Precision.fp32 else half
    with reading_from_hub(_KEY, path), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(architecture, dtype=dtype, trust_remote_code=False)
    return cast(PreTrainedModel, model.requires_grad_(False).eval())


def _find_architecture(config: RunConfig) -> PreTrainedConfig:
    allowed, hint = "the folder of a causal language model in safetensors", f"{_KEY}=RUN/model"
    return find_frozen(str(config.task.teacher), where=_KEY, allowed=allowed, hint=hint)
