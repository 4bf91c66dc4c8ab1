"""Every type trains under FSDP2 exactly as the whole model; ranks share sequences exactly, or refuse to."""

import pytest

from hfdist.config.strategy import ContextMethod
from hfdist.strategies import fsdp
from hfdist.testing import run_ranks
from tests.zoo.sharding import shard_types, share_types

pytestmark = [pytest.mark.zoo, pytest.mark.distributed]

REFUSED: dict[str, str] = {}
"""The only types that may be refused, and with what reason."""


@pytest.fixture(scope="module")
def outcomes(types):
    return run_ranks(shard_types, 2, types, timeout_seconds=1200)


@pytest.mark.timeout(1300)
def test_a_sharded_model_trains_as_the_whole(outcomes, model_type):
    for outcome in (of_rank[model_type] for of_rank in outcomes):
        if model_type in REFUSED:
            assert REFUSED[model_type] in outcome.reason
        else:
            assert outcome.verdict == "exact", outcome


@pytest.fixture(scope="module")
def shared(types):
    return run_ranks(share_types, 2, types, ContextMethod.auto, timeout_seconds=1200)


SHARED = (
    "cohere2",
    "deepseek_v3",
    "gemma2",
    "gemma3n_text",
    "gemma4_text",
    "gpt2",
    "gpt_oss",
    "llama",
    "mixtral",
    "qwen3",
)
"""Of the sample: those whose tokens meet in attention alone."""


@pytest.mark.timeout(1300)
def test_ranks_that_share_sequences_train_as_one(shared, model_type):
    for outcome in (of_rank[model_type] for of_rank in shared):
        assert outcome.verdict != "wrong", outcome
        assert outcome.verdict == "exact" or model_type not in SHARED, outcome


def test_a_block_that_is_left_out_of_the_reduction_shows():
    """The test of the test."""
    assert run_ranks(shard_without_reduction, 2)[0].verdict == "wrong"


def shard_without_reduction():
    make = fsdp.fully_shard

    def fully_shard(module, **options):
        make(module, **options)
        if "Block" in type(module).__name__:
            module.set_requires_gradient_sync(False)

    fsdp.fully_shard = fully_shard
    return shard_types(["gpt2"])["gpt2"]
