"""What tests of ranks ask once a session is asked again of another config, of a changed file, and after a refusal."""

import os

import pytest
from transformers import AutoConfig

from hfdist.errors import ConfigError
from hfdist.models import tokenizer
from hfdist.run import model
from tests.quick_probes import quick_probes

ASKS_ANEW = True


def test_each_config_is_asked_once_and_a_refusal_is_not_kept(tmp_path, monkeypatch):
    asked = []

    def probe(architecture):
        asked.append(architecture.num_hidden_layers)
        if architecture.num_hidden_layers == 3:
            raise ConfigError("three")

    monkeypatch.setattr(model, "check_reads_no_further", probe)
    quick_probes(monkeypatch, tmp_path)
    for num_layers in (1, 2, 1, 2):
        model.check_reads_no_further(AutoConfig.for_model("llama", num_hidden_layers=num_layers))
    for _ in range(2):
        with pytest.raises(ConfigError, match="three"):
            model.check_reads_no_further(AutoConfig.for_model("llama", num_hidden_layers=3))
    assert asked == [1, 2, 3, 3]


def test_a_file_is_read_apart_once_until_it_changes(tmp_path, monkeypatch):
    read, folder = [], tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    monkeypatch.setattr(tokenizer, "do_apart", lambda do, *, where, found: do())
    quick_probes(monkeypatch, tmp_path)

    # Not the list, which changes, and would be something else to ask.
    note = read.append

    def read_as(name):
        tokenizer.do_apart(lambda: note(name), where="model.name", found=folder)

    for name in ("a", "b", "a"):
        read_as(name)
    os.utime(folder / "config.json", (1, 1))
    read_as("a")
    assert read == ["a", "b", "a"]
