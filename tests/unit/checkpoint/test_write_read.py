"""One process saves and loads: values, types, names, several files, and messages when something does not fit."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hfdist.checkpoint import export_model, read_checkpoint, save_plan
from hfdist.checkpoint.manifest import MANIFEST
from hfdist.checkpoint.piece import MASTER, STEP, WEIGHT, Piece
from hfdist.errors import CheckpointError, ResourceError
from tests.unit.checkpoint.pieces import blank, save, small_pieces, whole, write_checkpoint
from tests.unit.tiny import llama


def same(pieces, others):
    return all(torch.equal(a.view, b.view) for a, b in zip(pieces, others, strict=True))


def test_what_was_saved_is_read(tmp_path):
    state = {"cursor": [1, 2], "scale": 0.1, "nothing": None}
    path = save(tmp_path, 3, small_pieces(), state)
    assert path == tmp_path / "step-00000003"
    loaded = blank(small_pieces())
    assert read_checkpoint(path, loaded) == state
    assert same(loaded, small_pieces())
    assert sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()) == [
        "config.json",
        MANIFEST,
        "model.safetensors",
        "training_state/hashes-00000.json",
        "training_state/optimizer-00001-of-00001.safetensors",
        "training_state/rng-00000.safetensors",
        "training_state/state.json",
    ]
    assert os.listdir(tmp_path) == ["step-00000003"]


def test_several_files_and_their_index(tmp_path, monkeypatch):
    monkeypatch.setattr(save_plan, "MAX_MODEL_FILE_BYTES", 40)
    path = save(tmp_path, 1, small_pieces())
    assert len(list(path.glob("model-*-of-00002.safetensors"))) == 2
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert {name: set(load_file(path / file)) >= {name} for name, file in index["weight_map"].items()} == {
        "a": True,
        "b": True,
        "count": True,
    }
    loaded = blank(small_pieces())
    read_checkpoint(path, loaded)
    assert same(loaded, small_pieces())


def test_transformers_reads_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(save_plan, "MAX_MODEL_FILE_BYTES", 5000)
    model = llama(tie_word_embeddings=True)
    pieces = [whole(name, WEIGHT, parameter.detach()) for name, parameter in model.named_parameters()]
    (tmp_path / "model.safetensors").write_text("of an older export, which loading would prefer")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ".tmp-mine").mkdir()
    (tmp_path / ".hfdist-export-0123abcd").mkdir()
    export_model(tmp_path, pieces, model.config.save_pretrained)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [".tmp-mine"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_an_export_of_shards_that_is_cut_short_opens_as_no_model(tmp_path, monkeypatch):
    monkeypatch.setattr(save_plan, "MAX_MODEL_FILE_BYTES", 5000)
    of_two = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = llama()
        of_two.append([whole(name, WEIGHT, p.detach()) for name, p in model.named_parameters()])
    export_model(tmp_path, of_two[0], model.config.save_pretrained)
    replace, moved = Path.replace, []

    def stop(path, target):
        if Path(target).suffix == ".safetensors":
            moved.append(target)
            if len(moved) == 2:
                raise KeyboardInterrupt
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        export_model(tmp_path, of_two[1], model.config.save_pretrained)
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_an_adapter_beside_its_base_replaces_no_model(tmp_path):
    export_model(tmp_path, small_pieces(), lambda folder: None)
    export_model(tmp_path, small_pieces(), lambda folder: None, stem=save_plan.ADAPTER_STEM)
    assert {"model.safetensors", "adapter_model.safetensors"} <= set(os.listdir(tmp_path))


def test_an_export_has_weights_alone(tmp_path):
    export_model(tmp_path / "model", small_pieces(), lambda path: (path / "config.json").write_text("{}"))
    assert sorted(os.listdir(tmp_path / "model")) == ["config.json", "model.safetensors"]
    assert set(load_file(tmp_path / "model" / "model.safetensors")) == {"a", "b", "count"}


def test_parts_of_a_tensor_and_views_that_do_not_flatten(tmp_path):
    path = save(tmp_path, 1, [whole("w", WEIGHT, torch.arange(12.0).view(3, 4).t())])
    assert torch.equal(load_file(path / "model.safetensors")["w"], torch.arange(12.0).view(3, 4).t())
    parts = [
        Piece(name="w", key=WEIGHT, shape=(4, 3), start=5, view=torch.zeros(7)),
        Piece(name="w", key=WEIGHT, shape=(4, 3), start=0, view=torch.zeros(3, 2).t()),
    ]
    read_checkpoint(path, parts)
    flat = torch.arange(12.0).view(3, 4).t().flatten()
    assert torch.equal(parts[0].view, flat[5:])
    assert torch.equal(parts[1].view.flatten(), flat[:6])


def refusal(path, pieces):
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(path, pieces)
    return str(caught.value)


def test_another_model_is_refused_with_the_names(tmp_path):
    path, nothing = save(tmp_path, 1, small_pieces()), blank(small_pieces())
    more = [*nothing, whole("new", WEIGHT, torch.zeros(2)), whole("new", STEP, torch.tensor(0.0))]
    assert "missing in it: new/step, new/weight" in refusal(path, more)
    assert same(nothing, blank(small_pieces())), "nothing is filled"
    assert "unknown to this run: a/exp_avg" in refusal(path, [p for p in small_pieces() if p.key != "exp_avg"])
    assert "unknown to this run: a/step" in refusal(path, [p for p in small_pieces() if p.key != STEP])
    assert "unknown to this run: b/weight" in refusal(path, [p for p in small_pieces() if p.name != "b"])
    reshaped = [p if p.name != "b" else whole("b", WEIGHT, torch.zeros(6)) for p in small_pieces()]
    assert "b/weight: BF16[5], not F32[6]" in refusal(path, reshaped)


def trained(weight, master=None, moment=torch.float32):
    pieces = [
        whole("w", WEIGHT, weight),
        whole("w", "exp_avg", torch.ones(3, dtype=moment)),
        whole("w", STEP, torch.tensor(1.0)),
    ]
    return pieces if master is None else [*pieces, whole("w", MASTER, master)]


FINE = torch.tensor([1.0001, 2.0002, 3.0003])


def test_the_best_precision_that_was_saved_is_used(tmp_path):
    with_master = save(tmp_path / "a", 1, trained(FINE.bfloat16(), FINE))
    read_checkpoint(with_master, target := trained(torch.zeros(3)))
    assert torch.equal(target[0].view, FINE)
    without = save(tmp_path / "b", 1, trained(FINE))
    read_checkpoint(without, target := trained(torch.zeros(3).bfloat16(), torch.zeros(3)))
    assert torch.equal(target[0].view, FINE.bfloat16())
    assert torch.equal(target[3].view, FINE)


def test_precision_is_not_lost_without_a_word(tmp_path):
    path = save(tmp_path, 1, trained(FINE))
    assert "w/weight: F32[3], not BF16[3]" in refusal(path, trained(FINE.bfloat16()))
    assert "w/exp_avg: F32[3], not BF16[3]" in refusal(path, trained(FINE, moment=torch.bfloat16))
    whole_numbers = [whole("w", WEIGHT, torch.zeros(3, dtype=torch.int64))]
    path = save(tmp_path, 2, whole_numbers)
    assert "not F32" in refusal(path, [whole("w", WEIGHT, torch.zeros(3))])


def test_a_shared_step_count_is_the_largest_of_its_parameters(tmp_path):
    weight = whole("a", WEIGHT, torch.zeros(1))
    path = save(tmp_path, 1, [weight, whole("a", STEP, torch.tensor(0.0)), whole("b", STEP, torch.tensor(9.0))])
    shared = torch.tensor(5.0)
    read_checkpoint(path, [weight, whole("b", STEP, shared), whole("a", STEP, shared)])
    assert shared.item() == 9


def test_failures_leave_no_trace_and_the_last_one_good(tmp_path):
    good = save(tmp_path, 1)
    incomplete = [Piece(name="w", key=WEIGHT, shape=(9,), start=2, view=torch.zeros(3))]
    with pytest.raises(CheckpointError, match=r"w/weight\[0:2\], w/weight\[5:9\]"):
        save(tmp_path, 2, incomplete)
    with pytest.raises(CheckpointError, match="JSON"):
        save(tmp_path, 2, state={"a set": {1}})
    with pytest.raises(CheckpointError, match="complex64"):
        save(tmp_path, 2, [whole("w", WEIGHT, torch.zeros(2, dtype=torch.complex64))])
    with pytest.raises(ZeroDivisionError):
        write_checkpoint(tmp_path, step=2, pieces=small_pieces(), state={}, write_model_files=lambda path: 1 / 0)
    assert os.listdir(tmp_path) == [good.name]


def test_a_disk_without_room_is_said_before_anything_is_written(tmp_path):
    petabyte = torch.zeros(1).expand(2**48)
    with pytest.raises(ResourceError, match="bytes needed"):
        save(tmp_path, 1, [whole("w", WEIGHT, petabyte)])
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_a_checkpoint_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be read or written"):
        save(tmp_path / "file", 1)


def test_no_checkpoint_at_all(tmp_path):
    assert "unfinished checkpoint, or none" in refusal(tmp_path, small_pieces())
    assert "unfinished checkpoint, or none" in refusal(tmp_path / "missing", small_pieces())
