"""The model of a pipeline as transformers' `generate` calls it: whole, on each rank.

Its forward goes through all stages, and each stage keeps keys and values of its own blocks. A model asks its cache how
many tokens it has, by the first layer or by the first one with a window, and makes masks and positions of the answer.
So in the cache of a stage the layers of other blocks have keys, too: a single NaN a token.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from hfdist.pipeline.stage_module import StageModule, stand_in

CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
"""What forwards and their outputs call the cache: `cache` from transformers 5.24 on."""
RunStages = Callable[[Callable[[PreTrainedModel], CausalLMOutputWithPast]], list[CausalLMOutputWithPast]]
"""What calls the model -> its value on the rank of the last stage, else an empty list. All ranks call it."""
Broadcast = Callable[[torch.Tensor], torch.Tensor]
"""Gives all ranks the tensor that the rank of the last stage has; it has the same shape on the others."""


def make_whole(modules: Sequence[StageModule], run_stages: RunStages, broadcast: Broadcast) -> PreTrainedModel:
    """Give a model that shares all tensors with the stages, and whose `generate` all ranks of a pipeline call alike.

    It chooses the token of the highest score, as with `do_sample=False`; logits processors run on the last stage only.

    Args:
        modules: of this rank's stages, in order.
        run_stages: runs the stages of all ranks.
        broadcast: gives all ranks the tokens.
    """
    first, has_logits = modules[0].model, modules[-1].is_last
    forward = _Forward([module.model for module in modules], run_stages)
    # `generate` reads its signature.
    whole: Any = stand_in(first, functools.wraps(first.forward)(forward))

    def generate(*, logits_processor: LogitsProcessorList, **named: object) -> object:
        chosen: LogitsProcessor = _Chosen(logits_processor, broadcast, has_logits=has_logits)
        try:
            return type(whole).generate(whole, logits_processor=LogitsProcessorList([chosen]), **named)
        finally:
            forward.free()

    whole.generate = generate
    return whole


class _Forward:
    """The forward of the whole model on a rank with these stages."""

    def __init__(self, stages: Sequence[PreTrainedModel], run_stages: RunStages) -> None:
        self._stages, self._run_stages = stages, run_stages
        self._given: DynamicCache | None = None
        """Cache that `generate` gives: that of the first stage on this rank."""
        self._caches: dict[PreTrainedModel, DynamicCache] = {}

    def __call__(self, **inputs: Any) -> CausalLMOutputWithPast:
        given = inputs[CACHE]
        if given is not self._given:
            others = (copy.deepcopy(given) for _ in self._stages[1:])
            self._given, self._caches = given, dict(zip(self._stages, (given, *others), strict=True))
        values = self._run_stages(partial(self._call, inputs))
        logits = values[0].logits if values else inputs["input_ids"].new_zeros(len(inputs["input_ids"]), 1, 1)
        return CausalLMOutputWithPast(logits=logits, **{CACHE: given})

    def free(self) -> None:
        """Free all keys and values."""
        self._given, self._caches = None, {}

    def _call(self, inputs: dict[str, Any], stage: PreTrainedModel) -> CausalLMOutputWithPast:
        cache = self._caches[stage]
        num_before = cache.get_seq_length()
        try:
            return stage(**inputs | {CACHE: cache})
        finally:
            # Also where StageEnd ends the forward after the blocks of the stage.
            _count(cache, num_before, inputs["input_ids"])


def _count(cache: DynamicCache, num_before: int, tokens: torch.Tensor) -> None:
    """Let the layers of other blocks count the tokens of a forward."""
    # On the CPU: only its length is read, and what is not done on a GPU takes no time there.
    poison = torch.full((1, 1, tokens.shape[1], 1), torch.nan)
    layers: list[Any] = cache.layers
    for layer in layers:
        if layer.get_seq_length() == num_before:
            layer.update(poison, poison)


class _Chosen(LogitsProcessor):
    """Chooses the tokens where logits are, and gives all ranks scores by which they choose the same."""

    def __init__(self, processors: LogitsProcessorList, broadcast: Broadcast, *, has_logits: bool) -> None:
        self._processors, self._broadcast, self._has_logits = processors, broadcast, has_logits

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.Tensor:
        tokens = input_ids[:, -1]
        if self._has_logits:
            tokens = self._processors(input_ids, scores).argmax(-1)
        return torch.nn.functional.one_hot(self._broadcast(tokens))
