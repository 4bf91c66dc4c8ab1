"""What a batch does not use stays in the model as it was, and in what is saved, in every layout."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, LlamaForCausalLM

import hfdist
from hfdist.checkpoint.piece import WEIGHT, Piece
from hfdist.checkpoint.whole import check_holds_whole
from hfdist.config.strategy import Schedule
from hfdist.errors import CheckpointError
from hfdist.models.initialize import initialize_by_name
from hfdist.testing import run_ranks
from tests.distributed.trainers import TINY, make_strategy, make_trainer, on_ranks
from tests.marks import many
from tests.zoo.models import tiny_model

pytestmark = pytest.mark.distributed

SEEING = ("gemma3", "got_ocr2", "phi4_multimodal")
LAYOUTS = {
    "fsdp2": {"sharding": "fsdp2"},
    "stages": {"pipeline": 2, "schedule": "interleaved_1f1b", "stages_per_rank": 2},
    # After these accelerate stays with DeepSpeed.
    "zero2": {"sharding": "zero2"},
}
MORE_LAYOUTS = {"ddp": {}, "pipeline": {"pipeline": 2}, "zero1": {"sharding": "zero1"}}
MESHES = {
    "pipeline x fsdp2": {"pipeline": 2, "sharding": "fsdp2"},
}
MORE_MESHES = {
    "tensor x fsdp2": {"tensor": 2, "sharding": "fsdp2"},
    "pipeline x tensor": {"pipeline": 2, "tensor": 2},
    "pipeline x zero1": {"pipeline": 2, "sharding": "zero1"},
}


@pytest.mark.timeout(300)
def test_stages_hold_what_no_stage_needs():
    """Of classes with towers, of which text needs none."""
    for of_type in zip(*run_ranks(hold_all, 2, SEEING), strict=True):
        model = tiny_model(of_type[0][0], num_blocks=4)
        wanted = dict(model.named_parameters()) | {
            name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()
        }
        held = {name: value for _, own in of_type for name, value in own.items()}
        assert held.keys() == wanted.keys()
        assert all((held[name] == value.detach().numpy()).all() for name, value in wanted.items())
        # Each rank has its share of them.
        assert all(len(own) < len(wanted) for _, own in of_type)


def hold_all(kinds):
    strategy = hfdist.make_strategy(global_batch_size=2, pipeline=2)
    held = []
    for kind in kinds:
        engine = strategy.build(tiny_model(kind, num_blocks=4))
        held.append((kind, {piece.name: piece.view.numpy().copy() for piece in engine.weights()}))
        check_holds_whole(engine.weights(), strategy.whole)
    return held


class WithSpare(LlamaForCausalLM):
    """Has weights that its forward does not use."""

    def __init__(self, config):
        super().__init__(config)
        self.spare = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 24))
        self.spare.register_buffer("count", torch.arange(4.0))


def with_spare():
    model = WithSpare(AutoConfig.for_model("llama", **TINY | {"num_hidden_layers": 4}))
    initialize_by_name(model, 0)
    return model


def train(folder, layouts):
    for name, layout in layouts.items():
        trainer = make_trainer(
            folder / name.replace(" ", "_"),
            make_strategy(**layout),
            model=with_spare,
            # AdamW has the spare vectors.
            optimizer_cls_and_kwargs=(hfdist.MuonWithAdamW, {"lr": 1e-2, "weight_decay": 0.5, "eps": 1e-3}),
            arguments={
                "max_steps": 2,
                "save_strategy": "steps",
                "save_steps": 2,
            },
        )
        trainer.train()
        trainer.save_model()


def check(folder, name, before, whole):
    saved = folder / name.replace(" ", "_")
    for place in (saved, saved / "checkpoint-2"):
        weights = load_file(place / "model.safetensors")
        assert weights.keys() == whole.keys(), name
        for key, value in weights.items():
            if key.startswith("spare."):
                # Weight decay, too, passes by what has no gradient.
                assert torch.equal(value, before[key]), (name, key)
            else:
                assert not torch.equal(value, before[key]), (name, key)
                # Muon rounds to bfloat16.
                torch.testing.assert_close(value, whole[key], rtol=1e-2, atol=2e-3, msg=f"{name}: {key}")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("num_ranks", "layouts"),
    [
        pytest.param(2, LAYOUTS, id="2"),
        many(2, MORE_LAYOUTS, id="2, more"),
        many(4, MESHES, id="4"),
        many(4, MORE_MESHES, id="4, more"),
    ],
)
def test_what_no_gradient_reaches_is_saved_as_it_was(tmp_path, num_ranks, layouts):
    before = with_spare().state_dict()
    run_ranks(train, 1, tmp_path, {"whole": {}}, timeout_seconds=300)
    whole = load_file(tmp_path / "whole/model.safetensors")
    check(tmp_path, "whole", before, whole)
    run_ranks(train, num_ranks, tmp_path, layouts, timeout_seconds=600)
    for name in layouts:
        check(tmp_path, name, before, whole)


@pytest.mark.timeout(300)
def test_zero3_passes_by_what_no_gradient_reaches(tmp_path):
    """In a fork of its own: its models are made otherwise."""
    before = with_spare().state_dict()
    run_ranks(train, 2, tmp_path, {"zero3": {"sharding": "zero3"}}, timeout_seconds=300)
    weights = load_file(tmp_path / "zero3/model.safetensors")
    assert weights.keys() == before.keys()
    # DeepSpeed draws on each rank, so the values before are not these; rows that are drawn are never zeros.
    assert torch.equal(weights["spare.count"], before["spare.count"])


def test_schedules_with_stages_are_among_the_layouts():
    assert Schedule(LAYOUTS["stages"]["schedule"])


@on_ranks(2)
def test_a_lost_weight_is_named_before_it_is_missing_in_a_file():
    own = dist.get_rank()
    whole = {"a.weight": (4, 2), "b.weight": (2,), "c": (), "packed": (8,)}

    def piece(name, start=0, count=None, shape=None):
        shape = shape or whole[name]
        numel = torch.Size(shape).numel()
        view = torch.zeros(numel if count is None else count)
        return Piece(name=name, key=WEIGHT, shape=shape, start=start, view=view)

    shards = [piece("a.weight", 4 * own, 4), piece("c"), piece("packed", count=3)]
    check_holds_whole([*shards, piece("b.weight")], whole, packed={"packed"})
    with pytest.raises(CheckpointError, match=r"b\.weight"):
        check_holds_whole(shards, whole, packed={"packed"})
    with pytest.raises(CheckpointError, match=r"a.weight \(4 of 8 elements\)"):
        check_holds_whole([*(shards[1:] if own else shards), piece("b.weight")], whole, packed={"packed"})
    with pytest.raises(CheckpointError, match="did not have"):
        check_holds_whole([*shards, piece("b.weight", shape=(3,)) if own else piece("b.weight")], whole, {"packed"})
    with pytest.raises(CheckpointError, match="different models"):
        check_holds_whole(shards[:2], whole if own else whole | {"d": (1,)})
