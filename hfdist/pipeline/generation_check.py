"""Before the first generation: does a small model of the class write in stages what it writes whole?

Models whose blocks need more from others than hidden states and the number of tokens do not: those that share keys
and values between blocks, and those that keep something else in their caches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from hfdist.errors import first_line
from hfdist.models.blocks import find_block_parts
from hfdist.models.document_attention import dense_name
from hfdist.models.probing import small_model
from hfdist.pipeline.split import split_at_blocks
from hfdist.pipeline.stage_io import CARRIES
from hfdist.pipeline.whole_model import make_whole

BOUND = 1e-5
"""The largest difference of logits that is allowed, relative to the largest one: the operations are the same."""

_NUM_TOKENS, _NUM_NEW_TOKENS, _NUM_PADDING = 7, 12, 3
"""Numbers of tokens that are chosen so that windows of small models end among them."""


def find_generation_problem(model: PreTrainedModel) -> str | None:
    """Say why stages with caches of their own cannot write as the whole model does; None: they can.

    A stage for each block of the small model. It takes a second or less, and the same comes of it on all ranks.

    Args:
        model: any, of which the class and the config are read.
    """
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            # torch.manual_seed would seed GPUs, too, which are not set back.
            torch.default_generator.manual_seed(0)
            difference = _compare(model)
    except Exception as error:  # whatever a model raises that cannot be made small, or split, or has no such cache
        return f"a small model of it cannot be tried: {first_line(error)}"
    # Not the other way around: a difference of NaN is no agreement.
    return None if difference <= BOUND else f"logits differ by {difference:.0e}"


def _compare(model: PreTrainedModel) -> float:
    small = small_model(model)
    if dense_name(model.config._attn_implementation) == "sdpa":
        small.set_attn_implementation("sdpa")
    for parameter in small.parameters():
        # Else rounding would hide what is wrong.
        parameter.add_(0.1 * torch.randn(parameter.shape))
    vocab_size = small.config.get_text_config(decoder=True).vocab_size
    tokens = torch.randint(min(vocab_size, 100), (2, _NUM_TOKENS + _NUM_NEW_TOKENS))
    reference = _write(small, tokens)
    blocks = find_block_parts(small)
    split = split_at_blocks(small, blocks, tuple(range(i, i + 1) for i in range(len(blocks))), range(len(blocks)))
    stages = [split.stage_module(stage, CARRIES[0]) for stage in split.mine]

    def run(call: Callable[[PreTrainedModel], CausalLMOutputWithPast]) -> list[CausalLMOutputWithPast]:
        value = stages[0].run(call, None)
        for stage in stages[1:]:
            value = stage.run(call, value)
        return [value]

    found = _write(make_whole(stages, run, broadcast=lambda tokens: tokens), tokens)
    return float((found - reference).abs().max() / reference.abs().max())


class _Given(LogitsProcessor):
    """Chooses given tokens, and keeps the logits."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self._tokens = tokens
        self.logits: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.logits.append(scores)
        return torch.nn.functional.one_hot(self._tokens[:, input_ids.shape[1]])


def _write(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Give the logits of each new token; the second row is shorter than the first."""
    mask = torch.ones_like(tokens[:, :_NUM_TOKENS])
    mask[1, :_NUM_PADDING] = 0
    given = _Given(tokens)
    generate: Any = model.generate
    model.generation_config = GenerationConfig()
    generate(
        input_ids=tokens[:, :_NUM_TOKENS],
        attention_mask=mask,
        generation_config=GenerationConfig(max_new_tokens=_NUM_NEW_TOKENS, use_cache=True, do_sample=False),
        logits_processor=LogitsProcessorList([given]),
    )
    return torch.stack(given.logits)
