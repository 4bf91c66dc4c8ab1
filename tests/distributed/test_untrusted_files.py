"""What must not get out, and what must not get in: secrets of the environment, and code in a stranger's folder."""

import json
import pickle
import shutil
from functools import partial
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from hfdist.checkpoint import verify
from hfdist.config.composition.compose import compose_config
from hfdist.testing import RankFailed
from proofs.layout_changes import change_checkpoint
from tests.distributed.processes import Life
from tests.distributed.runs import SMALL, losses, pretrain

pytestmark = pytest.mark.distributed

ASKS_ANEW = True
SECRETS = {
    "HF_TOKEN": "hf_canary-of-the-hub",
    "WANDB_API_KEY": "canary-of-a-tracker",
    "AWS_SECRET_ACCESS_KEY": "canary-of-a-bucket",
}
SAVING = ("checkpoint=default", "checkpoint.every=2", "train.max_steps=4")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with all that it can leave, among secrets; and the folder of its caches, logs and temporary files."""
    folder = tmp_path_factory.mktemp("secrets")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SECRETS.items():
            patch.setenv(name, value)
        patch.setenv("TMPDIR", str(folder))
        reports = ("report=default", "report.timeline=true", f"data.cache_dir={folder / 'cache'}")
        overrides = [*SMALL, *SAVING, *reports, "strategy=pipeline", f"run.dir={folder / 'run'}"]
        Life(compose_config(overrides), 2, folder / "log").join()
    return folder


def files_below(folder: Path):
    return [path for path in folder.rglob("*") if path.is_file()]


def test_secrets_of_the_environment_are_in_no_file(run):
    for name in ("log", "run/metrics.jsonl", "run/timeline.json", "run/model/model.safetensors", "cache"):
        assert (run / name).exists(), name
    assert (run / "log").stat().st_size > 1000
    for path in files_below(run):
        content = path.read_bytes()
        assert not [name for name, secret in SECRETS.items() if secret.encode() in content], path


def test_checkpoints_and_models_hold_nothing_that_can_run(run):
    checkpoints = files_below(run / "run" / "checkpoints")
    assert len(checkpoints) > 10
    for name in ("config.json", "generation_config.json"):
        assert json.loads((run / "run" / "model" / name).read_text())["use_cache"], "as users want it"
    for path in [*checkpoints, *files_below(run / "run" / "model")]:
        content = path.read_bytes()
        is_pickle = content[:1] == pickle.PROTO and content[1] <= pickle.HIGHEST_PROTOCOL
        assert not is_pickle, path
        assert not content.startswith(b"PK"), f"{path} is an archive, as torch.save writes"
        if path.suffix == ".safetensors":
            assert isinstance(json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]), dict)
        elif path.suffix == ".json":
            json.loads(content)
        elif path.suffix == ".png":
            assert content.startswith(b"\x89PNG"), path
        else:
            assert path.suffix in (".txt", ".jinja", ".md"), path
            content.decode()


# ---- a stranger's folder ----

CODE = """
from pathlib import Path
Path({ran!r}).write_text(__name__)
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class Config(LlamaConfig): model_type = "{kind}"
class Model(LlamaForCausalLM): config_class = Config
class Tokenizer(PreTrainedTokenizerFast): pass
"""
# By the names under which the Trainer, DeepSpeed, accelerate and transformers look for pickles.
PICKLES = (
    "optimizer.pt",
    "optimizer.bin",
    "scheduler.pt",
    "scaler.pt",
    "rng_state.pth",
    "rng_state_0.pth",
    "rng_state_1.pth",
    "training_args.bin",
    "pytorch_model.bin",
    "latest/mp_rank_00_model_states.pt",
)


class Runs:
    """Its pickle writes a file when it is read."""

    def __init__(self, ran):
        self._ran = ran

    def __reduce__(self):
        return Path.write_text, (self._ran, "pickle")


def plant(folder: Path, ran: Path, kind: str = "llama"):
    """Put everything into a Hub folder that could run."""
    (folder / "stranger.py").write_text(CODE.format(ran=str(ran), kind=kind))
    for name, classes in {
        "config.json": {"AutoConfig": "stranger.Config", "AutoModelForCausalLM": "stranger.Model"},
        "tokenizer_config.json": {"AutoTokenizer": ["stranger.Tokenizer", "stranger.Tokenizer"]},
    }.items():
        content = json.loads((folder / name).read_text())
        content["auto_map"] = classes
        if name == "config.json":
            content["model_type"] = kind
        (folder / name).write_text(json.dumps(content))
    for name in PICKLES:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(pickle.dumps(Runs(ran)))


@pytest.fixture
def ran(tmp_path):
    """Is there once a stranger's code has run."""
    return tmp_path / "ran"


def test_the_planted_code_would_run(run, tmp_path, ran):
    """Otherwise the tests below prove nothing."""
    folder = tmp_path / "model"
    shutil.copytree(run / "run" / "model", folder)
    plant(folder, ran)
    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert "stranger" in ran.read_text()
    for name in PICKLES:
        ran.unlink()
        pickle.loads((folder / name).read_bytes())
        assert ran.read_text() == "pickle"


def test_a_checkpoint_with_code_is_resumed_without_running_it(run, tmp_path, ran):
    checkpoint = run / "run" / "checkpoints" / "step-00000002"
    changed = change_checkpoint(checkpoint, tmp_path / "theirs", lambda *_: None, partial(plant, ran=ran))
    verify(changed)
    options = ("strategy=zero2", "train.max_steps=4", f"data.cache_dir={run / 'cache'}")
    other = pretrain(tmp_path / "run", 2, *options, f"checkpoint.resume={changed}")
    assert losses(other) == pytest.approx(losses(run / "run")[2:], rel=1e-5)
    assert not ran.exists()


@pytest.mark.parametrize("init", ["random", "pretrained"])
def test_a_model_with_code_is_opened_without_running_it(run, tmp_path, ran, init):
    folder = tmp_path / "model"
    shutil.copytree(run / "run" / "model", folder)
    plant(folder, ran)
    named = (f"model.name={folder}", f"model.tokenizer.name={folder}", f"model.init={init}", "train.max_steps=3")
    pretrain(tmp_path / "run", 1, "strategy=single", "model=hub", *named)
    assert not ran.exists()
    # With nothing but pickles, or of a type that only their code knows, it is refused.
    (folder / "model.safetensors").unlink()
    if init == "pretrained":
        with pytest.raises(RankFailed, match="ConfigError"):
            pretrain(tmp_path / "other", 1, "strategy=single", "model=hub", *named)
    plant(folder, ran, kind="stranger")
    with pytest.raises(RankFailed, match="ConfigError"):
        pretrain(tmp_path / "another", 1, "strategy=single", "model=hub", *named)
    assert not ran.exists()
