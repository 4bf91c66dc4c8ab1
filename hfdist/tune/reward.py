"""Reward models: a layer scores the last token of an answer, and a chosen answer should score above a rejected one.

loss = -log sigmoid(score(chosen) - score(rejected)), by the model of Bradley and Terry (1952)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import logsigmoid
from transformers import PreTrainedModel

from hfdist.config.task import SCORE
from hfdist.errors import ConfigError
from hfdist.strategies.engine import Batch
from hfdist.trainer.step.objective import Documents, Objective
from hfdist.tune.preference import are_pairs, next_of


class RewardPairs(Objective):
    """The objective of a reward model, which has one label. An item is a pair of answers."""

    names = ("margins", "accuracies")

    def count(self, batch: Batch) -> torch.Tensor:
        """Count the pairs of a batch."""
        return are_pairs(Documents.of(batch)).sum()

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Sum the losses of a batch's pairs."""
        documents = Documents.of(batch)
        scores = token_scores(model, batch).float()
        is_last = nn.functional.pad(documents.is_first[:, 1:], (0, 1), value=True)
        scores = documents.sum(torch.where(is_last, scores, 0))
        is_pair = are_pairs(documents)
        margins = torch.where(is_pair, scores - next_of(scores), 0)
        self._note(is_pair, {"margins": margins, "accuracies": (margins > 0).float()})
        return torch.where(is_pair, -logsigmoid(margins), 0).sum()


def find_scorer(model: PreTrainedModel) -> nn.Module:
    """Give the layer of a model that scores each token.

    Raises:
        ConfigError: the model has none; encoders have none, as they pool a text before they score it.
    """
    scorer = getattr(model, SCORE, None)
    if not isinstance(scorer, nn.Module):
        what = "the model has no layer `score`, which decoders for sequence classification have in transformers"
        hint = "a decoder, such as llama or qwen3; an encoder learns to order texts by hfdist rerank"
        raise ConfigError(what, where="model.name, model.type", found=type(model).__name__, hint=hint)
    return scorer


def token_scores(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Run a forward, and give the score at each token; shape [rows, tokens].

    The model itself gives the score of a row's last token only, so the output of its layer is taken.
    """
    # Wrappers of layouts have the model as `module`.
    base: Any = model
    while not isinstance(base, PreTrainedModel):
        base = base.module
    outputs: list[torch.Tensor] = []
    handle = find_scorer(base).register_forward_hook(lambda module, args, output: outputs.append(output))
    try:
        model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)
    finally:
        handle.remove()
    return outputs[0].squeeze(-1)
