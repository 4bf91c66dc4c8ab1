"""A small model of a type tells whether a pipeline can read images, and where its blocks and its costs are."""

import pytest

from hfdist.data.packing.packed_images import make_trial
from hfdist.data.tokenization.image_tokens import ImageTokens
from hfdist.errors import PartitionError
from hfdist.models.blocks import find_blocks
from hfdist.models.image_text import PROJECTOR, TOWER, names_of_parts, read_images
from hfdist.models.image_trials import find_positions
from hfdist.pipeline.costs import costs_by_flops, costs_by_parameters
from hfdist.pipeline.image_check import find_features
from tests.image_models import FAMILIES, make_model, make_processor
from tests.marks import many


@pytest.mark.parametrize(
    ("family", "features"),
    [
        ("qwen2_5_vl", set()),
        # Added to the states after the first block, too.
        ("qwen3_vl", {"deepstack_features"}),
        *(many(family, set()) for family in FAMILIES if "qwen" not in family),
    ],
)
def test_stages_read_images_as_the_whole_model_and_the_least_travels(family, features):
    processor = make_processor(family)
    found = find_features(make_model(family, processor).config, [ImageTokens(processor).example()])
    assert found.features == features


@pytest.mark.parametrize("family", ["qwen3_vl", many("llava"), many("qwen2_5_vl")])
def test_packed_rows_are_tried_too(family):
    processor = make_processor(family)
    config = make_model(family, processor).config
    images = ImageTokens(processor, find_positions(config))
    packed = make_trial(images).packed
    found = find_features(config, [images.example(), packed])
    assert found.features == find_features(config, [images.example()]).features
    assert found.tensors.keys() == images.example().keys()
    # One position a token is missing.
    broken = packed | {"position_ids": packed["position_ids"][..., :-1]}
    with pytest.raises(PartitionError, match="on images"):
        find_features(config, [images.example(), broken])


def test_dropout_is_no_reason_to_refuse_a_type():
    processor = make_processor("llava")
    config = make_model("llava", processor).config
    config.get_text_config().attention_dropout = 0.5
    assert not find_features(config, [ImageTokens(processor).example()]).features


def test_a_type_that_cannot_be_tried_is_not_split():
    processor = make_processor("llava")
    batch = ImageTokens(processor).example()
    batch["pixel_values"] = batch["pixel_values"][:, :1]
    with pytest.raises(PartitionError, match="on images") as refused:
        find_features(make_model("llava", processor).config, [batch])
    assert "cannot be tried" in str(refused.value)


def test_blocks_are_those_that_write_and_what_reads_costs_the_first_stage():
    model = make_model("internvl", make_processor("internvl"))
    blocks = find_blocks(model)
    assert blocks is model.model.language_model.layers
    parts = names_of_parts(model)
    count = sum(model.get_parameter(name).numel() for name in (*parts[TOWER], *parts[PROJECTOR]))
    before = costs_by_parameters(model, list(zip(blocks, strict=True)))
    read_images(model, unreached=())
    assert costs_by_parameters(model, list(zip(blocks, strict=True))).prologue == before.prologue + count
    assert costs_by_flops(model, list(zip(blocks, strict=True)), 16).prologue == 6 * count
