"""How rows with images become sequences: as `data.packing` says, or as a small model computes the same."""

import logging

import pytest
from transformers import AutoConfig, AutoTokenizer

from hfdist.config.data import Packing
from hfdist.data import open_corpus
from hfdist.errors import ConfigError
from hfdist.run.images import find_images
from tests.distributed.image_runs import make_config, write_rows
from tests.image_models import save_model
from tests.zoo.image_models import make_model_and_processor, save


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows"), num_rows=4)


@pytest.fixture(scope="module")
def find(tmp_path_factory, rows, cache_dir):
    folder, models = tmp_path_factory.mktemp("models"), {}

    def find_of(family, *overrides):
        if family not in models:
            models[family] = save_model(family, folder / family)
        config = make_config(folder / "run", models[family], rows, *overrides)
        model = models[family]
        find_images(
            config, open_corpus(config.data), AutoConfig.from_pretrained(model), AutoTokenizer.from_pretrained(model)
        )
        return config.data

    return find_of


@pytest.mark.parametrize(
    ("family", "overrides", "packing"),
    [
        ("qwen2_5_vl", (), Packing.best_fit),
        # As in each layout.
        ("qwen2_5_vl", ("strategy=pipeline",), Packing.best_fit),
        ("qwen2_5_vl", ("data.packing=none",), Packing.none),
        # transformers looks for its images by positions, which packed documents share.
        ("gemma3", (), Packing.none),
    ],
)
def test_rows_are_packed_where_the_model_computes_the_same(find, family, overrides, packing, caplog):
    with caplog.at_level(logging.INFO):
        data = find(family, *overrides)
    assert (data.images.used, data.packing) == (True, packing)
    told = [line for line in caplog.messages if "a sequence takes one row" in line]
    assert len(told) == (family == "gemma3")


@pytest.mark.parametrize(
    ("family", "asked", "message"),
    [
        ("gemma3", "best_fit", "are not computed as by themselves: a small gemma3 differs"),
        ("llava", "concat", "documents end to end are cut"),
    ],
)
def test_a_packing_that_cannot_be_is_refused(find, family, asked, message):
    with pytest.raises(ConfigError, match=message) as caught:
        find(family, f"data.packing={asked}")
    assert caught.value.where == "data.packing"
    assert asked in caught.value.found


def test_zero3_is_refused_where_each_image_calls_a_module(rows, tmp_path, cache_dir):
    """Its projector is called for each image; that of the types above once."""
    model = save(*make_model_and_processor("paddleocr_vl"), tmp_path / "model")
    architecture, tokenizer = AutoConfig.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    config = make_config(tmp_path / "run", model, rows, "strategy=zero3")
    with pytest.raises(ConfigError, match="calls one for each image") as caught:
        find_images(config, open_corpus(config.data), architecture, tokenizer)
    assert caught.value.where == "strategy.sharding"
    assert "projector" in caught.value.found


def test_zero3_takes_a_type_that_calls_each_module_once(find):
    assert find("llava", "strategy=zero3").images.used
