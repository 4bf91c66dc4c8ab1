"""The recipe beside a Hub: a refusal is one message, and `--offline` opens no connection at all."""

import json
import sys

import pytest

from hfdist.models.resolve import resolve_model
from tests.distributed.runs import losses
from tests.e2e.forked import run_forked
from tests.e2e.test_launch import ROOT, run
from tests.hub_server import User, hub, write_model  # noqa: F401
from tests.unit.hub.starting import configure

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

RECIPE = ROOT / "recipes" / "finetune.py"
TUNE = ("model.name=some/model", "data=stdlib", "data.sequence_length=32", "data.eval_sequences=4", "data.workers=0",
        "train.max_steps=2", "train.global_batch_size=2", "train.micro_batch_size=1", "optimizer.warmup_steps=1",
        "checkpoint=none", "checkpoint.keep_best=false", "report=quiet")  # fmt: skip
TOKEN = "hf_SECRETsecretSECRET"
# Writes down who is connected to, or asked after by name.
SITECUSTOMIZE = """
import json, sys
def hook(event, arguments):
    if event == "socket.connect" and isinstance(arguments[1], tuple) or event == "socket.getaddrinfo":
        with open({path!r}, "a") as file:
            file.write(json.dumps([event, repr(arguments[1:])]) + "\\n")
sys.addaudithook(hook)
"""


def environment(hub, tmp_path):  # noqa: F811
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITECUSTOMIZE.format(path=str(tmp_path / "connections")))
    paths = f"{tmp_path / 'site'}:{ROOT}"
    return {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf-home"), "HF_HUB_OFFLINE": "0", "PYTHONPATH": paths,
            "HF_HUB_DISABLE_XET": "1", "HF_DATASETS_OFFLINE": "0", "HFDIST_CACHE": str(tmp_path / "cache")}  # fmt: skip


def connections(tmp_path):
    path = tmp_path / "connections"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_gated_model_is_one_message(hub, tmp_path):  # noqa: F811
    hub.store.add("some/model", write_model(tmp_path / "model"), gated=True)
    hub.store.users[TOKEN] = User("me")
    cache = str(tmp_path / "cache")
    done = run_forked(*TUNE, cwd=tmp_path, script=RECIPE, HF_TOKEN=TOKEN, HF_ENDPOINT=hub.url, HFDIST_CACHE=cache)
    output = done.stdout + done.stderr
    assert done.returncode == 2, output
    assert "Config error: the repository is gated: your account has not been granted access" in output
    assert "where:   model.name" in output
    assert "Traceback" not in output
    assert TOKEN not in output


def test_offline_opens_no_connection(hub, tmp_path):  # noqa: F811
    hub.store.add("some/model", write_model(tmp_path / "model"))
    resolve_model(configure("some/model"), cache_dir=tmp_path / "cache").fetch_weights()
    hub.requests.clear()
    alone = environment(hub, tmp_path)
    code, output = run([sys.executable, RECIPE, "--offline", *TUNE], tmp_path, **alone)
    assert code == 0, output
    assert not connections(tmp_path)
    assert not hub.requests
    assert len(losses(tmp_path / "runs" / "finetune")) == 2
    code, output = run([sys.executable, "-c", f"import httpx; httpx.get({hub.url!r})"], tmp_path, **alone)
    assert code == 0, output
    assert connections(tmp_path), "or this test proves nothing"
