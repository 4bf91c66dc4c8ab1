"""Models of image and text: rows with and without images at random over ranks, the same in every layout."""

from functools import cache

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from hfdist.errors import ConfigError
from hfdist.run import prepare_run
from tests.distributed.image_runs import STEPS, finetune, make_config, write_rows
from tests.distributed.runs import eval_losses, losses, name_of, weights
from tests.image_models import FAMILIES, save_model
from tests.marks import many

pytestmark = pytest.mark.distributed

TOWERS = ("vision", "visual")
"""What stands in the names of a tower's weights, in all families."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return cache(lambda family: save_model(family, folder / family))


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("texts"), most_images=-1)


@pytest.fixture(scope="module")
def single(tmp_path_factory, models, rows, cache_dir):
    folder = tmp_path_factory.mktemp("single")
    return cache(lambda *how: finetune(folder / name_of(how), models(how[0]), rows, 1, *how[1:]))


def check_equal(run, reference):
    assert losses(run) == pytest.approx(losses(reference), rel=1e-5)
    assert len(set(losses(run))) == STEPS
    # The last one: a run that goes on has one of its first end, too.
    assert eval_losses(run)[-1] == pytest.approx(eval_losses(reference)[-1], rel=1e-5)
    own, wanted = weights(run), weights(reference)
    assert own.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(own[name], value, rtol=1e-4, atol=2e-5, msg=name)


@pytest.mark.parametrize(
    ("family", "layout", "num_ranks"),
    [
        # LLaVA's last tower block is never reached.
        ("llava", "zero3", 2),
        ("qwen2_5_vl", "fsdp2", 2),
        # The first stage has the tower; steps have micro batches with and without images, of packed rows.
        ("qwen2_5_vl", "pipeline train.micro_batch_size=2", 2),
        ("gemma3", "tensor", 2),
        many("llava", "single train.micro_batch_size=4", 1),
        *(
            many(family, layout, 2)
            for family in FAMILIES
            for layout in ("ddp", "zero1", "zero2", "zero3", "fsdp2", "zero3 train.micro_batch_size=2")
        ),
        *(
            many(family, layout, 2)
            for family in FAMILIES
            for layout in ("pipeline", "pipeline strategy.schedule=gpipe train.micro_batch_size=2", "tensor")
        ),
        *(many(family, "pipeline data.packing=none", 2) for family in ("llava", "qwen3_vl")),
        many("gemma3", "pipeline strategy.pipeline=2", 4),
        many("qwen2_5_vl", "pipeline strategy.sharding=fsdp2", 4),
        many("internvl", "tensor strategy.pipeline=2", 4),
        many("idefics3", "hsdp", 4),
        many("llava", "pipeline adapter=lora", 2),
        many("llava", "zero3 adapter=lora", 2),
        many("llava", "zero3", 4),
    ],
)
def test_a_layout_changes_nothing(single, models, rows, tmp_path, family, layout, num_ranks):
    strategy, *others = layout.split()
    run = finetune(tmp_path, models(family), rows, num_ranks, f"strategy={strategy}", *others)
    check_equal(run, single(family, *(one for one in others if one.startswith(("adapter=", "data.packing=")))))


def test_the_folder_opens_with_its_processor_and_what_no_image_reaches_stays(single, models):
    run, before = single("llava"), load_file(models("llava") / "model.safetensors")
    moved = {name for name, value in weights(run).items() if not torch.equal(value, before[name])}
    unreached = {name for name in before if "encoder.layers.1." in name or "post_layernorm" in name}
    assert moved.isdisjoint(unreached)
    # No attention depends on what is added to all keys.
    assert all(name.endswith("k_proj.bias") for name in before.keys() - moved - unreached)
    model = AutoModelForImageTextToText.from_pretrained(run / "model")
    assert torch.equal(model.lm_head.weight, weights(run)["language_model.lm_head.weight"])
    opened, wanted = (AutoProcessor.from_pretrained(folder) for folder in (run / "model", models("llava")))
    assert opened.chat_template == wanted.chat_template
    assert opened.image_processor.to_dict() == wanted.image_processor.to_dict()


@pytest.mark.parametrize(
    ("family", "layout", "num_ranks"),
    [
        many("gemma3", "single", 1),
        ("gemma3", "zero3", 2),
        # What no stage needs is in test_unused_weights.py.
        many("gemma3", "pipeline", 2),
        many("gemma3", "ddp", 2),
        many("gemma3", "fsdp2", 2),
        many("llava", "pipeline", 2),
        many("llava", "ddp", 2),
    ],
)
def test_text_alone_keeps_what_reads_images(models, texts, tmp_path, family, layout, num_ranks, cache_dir):
    run = finetune(tmp_path, models(family), texts, num_ranks, f"strategy={layout}")
    before, after = load_file(models(family) / "model.safetensors"), weights(run)
    assert before.keys() == after.keys()
    for name, value in before.items():
        is_seeing = any(word in name for word in (*TOWERS, "multi_modal"))
        assert torch.equal(after[name], value) == is_seeing, name
    assert (run / "model" / "preprocessor_config.json").is_file()


def test_parts_are_frozen_by_their_names(models, rows, tmp_path, cache_dir):
    run = finetune(tmp_path, models("idefics3"), rows, 1, "train.train_only=[projector,language]", "train.max_steps=2")
    before = load_file(models("idefics3") / "model.safetensors")
    for name, value in weights(run).items():
        assert torch.equal(value, before[name]) == ("vision" in name) or name.endswith("k_proj.bias"), name


@pytest.mark.many
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"])
@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl"])
def test_stages_of_one_rank_read_images_once(rows, tmp_path, cache_dir, family, schedule):
    model = save_model(family, tmp_path / "model", num_blocks=4)
    reference = finetune(tmp_path / "single", model, rows, 1)
    how = ("strategy=pipeline", f"strategy.schedule={schedule}")
    check_equal(finetune(tmp_path / "run", model, rows, 2, *how), reference)


@pytest.mark.many
def test_one_process_goes_on_where_a_pipeline_stopped(single, models, rows, tmp_path):
    shared = ("checkpoint=default", "checkpoint.every=2")
    finetune(tmp_path, models("llava"), rows, 2, "strategy=pipeline", *shared, "train.max_steps=2")
    run = finetune(tmp_path, models("llava"), rows, 1, *shared)
    check_equal(run, single("llava"))


@pytest.mark.parametrize(
    ("layout", "num_ranks", "where"),
    [
        ("long_context", 2, "strategy.context"),
        ("pipeline strategy.pipeline=2 strategy.sharding=zero1", 4, "strategy.sharding"),
    ],
)
def test_a_layout_that_is_not_tried_is_refused_before_weights(
    models, rows, tmp_path, cache_dir, monkeypatch, layout, num_ranks, where
):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(num_ranks)}.items():
        monkeypatch.setenv(name, value)
    strategy, *others = layout.split()
    run = prepare_run(make_config(tmp_path, models("llava"), rows, f"strategy={strategy}", *others))
    run.find_model()
    with pytest.raises(ConfigError, match="not tried on rows with images") as caught:
        run.open_data()
    assert caught.value.where == where
