"""FSDP2 beyond the numbers of test_layouts.py: what each rank starts from, holds between steps, and refuses."""

import json

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import TrainingArguments

import hfdist
from hfdist.errors import ConfigError
from hfdist.strategies.fsdp import FsdpEngine
from hfdist.testing import RankFailed, run_ranks
from hfdist.trainer.checkpointing.checkpointer import Checkpointer
from tests.distributed.test_optimizers import saved
from tests.distributed.trainers import GLOBAL_BATCH, STEPS, make_model, on_ranks, uneven_items
from tests.marks import many

pytestmark = pytest.mark.distributed


def make_strategy(**layout):
    return hfdist.make_strategy(sharding="fsdp2", global_batch_size=GLOBAL_BATCH, micro_batch_size=1, **layout)


def drawn_apart(replicate):
    """Each rank draws weights of its own, as a program without a seed does."""
    torch.manual_seed(dist.get_rank())
    model = make_model()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    first = {name: parameter.detach().numpy().copy() for name, parameter in model.named_parameters()}
    model = make_strategy(replicate=replicate).build(model).model
    return first, {name: parameter.full_tensor().detach().numpy() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("replicate", [many(1), 2])
def test_all_ranks_start_from_the_weights_of_rank_0(replicate):
    found = run_ranks(drawn_apart, 4, replicate)
    drawn = found[0][0]
    for _, whole in found:
        assert all(np.array_equal(whole[name], tensor) for name, tensor in drawn.items())
    assert not all(np.array_equal(found[1][0][name], tensor) for name, tensor in drawn.items())


def make_trainer(folder, **more):
    strategy = make_strategy(**more.pop("layout", {}))
    fields = {"max_steps": STEPS, "use_cpu": True, "report_to": [], "save_strategy": "steps", "save_steps": 1}
    fields |= more.pop("arguments", {})
    args = TrainingArguments(str(folder), **fields, **strategy.training_arguments())
    items = uneven_items()
    return hfdist.Trainer(make_model(), args, strategy=strategy, train_dataset=items, eval_dataset=items[:4], **more)


def evaluated_by_the_original(folder):
    """Its loop calls the model by itself, for predictions, before each save."""
    make_trainer(folder / "plain").train()
    evaluating = {"eval_strategy": "steps", "eval_steps": 1}
    trainer = make_trainer(folder / "with", arguments=evaluating, compute_metrics=lambda predictions: {})
    trainer.train()
    held = [parameter.to_local() for parameter in trainer.model.parameters()]
    num_held = sum(tensor.untyped_storage().nbytes() // tensor.itemsize for tensor in held)
    return num_held / sum(parameter.numel() for parameter in make_model().parameters())


def test_predictions_leave_shards_behind_and_checkpoints_whole(tmp_path):
    assert max(run_ranks(evaluated_by_the_original, 2, tmp_path)) < 0.52
    plain, evaluated = (saved(tmp_path / name) for name in ("plain", "with"))
    assert evaluated.keys() == plain.keys()
    assert all(torch.equal(evaluated[name], tensor) for name, tensor in plain.items())
    path = tmp_path / "with" / f"checkpoint-{STEPS}"
    # By its class a Hub folder is opened, and the Trainer shifts labels.
    assert json.loads((path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.many  # the test of the test
def test_without_the_hook_the_root_stays_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(FsdpEngine, "_after_forward", lambda *_: None)
    monkeypatch.setattr(FsdpEngine, "_reshard", lambda *_: None)
    # It looks at the state dict, by which FSDP2 frees the root, too.
    monkeypatch.setattr(Checkpointer, "_check_holds_whole", lambda *_: None)
    with pytest.raises(RankFailed):
        run_ranks(evaluated_by_the_original, 2, tmp_path)


@on_ranks(4)
def test_replicas_are_reduced_once_a_step(tmp_path):
    count = 0
    accumulating = FsdpEngine.accumulating

    def counted(engine):
        nonlocal count
        count += 1
        return accumulating(engine)

    FsdpEngine.accumulating = counted
    trainer = make_trainer(tmp_path, layout={"replicate": 2})
    trainer.train()
    num_microbatches = trainer.strategy.batch.num_microbatches
    assert num_microbatches > 1
    assert count == STEPS * (num_microbatches - 1)


def offloaded():
    # A stand-in for a device: what is moved there is no longer on the CPU.
    engine = make_strategy(offload="cpu").build(make_model())
    policies = {type(module._get_fsdp_state()._fsdp_param_group.offload_policy) for module in engine._units}
    engine.model.to("meta")
    return policies, {parameter.to_local().device.type for parameter in engine.model.parameters()}


def test_offloaded_shards_stay_where_they_are():
    for policies, devices in run_ranks(offloaded, 2):
        assert policies == {CPUOffloadPolicy}
        assert devices == {"cpu"}


@on_ranks(1)
def test_one_rank_has_nothing_to_offload():
    with pytest.raises(ConfigError, match="one data rank has none") as caught:
        make_strategy(offload="cpu")
    assert caught.value.where == "make_strategy(offload)"


@on_ranks(2)
def test_a_parameter_without_a_dimension_is_refused_by_name():
    model = make_model()
    model.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ConfigError, match="single number without a dimension") as caught:
        make_strategy().build(model)
    assert caught.value.where == "scale"
