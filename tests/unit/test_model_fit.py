"""A layout that does not divide a model is refused before a process is started."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.falcon.modeling_falcon import FalconLinear

from hfdist.config.composition.compose import compose_config
from hfdist.errors import ConfigError
from hfdist.strategies.model_fit import check_model_fits
from hfdist.strategies.tensor.linear import split_dimensions

SMALL = ("train.global_batch_size=8", "train.micro_batch_size=1", "model.config.num_hidden_layers=4")


@pytest.mark.parametrize(
    ("processes", "override", "where"),
    [
        (8, "strategy.pipeline=8", "strategy.pipeline, strategy.stages_per_rank"),
        (2, "strategy={pipeline: 2, blocks_per_stage: [1,2]}", "strategy.blocks_per_stage"),
        (5, "strategy={context: 5, context_method: ulysses}", "strategy.context, strategy.context_method"),
        (2, "strategy={data: null, expert: 2}", "strategy.expert"),
    ],
)
def test_what_does_not_divide_is_found_on_the_shape_alone(processes, override, where):
    key, _, value = override.partition("=")
    words = (
        [f"{key}.{part.replace(': ', '=')}" for part in value.strip("{}").split(", ")] if "{" in value else [override]
    )
    config = compose_config(["model=tiny", "data.sequence_length=400", *SMALL, "data.lanes=40", *words])
    with pytest.raises(ConfigError) as caught:
        check_model_fits(config, processes)
    assert caught.value.where == where


def test_a_refusal_of_shared_tokens_says_how_to_go_on_with_tensor_ranks():
    words = ["model=tiny", *SMALL, "data.lanes=42", "strategy.tensor=3"]
    with pytest.raises(ConfigError) as caught:
        # Which does not divide the heads.
        check_model_fits(compose_config([*words, "strategy.sequence=true"]), 3)
    assert (caught.value.where, caught.value.hint) == ("strategy.sequence", "strategy.sequence=false")
    check_model_fits(compose_config([*words, caught.value.hint]), 3)


def test_a_layout_that_divides_passes_and_a_model_of_the_hub_is_left_to_the_ranks():
    check_model_fits(compose_config(["model=tiny", "strategy.pipeline=2"]), 2)
    check_model_fits(compose_config(["model=hub", "model.name=owner/model", "strategy.pipeline=2"]), 2)


@pytest.mark.parametrize(
    "values", [torch.device("cpu"), torch.device("meta"), FakeTensorMode()], ids=["cpu", "meta", "fake"]
)
def test_a_subclass_that_computes_a_linear_layer_is_divided_whatever_values_the_model_has(values):
    with values:
        layer = FalconLinear(128, 96, bias=True, dtype=torch.bfloat16)
        assert split_dimensions(layer, "colwise") == {"weight": 0, "bias": 0}
