"""Runs that start from the Hub or from GGUF and end on the Hub, in several layouts."""

import json

import pytest
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, AutoTokenizer

from hfdist.config.composition.compose import compose_config
from hfdist.errors import ResourceError
from hfdist.testing import run_ranks
from recipes.finetune import main
from tests.distributed.runs import losses
from tests.distributed.trainers import make_strategy, make_trainer
from tests.hub_server import Cut, Status, User, hub, write_model  # noqa: F401
from tests.marks import many
from tests.unit.hub.tiny_gguf import write_gguf

pytestmark = pytest.mark.distributed

TUNE = ("data=stdlib", "data.sequence_length=32", "data.eval_sequences=4", "data.workers=0", "train.max_steps=3",
        "train.global_batch_size=4", "train.micro_batch_size=1", "optimizer.lr=1e-3", "optimizer.warmup_steps=1",
        "checkpoint=none", "checkpoint.keep_best=false", "report=quiet", "report.plot=true")  # fmt: skip
TOKEN = "hf_SECRETsecretSECRET"


def tune(folder, num_processes, *overrides):
    config = compose_config([*TUNE, f"run.dir={folder}", *overrides], name="finetune")
    run_ranks(main.__wrapped__, num_processes, config, group=num_processes > 1)
    return folder


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def me(hub, model_folder, monkeypatch):  # noqa: F811
    hub.store.add("some/base", model_folder)
    hub.store.users[TOKEN] = User("me")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return hub


def test_from_the_hub_and_back(me, cache_dir, tmp_path):
    """Two ranks, with a Hub that fails on the way down and on the way up; the model is that of a local folder."""
    me.faults.plan("^GET /storage", Cut(5000))
    me.faults.plan("^PUT", Cut(5000))
    me.faults.plan("^POST .*/commit/", Status(503, {"Retry-After": "0"}))
    run_dir = tune(tmp_path / "run", 2, "strategy=ddp", "model.name=some/base", "export.push_to=me/tuned")
    assert len(me.asked("GET /storage")) == 2, "one for the cut, one for the rest"

    folder = run_dir / "model"
    there = me.store.repositories["models", "me/tuned"].files()
    for path in folder.iterdir():
        assert there[path.name] == path.read_bytes(), path.name
    card = there["README.md"].decode()
    commit = me.store.repositories["models", "some/base"].branches["main"]
    assert "base_model: some/base" in card
    assert f"commit `{commit}`" in card
    assert "hfdist run config.yaml" in card
    assert "held out, step 3" in card
    assert there["loss.png"].startswith(b"\x89PNG")
    everything = b"".join(path.read_bytes() for path in run_dir.rglob("*") if path.is_file())
    assert TOKEN.encode() not in everything
    assert constants.HF_HUB_CACHE.encode() not in everything, "places of this machine do not travel"
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"


def test_an_upload_that_fails_leaves_the_model_and_says_so(me, cache_dir, tmp_path):
    me.faults.plan("^POST .*/commit/", Status(403), times=99)

    def run(config):
        try:
            main.__wrapped__(config)
        except ResourceError as error:
            return error.exit_code, str(error)
        return 0, ""

    config = compose_config(
        [*TUNE, f"run.dir={tmp_path}/run", "model.name=some/base", "export.push_to=me/tuned", "strategy=ddp"],
        name="finetune",
    )
    (code, text), other = run_ranks(run, 2, config)
    assert (code, other) == (7, (0, ""))
    assert "the model is trained and saved, but not uploaded" in text
    assert f"hf upload me/tuned {tmp_path}/run/model ." in text
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")


def push_each_save(folder):
    arguments = {
        "save_strategy": "steps", "save_steps": 2, "push_to_hub": True, "hub_model_id": "me/pushed",
        "hub_token": TOKEN, "hub_strategy": "checkpoint", "hub_always_push": True,
    }  # fmt: skip
    trainer = make_trainer(folder, make_strategy(pipeline=2), arguments=arguments)
    trainer.train()
    trainer.save_model()


def test_a_trainer_from_python_pushes_each_save(me, tmp_path):
    """As the original does: the model of each checkpoint, the checkpoint itself if asked, and the model at the end."""
    run_ranks(push_each_save, 2, tmp_path / "run")
    repository = me.store.repositories["models", "me/pushed"]
    titles = ["Training in progress, step 2", "Training in progress, step 4"]
    # Uploads of one save run side by side.
    assert sorted(repository.messages) == sorted(
        ["initial commit", *titles, *(f"{title}, checkpoint" for title in titles), "Model save"]
    )
    there = repository.files()
    folder = tmp_path / "run" / "checkpoint-4"
    assert {name for name in there if name.startswith("last-checkpoint/")} == {
        f"last-checkpoint/{path.relative_to(folder).as_posix()}" for path in folder.rglob("*") if path.is_file()
    }
    weights = [name for name in there if name.endswith(".safetensors") and "/" not in name]
    assert weights
    for name in weights:
        assert there[name] == (tmp_path / "run" / name).read_bytes(), name
    assert "training_args.bin" in there
    assert not any(TOKEN.encode() in content for content in there.values())


@pytest.fixture(scope="module")
def gguf(model_folder, tmp_path_factory):
    """A file of GGUF, written from the folder."""
    return write_gguf(model_folder, tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def losses_of_folder(model_folder, gguf, tmp_path_factory, cache_dir):
    # The tokenizer is the file's: transformers does not read off the file how it splits spaces before digits.
    words = (f"model.name={model_folder}", f"model.tokenizer.name={gguf}")
    return losses(tune(tmp_path_factory.mktemp("reference"), 1, *words))


@pytest.mark.parametrize("strategy", ["zero3", many("pipeline")])
def test_gguf_in_every_layout(losses_of_folder, gguf, tmp_path, strategy):
    """The same losses as from the folder of safetensors that the file was written from."""
    run_dir = tune(tmp_path, 2, f"strategy={strategy}", f"model.name={gguf}")
    assert len(losses_of_folder) == 3
    assert losses(run_dir) == pytest.approx(losses_of_folder, rel=1e-5)
    assert "quantization_config" not in json.loads((run_dir / "model" / "config.json").read_text())
    assert AutoModelForCausalLM.from_pretrained(run_dir / "model")
    assert AutoTokenizer.from_pretrained(run_dir / "model")("def")["input_ids"]
