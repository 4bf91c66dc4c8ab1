"""GGUF files as starting points: converted once, the same for every layout, saved as an ordinary model."""

import shutil
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hfdist.errors import ConfigError
from hfdist.models.gguf import convert_gguf
from hfdist.testing import run_ranks
from tests.unit.hub.starting import assert_same_weights, begin
from tests.unit.hub.tiny_gguf import write_gguf

TEXT = "def add(left, right):\n    return left + right\n"


@pytest.fixture(scope="session")
def gguf_file(model_folder, tmp_path_factory):
    return write_gguf(model_folder, tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="session")
def reference(model_folder):
    return AutoModelForCausalLM.from_pretrained(model_folder), AutoTokenizer.from_pretrained(model_folder)


def assert_it_is(reference, begun, folder):
    (model, tokenizer), (expected, original) = begun, reference
    assert_same_weights(model, expected)
    assert tokenizer(TEXT)["input_ids"] == original(TEXT)["input_ids"]
    assert tokenizer.eos_token_id == original.eos_token_id
    inputs = original(TEXT, return_tensors="pt")["input_ids"]
    assert torch.equal(model(inputs).logits, expected(inputs).logits)
    model.save_pretrained(folder)
    assert_same_weights(AutoModelForCausalLM.from_pretrained(folder), expected)


def test_a_file_and_a_file_in_a_folder(gguf_file, tmp_path, reference):
    assert_it_is(reference, begin(gguf_file, tmp_path), tmp_path / "first")
    begun = begin(gguf_file.parent, tmp_path, gguf_file=gguf_file.name)
    assert_it_is(reference, begun, tmp_path / "second")
    assert len(list((tmp_path / "gguf").glob("*/model.safetensors"))) == 1


def test_a_file_of_a_repository(hub, gguf_file, tmp_path, reference):
    hub.store.add("some/gguf", {"tiny.gguf": gguf_file.read_bytes(), "other.gguf": b"large"})
    begun = begin("some/gguf", tmp_path, gguf_file="tiny.gguf")
    assert_it_is(reference, begun, tmp_path / "out")
    assert len(hub.asked("GET /storage")) == 1


def test_ranks_convert_it_once(gguf_file, tmp_path):
    def rank():
        return convert_gguf(gguf_file, tmp_path, key="model.name").stat().st_ino

    assert len(set(run_ranks(rank, 3, group=False))) == 1
    assert len([path for path in (tmp_path / "gguf").iterdir() if path.is_dir()]) == 1


def test_another_file_of_the_same_name_is_another_model(gguf_file, tmp_path):
    copy = shutil.copy(gguf_file, tmp_path / "tiny.gguf")
    first = convert_gguf(copy, tmp_path, key="model.name")
    content = bytearray(copy.read_bytes())
    content[-1] ^= 1
    copy.write_bytes(content)
    assert convert_gguf(copy, tmp_path, key="model.name") != first


class TestMistakes:
    def refused(self, file, cache, **more):
        with pytest.raises(ConfigError) as caught:
            begin(file, cache, **more)
        return str(caught.value)

    def test_files_that_are_none(self, gguf_file, tmp_path):
        assert "there is no such file" in self.refused(tmp_path / "none.gguf", tmp_path)
        assert "there is no such file" in self.refused(tmp_path, tmp_path, gguf_file="none.gguf")
        text = tmp_path / "text.gguf"
        text.write_text("this is no model")
        assert "cannot be read" in self.refused(text, tmp_path)
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(gguf_file.read_bytes()[:-50_000])
        assert "cannot be read" in self.refused(cut, tmp_path)
        assert not list((tmp_path / "gguf").glob("*/config.json"))

    def test_weights_that_are_not_there(self, model_folder, tmp_path):
        file = write_gguf(model_folder, tmp_path / "less.gguf", without="blk.1.ffn_up.weight")
        assert "missing: 1 (model.layers.1.mlp.up_proj.weight)" in self.refused(file, tmp_path)
        part = file.rename(tmp_path / "less-00002-of-00003.gguf")
        assert "llama-gguf-split --merge" in self.refused(part, tmp_path)

    def test_the_package_is_missing(self, gguf_file, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "gguf", None)
        assert "pip install gguf" in self.refused(gguf_file, tmp_path)
