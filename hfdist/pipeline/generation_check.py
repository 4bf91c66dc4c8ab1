"""Before a pipeline's first generation: do stages with caches of their own blocks write as the whole model?

Models whose blocks need more from others than hidden states do not: those that share keys and values between blocks.
"""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from hfdist.models.cache_check import find_cache_problem
from hfdist.pipeline.split import run_in_turn, stages_of_one_block
from hfdist.pipeline.stage_io import CARRIES
from hfdist.pipeline.whole_model import make_whole


def find_generation_problem(model: PreTrainedModel) -> str | None:
    """Say why stages with caches of their own do not write as the whole model; None: they do.

    Asked of a small model of the type, each of whose blocks is a stage on this rank, so all ranks find the same.
    """
    return find_cache_problem(model, _in_stages)


def _in_stages(small: PreTrainedModel) -> PreTrainedModel:
    stages = stages_of_one_block(small, CARRIES[0])

    def run(call: Callable[[PreTrainedModel], CausalLMOutputWithPast]) -> list[CausalLMOutputWithPast]:
        return [run_in_turn(stages, call)]

    return make_whole(stages, run, broadcast=lambda tokens: tokens)
