"""Masked language models: some tokens of a document are hidden, and an encoder learns which they were (BERT).

    document      the cat sees a bird </s>      drawn by (seed, document, epoch)
    hidden        .   x   .    . x    -         a share `mlm_probability` of all tokens but special ones
    model reads   the [M] sees a dog  </s>      of them 80 % are the mask token, 10 % any token, 10 % as they were
    labels        .   cat .    . bird .         the loss is their mean over the global batch

As transformers' DataCollatorForLanguageModeling has it (Devlin et al., 2018, arXiv 1810.04805).
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hfdist.config.batch import IGNORED
from hfdist.config.task import TaskConfig
from hfdist.errors import ConfigError
from hfdist.models.positions import padding_id
from hfdist.models.target_loss import sum_hidden_losses
from hfdist.strategies.engine import Batch
from hfdist.trainer.training import Training
from hfdist.tune.drawn_documents import Ids, drawn_documents
from hfdist.tune.token_loss import TokenLoss


def check_mask_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Give the token that hides others; ConfigError: the tokenizer has none."""
    if tokenizer.mask_token_id is None:
        raise ConfigError(
            "the tokenizer has no mask token, which hides tokens from the model",
            where="model.tokenizer.name",
            found=tokenizer.name_or_path or type(tokenizer).__name__,
            allowed="a tokenizer with a `mask_token`",
            hint="set `mask_token` in its tokenizer_config.json, or a tokenizer such as that of bert-base-uncased",
        )
    return int(tokenizer.mask_token_id)


class MaskedTokens(TokenLoss):
    """The objective of masked language models; its items are hidden tokens.

    Args:
        task: `task.*` of the run.
        seed: of the masks.
        tokenizer: has a mask token.
    """

    def __init__(self, task: TaskConfig, seed: int, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__()
        self._task, self._seed, self._mask_id = task, seed, check_mask_token(tokenizer)
        self._vocab_size, self._special = len(tokenizer), np.array(tokenizer.all_special_ids)
        self._padding = 0

    def begin(self, training: Training) -> None:
        """See `Objective.begin`."""
        super().begin(training)
        # Some types of models find positions by the padding token.
        self._padding = padding_id(cast(PreTrainedModel, training.model)) or 0

    def prepare(self, batch: Batch) -> Batch:
        """Hide tokens; each document, or piece of one, becomes a row of its own, in which it sees no other."""
        drawn = [self.hide(ids, generator) for ids, generator in drawn_documents(batch, self._seed)]
        # A batch of nothing is read, too, as ranks take part in each forward.
        rows = drawn or [(np.zeros(1, dtype=np.int64), np.full(1, IGNORED))]
        inputs, labels = ([torch.from_numpy(row) for row in side] for side in zip(*rows, strict=True))
        return {
            "input_ids": pad_sequence(inputs, batch_first=True, padding_value=self._padding),
            "attention_mask": pad_sequence([torch.ones_like(row) for row in inputs], batch_first=True),
            "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED),
        }

    def hide(self, ids: Ids, generator: np.random.Generator) -> tuple[Ids, Ids]:
        """Give what the model reads of a document, and its labels; each of shape [tokens]."""
        task = self._task
        is_hidden = (generator.random(len(ids)) < task.mlm_probability) & ~np.isin(ids, self._special)
        how, others = generator.random(len(ids)), generator.integers(self._vocab_size, size=len(ids))
        is_masked = is_hidden & (how < task.mask_replace_prob)
        is_random = is_hidden & ~is_masked & (how < task.mask_replace_prob + task.random_replace_prob)
        read = np.where(is_masked, self._mask_id, np.where(is_random, others, ids))
        return read, np.where(is_hidden, ids, IGNORED)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Sum the losses of hidden tokens."""
        return sum_hidden_losses(model, batch)
