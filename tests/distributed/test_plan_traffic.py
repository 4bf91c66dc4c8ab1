"""What a plan says that a rank sends by axis, against what ranks send: counted at the collectives of a real step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.growth import training
from hfdist.config.batch import plan_batch
from hfdist.config.optimizer import OptimizerConfig, OptimizerName
from hfdist.config.strategy import ContextMethod, Schedule, Sharding, StrategyConfig
from hfdist.config.train import TrainConfig
from hfdist.models.loss import LossHead
from hfdist.optim.muon import MuonWithAdamW
from hfdist.optim.registry import stepped_whole
from hfdist.planning.timing.traffic import step_sizes, traffic
from hfdist.strategies.select import select_strategy
from hfdist.testing import run_ranks
from tests.marks import many

pytestmark = pytest.mark.distributed

BOUND = 0.05
TOKENS, SEQUENCES, MICROBATCHES = 64, 2, 2
LLAMA: dict[str, Any] = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4,
         "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": False}  # fmt: skip
INDIVISIBLE = LLAMA | {"hidden_size": 130, "intermediate_size": 351, "num_attention_heads": 5,
         "num_key_value_heads": 5}  # fmt: skip
MIXTRAL = LLAMA | {"model_type": "mixtral", "intermediate_size": 128, "num_local_experts": 4, "num_experts_per_tok": 2}


@dataclass(frozen=True, kw_only=True)
class Case:
    num_ranks: int = 2
    sizes: dict[str, Any] = field(default_factory=lambda: LLAMA)
    microbatches: int = MICROBATCHES
    keys: dict[str, Any]
    optimizer: OptimizerName = OptimizerName.adamw


FSDP: dict[str, Any] = {"sharding": "fsdp2"}
MUON = OptimizerName.muon
CASES = {
    "ddp": Case(keys={}),
    "zero1": Case(keys={"sharding": "zero1"}),
    "zero2": Case(keys={"sharding": "zero2"}),
    "zero3": Case(keys={"sharding": "zero3"}),
    "fsdp2": Case(keys=FSDP),
    "fsdp2, kept": Case(keys=FSDP | {"reshard": False}),
    "tensor": Case(keys={"tensor": 2}),
    "tensor, tokens shared": Case(keys={"tensor": 2, "sequence": True}),
    "tensor, outputs gathered": Case(keys={"tensor": 2}, sizes=INDIVISIBLE),
    "context, ulysses": Case(keys={"context": 2}),
    "context, gather": Case(keys={"context": 2, "context_method": "gather"}),
    "expert": Case(keys={"expert": 2}, sizes=MIXTRAL),
    "pipeline": Case(keys={"pipeline": 2}),
    "pipeline, tied": Case(keys={"pipeline": 2}, sizes=LLAMA | {"tie_word_embeddings": True}),
    "zbv": Case(keys={"pipeline": 2, "schedule": "zbv"}),
    "hsdp": Case(keys=FSDP | {"replicate": 2}, num_ranks=4),
    "pipeline, zero1": Case(keys={"pipeline": 2, "sharding": "zero1"}, num_ranks=4),
    "pipeline of 4": Case(keys={"pipeline": 4}, num_ranks=4, microbatches=4),
    "expert, fsdp2": Case(keys=FSDP | {"expert": 2}, sizes=MIXTRAL, num_ranks=4),
    "pipeline x tensor": Case(keys={"pipeline": 2, "tensor": 2}, num_ranks=4),
    "pipeline x tensor, tokens shared": Case(keys={"pipeline": 2, "tensor": 2, "sequence": True}, num_ranks=4),
    "fsdp2 x tensor": Case(keys=FSDP | {"tensor": 2}, num_ranks=4),
    "fsdp2, muon": Case(keys=FSDP, optimizer=MUON),
    "zero1, muon": Case(keys={"sharding": "zero1"}, sizes=LLAMA | {"num_hidden_layers": 3}, optimizer=MUON),
    "zero3, muon": Case(keys={"sharding": "zero3"}, optimizer=MUON),
    "expert, muon": Case(keys={"expert": 2}, sizes=MIXTRAL, optimizer=MUON),
    "fsdp2 x tensor, muon": Case(keys=FSDP | {"tensor": 2}, num_ranks=4, optimizer=MUON),
}


def work(case: Case) -> training.Work:
    topology = strategy_config(case).topology(case.num_ranks)
    return training.Work(
        layout=case.keys,
        sizes=case.sizes,
        global_batch_size=case.microbatches * SEQUENCES * topology.data,
        sequence_tokens=TOKENS,
        num_steps=1,
        micro_batch_size=SEQUENCES,
        loss_head=LossHead(),
        optimizer=None if case.optimizer is not MUON else (MuonWithAdamW, {}),
    )


def strategy_config(case: Case) -> StrategyConfig:
    typed = dict(case.keys)
    kinds: dict[str, Any] = {"sharding": Sharding, "schedule": Schedule, "context_method": ContextMethod}
    typed |= {name: kind(typed[name]) for name, kind in kinds.items() if name in typed}
    return StrategyConfig(**typed)


def predict(case: Case) -> Counter[str]:
    config, train = strategy_config(case), TrainConfig()
    topology = config.topology(case.num_ranks)
    batch = plan_batch(
        global_batch_size=case.microbatches * SEQUENCES * topology.data,
        micro_batch_size=SEQUENCES,
        data_size=topology.data,
        sequence_length=TOKENS,
        lanes=topology.data,
    )
    strategy = select_strategy(config, train, topology=topology, batch=batch, device_type="cpu")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{"model_type": "llama"} | case.sizes))
    whole = stepped_whole(OptimizerConfig(name=case.optimizer), model)
    sizes = step_sizes(model, train, tensor=topology.tensor, is_gpu=False, stepped_whole=whole)
    sent: Counter[str] = Counter()
    for one in traffic(strategy, sizes, devices_per_machine=8):
        sent[one.axis] += one.sent_bytes
    return sent


def axis_of(mesh_axis: str, kind: str, keys: dict[str, Any]) -> str:
    """The name of an axis of the mesh as plans have it."""
    if mesh_axis in ("tensor", "pipeline", "replicate"):
        return mesh_axis
    if mesh_axis.startswith("(") and "tensor" in keys:
        # The ranks that together have a matrix.
        return "data x tensor"
    if mesh_axis in ("context", "expert") and kind != "all-reduce":
        return mesh_axis
    return "shard" if "replicate" in keys and mesh_axis.startswith("sharded") else "data"


def train_all(names: list[str]) -> dict[str, training.Costs]:
    return {name: training.train(work(CASES[name])) for name in names}


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest) -> dict[str, Counter[str]]:
    """Of the cases that are asked for."""
    found: dict[str, Counter[str]] = {}
    own = (item for item in request.session.items if item.path == request.path)
    asked = {call.params["name"] for item in own if (call := getattr(item, "callspec", None))}
    # DeepSpeed leaves its mark on a process.
    kinds = {name: (case.num_ranks, "zero" in str(case.keys)) for name, case in CASES.items() if name in asked}
    for num_ranks, has_zero in sorted(set(kinds.values())):
        names = [name for name, kind in kinds.items() if kind == (num_ranks, has_zero)]
        ranks = run_ranks(train_all, num_ranks, names, timeout_seconds=600)
        for name in names:
            most: Counter[str] = Counter()
            for rank in ranks:
                own: Counter[str] = Counter()
                for (axis, kind), sent in rank[name].axis_bytes.items():
                    own[axis_of(axis, kind, CASES[name].keys)] += sent
                most |= own
            found[name] = most
    return found


# test_traffic.py counts more of them, beside closed forms.
ALWAYS = ("zero2", "tensor, tokens shared", "context, gather", "expert", "pipeline, tied", "fsdp2, muon")


@pytest.mark.parametrize("name", [name if name in ALWAYS else many(name) for name in CASES])
def test_a_plan_says_what_a_rank_sends(measured, name):
    expected, sent = predict(CASES[name]), measured[name]
    total = expected.total()
    # Norms, counts of targets and checks are no part of a plan.
    large = {axis: num_bytes for axis, num_bytes in sent.items() if num_bytes > BOUND * total}
    assert large == pytest.approx({axis: n for axis, n in expected.items() if axis in large}, rel=BOUND)
    assert all(num_bytes <= BOUND * total for axis, num_bytes in expected.items() if axis not in large)
