"""A small model of a type tells whether a pipeline can read images, and where its blocks and its costs are."""

import pytest

from hfdist.data.tokenization.image_tokens import ImageTokens
from hfdist.models.blocks import find_blocks
from hfdist.models.image_text import PROJECTOR, TOWER, names_of_parts, read_images
from hfdist.pipeline.costs import costs_by_flops, costs_by_parameters
from hfdist.pipeline.image_check import find_image_problem
from tests.image_models import FAMILIES, make_model, make_processor
from tests.marks import many


@pytest.mark.parametrize("family", ["qwen2_5_vl", *(many(family) for family in FAMILIES if family != "qwen2_5_vl")])
def test_stages_read_images_as_the_whole_model(family):
    processor = make_processor(family)
    assert find_image_problem(make_model(family, processor).config, ImageTokens(processor).example()) is None


def test_a_type_that_cannot_be_made_small_is_not_split():
    processor = make_processor("llava")
    batch = ImageTokens(processor).example()
    batch["pixel_values"] = batch["pixel_values"][:, :1]
    assert "cannot be tried" in find_image_problem(make_model("llava", processor).config, batch)


def test_blocks_are_those_that_write_and_what_reads_costs_the_first_stage():
    model = make_model("internvl", make_processor("internvl"))
    blocks = find_blocks(model)
    assert blocks is model.model.language_model.layers
    parts = names_of_parts(model)
    count = sum(model.get_parameter(name).numel() for name in (*parts[TOWER], *parts[PROJECTOR]))
    before = costs_by_parameters(model, list(zip(blocks)))
    read_images(model, unreached=())
    assert costs_by_parameters(model, list(zip(blocks))).prologue == before.prologue + count
    assert costs_by_flops(model, list(zip(blocks)), 16).prologue == 6 * count
