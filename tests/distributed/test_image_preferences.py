"""Pairs of answers about images: TRL's own losses and weights on one process, and the same in every layout."""

import json
from functools import cache

import pytest
import torch
import trl
from datasets import Dataset
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from hfdist.config.composition.compose import compose_config
from hfdist.errors import ConfigError
from hfdist.records import RunFolder, read_lines
from hfdist.run import prepare_run
from hfdist.testing import run_ranks
from recipes.tune import main
from tests.distributed import trl_runs
from tests.distributed.preference_runs import COMMON, PLAIN, STEPS
from tests.distributed.runs import eval_losses, losses, name_of, weights
from tests.image_models import draw, save_model
from tests.marks import many

pytestmark = pytest.mark.distributed

FIGURES = ("rewards/chosen", "rewards/rejected", "rewards/margins", "grad_norm")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")

    def save(family):
        model = save_model(family, folder / family)
        # TRL learns all that a template writes after an answer begins.
        path = model / "chat_template.jinja"
        path.write_text(path.read_text().replace("'<|im_end|>\\n'", "'<|im_end|>'"))
        return model

    return cache(save)


def write_pairs(folder, num_rows, most_images=2):
    """Write rows of which each has from none to so many images; all have the same words, but for their answers."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(num_rows):
        names = [f"{number}-{place}.png" for place in range((number + 1) % (most_images + 1))]
        for place, name in enumerate(names):
            draw(3 * number + place).save(folder / name)
        asked = [*({"type": "image"} for _ in names), {"type": "text", "text": "what is in this picture?"}]
        said = [[{"role": "assistant", "content": [{"type": "text", "text": text}]}]
                for text in (f"a cat and {number % 3}", f"a red square {number % 2}")]  # fmt: skip
        row = {"prompt": [{"role": "user", "content": asked}], "chosen": said[0], "rejected": said[1]}
        rows.append(row | {"images": names})
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("rows"), 24)


def make_config(folder, model, rows, *overrides):
    own = (
        f"model.name={model}",
        f"model.tokenizer.name={model}",
        f"data.sources.files.path={rows}",
        f"run.dir={folder}",
    )
    words = ("task=dpo", "data.sequence_length=384", "train.micro_batch_size=1", *own, *overrides)
    return compose_config([*COMMON, *words], name="tune")


def tune(folder, model, rows, num_ranks, *overrides):
    config = make_config(folder, model, rows, *overrides)
    run_ranks(main.__wrapped__, num_ranks, config, group=num_ranks > 1, timeout_seconds=240)
    return folder


@pytest.fixture(scope="module")
def single(tmp_path_factory, models, rows, cache_dir):
    folder = tmp_path_factory.mktemp("single")
    return cache(lambda *how: tune(folder / name_of(how), models(how[0]), rows, 1, *how[1:]))


@pytest.mark.parametrize(
    ("family", "layout", "num_ranks"),
    [
        # Positions of time, height and width begin anew in each answer; the first stage has the tower.
        ("qwen2_5_vl", "pipeline train.micro_batch_size=2", 2),
        *(
            many(family, layout, 2)
            for family in ("llava", "qwen2_5_vl", "qwen3_vl")
            for layout in ("ddp", "zero2", "zero3", "fsdp2", "pipeline", "tensor")
        ),
        *(many("llava", f"{layout} task.ref_model_sync_steps=2", 2) for layout in ("fsdp2", "pipeline")),
        *(many("internvl", f"{layout} task=orpo", 2) for layout in ("zero3", "pipeline")),
        many("llava", "zero3 adapter=lora", 2),
    ],
)
def test_a_layout_changes_nothing(single, models, rows, tmp_path, family, layout, num_ranks):
    strategy, *others = layout.split()
    run = tune(tmp_path, models(family), rows, num_ranks, f"strategy={strategy}", *others)
    reference = single(family, *(one for one in others if one.startswith(("task", "adapter"))))
    assert losses(run) == pytest.approx(losses(reference), rel=1e-5)
    assert eval_losses(run) == pytest.approx(eval_losses(reference), rel=1e-5)
    assert len(set(losses(run))) == STEPS
    own, wanted = weights(run), weights(reference)
    assert own.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(own[name], value, rtol=1e-4, atol=2e-5, msg=name)


def train_plainly(folder, model, path):
    """Train TRL's class on all rows in each step; give its lines, and leave the model in the folder."""
    given = [json.loads(line) for line in path.read_text().splitlines()]
    pictures = [[Image.open(path.parent / name).convert("RGB") for name in row["images"]] for row in given]
    rows = [row | {"images": images} for row, images in zip(given, pictures, strict=True)]
    args = trl.DPOConfig(str(folder), **PLAIN, per_device_train_batch_size=len(rows), max_length=None)
    trainer = trl.DPOTrainer(
        AutoModelForImageTextToText.from_pretrained(model, dtype="float32"),
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoProcessor.from_pretrained(model),
    )
    trainer.train()
    trainer.save_model(str(folder / "model"))
    return [line for line in trainer.state.log_history if "loss" in line]


def test_losses_and_weights_are_those_of_trl(models, tmp_path, cache_dir):
    model, rows = models("llava"), write_pairs(tmp_path / "rows", 4, most_images=1)
    # A step is all rows: TRL and hfdist shuffle them in their own ways.
    all_rows = ("data.eval_fraction=0", "train.eval_every=null", "data.lanes=1", "train.global_batch_size=1")
    run = tune(tmp_path / "ours", model, rows, 1, *all_rows)
    [plain] = run_ranks(train_plainly, 1, tmp_path / "trl", model, rows, group=False)
    lines = [line for line in read_lines(RunFolder(run).metrics) if "loss" in line]
    assert losses(run) == pytest.approx([line["loss"] for line in plain], rel=1e-5)
    for name in FIGURES:
        assert [line[name] for line in lines] == pytest.approx([line[name] for line in plain], rel=1e-4, abs=1e-5), name
    assert trl_runs.difference(weights(run), weights(tmp_path / "trl")) < 1e-5


def write_answers(pairs):
    """Write the prompts of pairs beside them, with the answer that was chosen, as other tasks read rows."""
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    for row in rows:
        del row["rejected"]
        row |= {"completion": row.pop("chosen"), "label": True}
    path = pairs.with_name("answers.jsonl")
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        # Packed rows of gemma3 see each other.
        ("gemma3", (), "pairs of answers are packed"),
        ("llava", ("task=kto",), "this task does not read images yet"),
        many("llava", ("task=ppo", "task.rewards={arithmetic: 1.0}"), "this task does not read images yet"),
    ],
)
def test_what_is_not_computed_alike_is_refused_before_weights(
    models, rows, tmp_path, cache_dir, monkeypatch, family, overrides, message
):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    if overrides:
        rows = write_answers(rows)
    run = prepare_run(make_config(tmp_path, models(family), rows, "strategy=ddp", *overrides))
    run.find_model()
    with pytest.raises(ConfigError, match=message):
        run.open_data()
