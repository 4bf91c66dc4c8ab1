"""Each type is saved as `save_pretrained` saves it, whatever part of it a rank holds: names, order, types and bytes."""

import json

import pytest
import torch
from safetensors.torch import load

from hfdist.checkpoint import export_model, save_plan
from hfdist.checkpoint.hub_pieces import hub_pieces
from hfdist.models.names.hub_names import find_hub_names
from hfdist.strategies.pieces import list_pieces
from tests.zoo.hub_files import WRONG, differing, filled, how_saved, original_files
from tests.zoo.models import tiny_model

pytestmark = pytest.mark.zoo


def of_all_files(files):
    return {n: t for name, data in files.items() if name.endswith(".safetensors") for n, t in load(data).items()}


def test_its_files_are_those_of_save_pretrained(model_type, tmp_path, monkeypatch):
    model = tiny_model(model_type)
    names, pieces = find_hub_names(model), list(list_pieces(model, None))
    # Else a checkpoint with the model's own names could not be told from one with these.
    assert all(other.shapes != names.shapes for other in names.others)
    assert how_saved(model, tmp_path) != WRONG

    limit = max(piece.view.nbytes for piece in pieces)
    original = original_files(model, tmp_path / "originals", limit)
    monkeypatch.setattr(save_plan, "MAX_MODEL_FILE_BYTES", limit)
    export_model(tmp_path / "owns", pieces, lambda folder: None, names=names)
    owns = {path.name: path.read_bytes() for path in (tmp_path / "owns").iterdir()}
    index, of_original = (json.loads(files["model.safetensors.index.json"]) for files in (owns, original))
    assert index["metadata"] == of_original["metadata"]
    # transformers counts tensors once that it has cut from one, so that its files may be larger than the limit.
    assert owns == original or names.others
    assert not differing(of_all_files(owns), of_all_files(original))

    whole = filled(hub_pieces(pieces, names))
    with torch.no_grad():
        for piece in hub_pieces(pieces, names):
            piece.view.zero_()
        assert not any(piece.view.any() for piece in pieces)
        for piece in hub_pieces(pieces, names):
            piece.view.copy_(piece.of_whole(whole[piece.name]))
    assert not differing(filled(hub_pieces(pieces, names)), whole)
