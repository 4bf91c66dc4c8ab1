"""Datasets of the Hub as sources: their rows, and one message where there are none."""

import json

import datasets
import pytest
from huggingface_hub import constants

from hfdist.config.data import SourceConfig, SourceKind
from hfdist.data.sources.dataset import open_hub
from hfdist.errors import ConfigError, DataError
from hfdist.testing import run_ranks
from tests.hub_server import Slow

NAME = "some/texts"
ROWS = [f"row {number} " * 10 for number in range(20)]


@pytest.fixture
def texts(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.url)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    lines = "".join(json.dumps({"text": row}) + "\n" for row in ROWS)
    hub.store.add(NAME, {"train.jsonl": lines.encode()}, kind="datasets")
    return hub


def read(path, **more):
    return open_hub("data.sources.x.path", SourceConfig(kind=SourceKind.hub, path=path, **more)).read(range(len(ROWS)))


def test_ranks_of_a_machine_fetch_the_rows_once(texts):
    texts.faults.plan("^GET .*/train.jsonl", Slow(0.3))
    assert run_ranks(read, 2, NAME, group=False) == [ROWS, ROWS]
    assert len(texts.asked(f"GET /datasets/{NAME}/resolve")) <= 3, "the rows, and the page twice"
    assert len([line for line, _ in texts.requests if line.startswith("GET") and "train.jsonl" in line]) == 1


@pytest.mark.parametrize(
    ("path", "more", "words"),
    [
        ("some/none", {}, "doesn't exist on the Hub"),
        (NAME, {"split": "valid"}, "Unknown split"),
        (NAME, {"revision": "v7"}, "Revision 'v7' doesn't exist"),
    ],
)
def test_mistakes(texts, path, more, words):
    with pytest.raises(ConfigError) as caught:
        read(path, **more)
    assert words in str(caught.value)
    assert caught.value.where == "data.sources.x.path"


def test_gated(texts):
    texts.store.repositories["datasets", NAME].gated = True
    with pytest.raises(ConfigError, match="gated"):
        read(NAME)


def test_without_the_hub(texts, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="does not answer or is switched off"):
        read(NAME)
    assert not texts.requests
