"""Weights under the names of the Hub's files: what is read of older checkpoints, and of models with other names."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hfdist.checkpoint import read_checkpoint
from hfdist.checkpoint.piece import MASTER, STEP
from hfdist.checkpoint.save_plan import OPTIMIZER_STEM
from hfdist.models.names import hub_names
from hfdist.models.names.follow import follow
from hfdist.models.names.hub_names import find_hub_names
from hfdist.models.names.strides import UnfollowedError
from hfdist.strategies.pieces import list_pieces
from tests.unit.checkpoint.pieces import save, whole
from tests.zoo.hub_files import differing, filled
from tests.zoo.models import tiny_model

EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"
GATE = "model.layers.0.block_sparse_moe.experts.0.w1.weight"


@pytest.fixture(scope="module")
def mixtral():
    return tiny_model("mixtral", 1)


def pieces_of(model):
    return list(list_pieces(model, None))


def emptied(pieces):
    return [replace(piece, view=torch.zeros_like(piece.view)) for piece in pieces]


def test_names_of_another_start_that_cannot_be_followed_leave_those_of_this_one(monkeypatch, caplog, tmp_path):
    made = tiny_model("mixtral", 1)
    made.save_pretrained(tmp_path)
    model, wanted = AutoModelForCausalLM.from_pretrained(tmp_path), find_hub_names(made)
    revert = hub_names.revert_weight_conversion

    def revert_or_mix(model, tensors):
        """What the class has, where the model was not read with it, is no move of elements."""
        if "_weight_conversions" in vars(model):
            return revert(model, tensors)
        return {name: tensor * 2 for name, tensor in tensors.items()}

    monkeypatch.setattr(hub_names, "revert_weight_conversion", revert_or_mix)
    assert find_hub_names(model).shapes == wanted.shapes
    assert not caplog.records


def test_a_checkpoint_with_the_models_own_names_is_read(mixtral, tmp_path):
    path, read = save(tmp_path, 1, pieces_of(mixtral)), emptied(pieces_of(mixtral))
    assert EXPERTS in load_file(path / "model.safetensors")
    read_checkpoint(path, read, names=find_hub_names(mixtral))
    assert not differing(filled(read), filled(pieces_of(mixtral)))


def test_masters_have_the_names_of_weights(mixtral, tmp_path):
    names = find_hub_names(mixtral)
    masters = [replace(piece, key=MASTER) for piece in pieces_of(mixtral)]
    rounded = [replace(piece, view=piece.view.bfloat16()) for piece in pieces_of(mixtral)]
    steps = [whole(piece.name, STEP, torch.tensor(1.0)) for piece in masters]
    path = save(tmp_path, 1, [*rounded, *masters, *steps], names=names)
    [state] = path.glob(f"{OPTIMIZER_STEM}-*")
    assert f"{GATE}/master" in load_file(state)
    # Best are those in float32, whatever this run keeps.
    read = emptied(pieces_of(mixtral))
    read_checkpoint(path, [*read, *steps], names=names)
    assert not differing(filled(read), filled(masters))
    read = emptied(masters)
    read_checkpoint(
        save(tmp_path, 2, [*pieces_of(mixtral), *steps], names=names), [*emptied(rounded), *read, *steps], names=names
    )
    assert not differing(filled(read), filled(masters))


def test_a_model_keeps_the_names_that_it_was_read_with(mixtral, tmp_path):
    mixtral.save_pretrained(tmp_path / "own names", save_original_format=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "own names")
    model.save_pretrained(tmp_path / "again")
    names = find_hub_names(model)
    assert EXPERTS in names.shapes
    assert names.shapes.keys() == load_file(tmp_path / "again/model.safetensors").keys()
    # A start from a config has written others.
    read = emptied(pieces_of(mixtral))
    read_checkpoint(save(tmp_path, 1, pieces_of(mixtral), names=find_hub_names(mixtral)), read, names=names)
    assert not differing(filled(read), filled(pieces_of(mixtral)))


def test_what_save_pretrained_leaves_out_is_kept_with_the_state(tmp_path):
    model = tiny_model("mixtral", 1)
    # As classes have it whose positions are computed.
    model._keys_to_ignore_on_save = ["model.norm.weight"]
    path = save(tmp_path, 1, pieces_of(model), names=find_hub_names(model))
    model.save_pretrained(tmp_path / "original")
    assert (path / "model.safetensors").read_bytes() == (tmp_path / "original/model.safetensors").read_bytes()
    [state] = path.glob(f"{OPTIMIZER_STEM}-*")
    assert load_file(state).keys() == {"model.norm.weight/weight"}
    read = emptied(pieces_of(model))
    read_checkpoint(path, read, names=find_hub_names(model))
    assert not differing(filled(read), filled(pieces_of(model)))


def test_elements_are_followed_where_they_only_move():
    shapes = {"a": (4, 6), "b": (4, 6), "c": (2, 6)}

    def convert(given):
        joined = torch.cat([given["a"], given["b"]], dim=0)
        rows = given["a"].unbind(0)
        gate, up = joined.view(4, 2, 6).transpose(0, 1).reshape(8, 6).contiguous().chunk(2)
        return {
            "gate": gate,
            "up": up.transpose(0, 1),
            "second": rows[1],
            "all": torch.cat([given["a"], given["c"]], dim=0),
            "stack": torch.stack([given["a"], given["b"]], dim=1),
            # As gte's files have the gate after what it gates.
            "backwards": torch.cat([given["b"], given["a"]]),
            "halves": torch.cat(given["a"].chunk(2)[::-1]),
            "twice": torch.cat([given["c"], given["c"]]),
            # Each step from the first row stays in `a`, but not both together.
            "corner": torch.stack([torch.stack([rows[1], rows[2]]), torch.stack([rows[3], given["b"].unbind(0)[0]])]),
        }

    values, start = {}, 0
    for name, shape in shapes.items():
        values[name] = torch.arange(start, start := start + shape[0] * shape[1]).view(shape)
    made, wanted = follow(shapes, convert), convert(dict(values))
    for name, (shape, blocks) in made.items():
        assert shape == tuple(wanted[name].shape)
        found = torch.full((wanted[name].numel(),), -1)
        for block in blocks:
            sizes, sources, targets = zip(*block.dims, strict=True)
            source = values[block.name].flatten().as_strided(sizes, sources, block.source)
            found.as_strided(sizes, targets, block.target).copy_(source)
        assert torch.equal(found.view(shape), wanted[name]), name


def zero(tensor):
    tensor[:] = 0
    return tensor


@pytest.mark.parametrize("convert", [lambda a: a * 2, lambda a: a.view(6, 4).t().reshape(4, 6).chunk(3, 1)[0], zero])
def test_what_more_is_done_is_not_followed(convert):
    with pytest.raises(UnfollowedError):
        follow({"a": (4, 6)}, lambda given: {"a": convert(given["a"])})
