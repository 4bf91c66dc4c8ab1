"""Every type, over the ranks of each axis, trains exactly as the whole model, or is refused before it trains."""

from functools import partial

import pytest

from hfdist.config.strategy import ContextMethod
from hfdist.strategies import fsdp_units
from hfdist.testing import run_ranks
from tests.zoo import splitting
from tests.zoo.conftest import is_of_all
from tests.zoo.models import SHARDED_SAMPLE, TYPES
from tests.zoo.sharding import expert_types, shard_types, share_types, stage_types, tensor_types

pytestmark = [pytest.mark.zoo, pytest.mark.distributed]

AXES = {
    "fsdp2": shard_types,
    "tensor": tensor_types,
    "context": partial(share_types, method=ContextMethod.auto),
    "expert": expert_types,
    "pipeline": stage_types,
}
REFUSED = {
    "fsdp2": set(),
    "pipeline": {*splitting.REFUSED, "git", "musicgen", "musicgen_melody"},
    # Types of which no small model can be made, or one that trains on text alone and in evaluation mode.
    "tensor": {"gemma3n", "git", "musicgen", "musicgen_melody", "reformer", "zamba", "zamba2"},
}
"""The only types that may be refused."""
EXACT = {
    # Of the sample: those whose tokens meet in attention alone, and those with experts.
    "context": {"cohere2", "deepseek_v3", "gemma2", "gemma3n_text", "gemma4_text", "gpt2", "gpt_oss", "llama",
                "mixtral", "qwen3", "roberta"},
    "expert": {"deepseek_v3", "gpt_oss", "mixtral"},
}  # fmt: skip
"""Types that must not be refused; most others are."""


def problem(axis, model_type, outcome):
    """What is wrong with it, if anything."""
    if outcome.verdict == "wrong":
        return "it trains otherwise"
    if axis in REFUSED:
        was_refused = outcome.verdict == "refused"
        return "" if was_refused == (model_type in REFUSED[axis]) else "refused, or not refused"
    return "" if outcome.verdict == "exact" or model_type not in EXACT[axis] else "not exact"


@pytest.mark.timeout(1900)
@pytest.mark.parametrize("axis", AXES)
def test_a_sharded_model_trains_as_the_whole(axis, request):
    types = TYPES if is_of_all(request.config) else SHARDED_SAMPLE[axis]
    of_ranks = run_ranks(AXES[axis], 2, types, timeout_seconds=1800)
    found = [(name, problem(axis, name, of_rank[name]), of_rank[name]) for of_rank in of_ranks for name in types]
    assert not [one for one in found if one[1]]


def test_a_block_that_is_left_out_of_the_reduction_shows():
    """The test of the test."""
    assert run_ranks(shard_without_reduction, 2)[0].verdict == "wrong"


def shard_without_reduction():
    make = fsdp_units.fully_shard

    def fully_shard(module, **options):
        sharded = make(module, **options)
        if "Block" in type(module).__name__:
            sharded.set_requires_gradient_sync(False)
        return sharded

    fsdp_units.fully_shard = fully_shard
    return shard_types(["gpt2"])["gpt2"]
