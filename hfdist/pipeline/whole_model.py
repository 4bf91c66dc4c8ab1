"""The model of a pipeline as a generation calls it: whole, on each rank.

Its forward goes through all stages. A cache counts the tokens of all blocks, and has the keys and values of this
rank's blocks alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from hfdist.pipeline.stage_module import StageModule, stand_in

RunStages = Callable[[Callable[[PreTrainedModel], CausalLMOutputWithPast]], list[CausalLMOutputWithPast]]
"""What calls the model -> its value on the rank of the last stage, else an empty list. All ranks call it."""
Broadcast = Callable[[torch.Tensor], torch.Tensor]
"""Gives all ranks the tensor that the rank of the last stage has; it has the same shape on the others."""


def make_whole(modules: Sequence[StageModule], run_stages: RunStages, broadcast: Broadcast) -> PreTrainedModel:
    """Give a model that shares all tensors with the stages, and that all ranks of a pipeline call alike.

    Only the rank of the last stage has its logits. The others get zeros, for a vocabulary of one token, and learn what
    has been chosen by `share_tokens`.

    Args:
        modules: this rank's stages, in order.
        run_stages: runs the stages of all ranks.
        broadcast: what the model has as `share_tokens`: gives all ranks the tokens that the last one has chosen.
    """
    first = modules[0].model

    # Callers read its signature.
    @functools.wraps(first.forward)
    def forward(**inputs: Any) -> CausalLMOutputWithPast:
        values = run_stages(lambda stage: stage(**inputs))
        none = inputs["input_ids"].new_zeros(len(inputs["input_ids"]), 1, 1)
        return CausalLMOutputWithPast(logits=values[0].logits if values else none)

    whole = stand_in(first, forward)
    vars(whole)["share_tokens"] = broadcast
    return whole
