"""Every type is sharded over tensor and over expert ranks exactly, or refused before it trains."""

import pytest

from hfdist.testing import run_ranks
from tests.zoo.tensor_parallel import expert_types, tensor_types

pytestmark = [pytest.mark.zoo, pytest.mark.distributed]

REFUSED = {"gemma3n", "git", "musicgen", "musicgen_melody", "reformer", "zamba", "zamba2"}
"""Types of which no small model can be made, or one that trains on text alone and in evaluation mode."""


@pytest.fixture(scope="module")
def outcomes(types):
    return run_ranks(tensor_types, 2, types, timeout_seconds=1800)


@pytest.mark.timeout(1900)
def test_a_model_that_is_cut_trains_as_the_whole(outcomes, model_type):
    for outcome in (of_rank[model_type] for of_rank in outcomes):
        assert outcome.verdict == ("refused" if model_type in REFUSED else "exact"), outcome


EXPERTS = ("deepseek_v3", "gpt_oss", "mixtral")
"""Of the sample: those with experts."""


@pytest.fixture(scope="module")
def expert_outcomes(types):
    return run_ranks(expert_types, 2, types, timeout_seconds=1800)


@pytest.mark.timeout(1900)
def test_a_model_whose_experts_are_spread_trains_as_the_whole(expert_outcomes, model_type):
    for outcome in (of_rank[model_type] for of_rank in expert_outcomes):
        assert outcome.verdict != "wrong", outcome
        assert outcome.verdict == "exact" or model_type not in EXPERTS, outcome
