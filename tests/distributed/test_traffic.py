"""What a run counts of what its ranks send: by axis of the mesh, for any library that sends, beside closed forms."""

import json
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import TrainerCallback

from benchmarks.mesh.theory import Layout, Model, sent_bytes
from benchmarks.small_llama import make_trainer
from hfdist.collectives import gather_json, rank
from hfdist.models.loss import LossHead
from hfdist.records import RunRecorder, read_run
from hfdist.run.callbacks.traffic import Traffic
from hfdist.sent_bytes import _OPERATORS, SentBytes
from hfdist.testing import forget_parent, run_ranks
from hfdist.trainer.run_options import RunOptions
from tests.marks import many

pytestmark = pytest.mark.distributed

LLAMA = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}  # fmt: skip
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}
GLOBAL_BATCH, MICRO_BATCH, NUM_TOKENS, NUM_STEPS = 8, 2, 64, 4
FSDP = {"sharding": "fsdp2"}
HSDP = FSDP | {"replicate": 2}
WEIGHT_BYTES = 4 * Model.of(LLAMA).parameters


def formula(data, sizes=LLAMA, **degrees):
    """By axis, as `benchmarks/mesh/theory.py` has it."""
    step = {"micro_batches": GLOBAL_BATCH // MICRO_BATCH // data, "sequences": MICRO_BATCH, "tokens": NUM_TOKENS}
    sent = sent_bytes(Model.of(sizes), Layout(**step | degrees))
    by_axis = {}
    for (axis, kind), num_bytes in sent.items():
        if axis in ("tokens", "sharded") or (axis in ("context", "expert") and kind == "all-reduce"):
            axis = "shard" if degrees.get("replicate", 1) > 1 else "data"
        # Micro batches of FSDP2: each gathers, and gives its gradients.
        times = step["micro_batches"] if axis in ("data", "shard") and degrees.get("is_fsdp") else 1
        by_axis[axis] = by_axis.get(axis, 0) + times * num_bytes
    return by_axis


# A ring of two ranks sends as much as the whole for an all-reduce, and half of it for the others.
EXPECTED = {
    "ddp": (2, {}, LLAMA, {"data": WEIGHT_BYTES}),
    "fsdp2": (2, FSDP, LLAMA, formula(2, shard=2, is_fsdp=True)),
    "tensor": (2, {"tensor": 2}, LLAMA, formula(1, tensor=2)),
    "context, ulysses": (2, {"context": 2, "context_method": "ulysses"}, LLAMA, formula(1, context=2)),
    "context, gather": (2, {"context": 2, "context_method": "gather"}, LLAMA, formula(1, context=2, gathers_keys=True)),
    "pipeline": (2, {"pipeline": 2}, LLAMA, formula(1, pipeline=2)),
    "expert": (2, {"expert": 2}, MIXTRAL, formula(2, MIXTRAL, shard=2, expert=2)),
    "hsdp": (4, HSDP, LLAMA, formula(4, shard=2, replicate=2, is_fsdp=True)),
    "pipeline and ddp": (4, {"pipeline": 2}, LLAMA, {"data": WEIGHT_BYTES / 2} | formula(2, pipeline=2)),
    # Of two micro batches, from the second stage on each gives its gradients.
    "zero1": (2, {"sharding": "zero1"}, LLAMA, {"data": (1 + 1) / 2 * WEIGHT_BYTES}),
    "zero2": (2, {"sharding": "zero2"}, LLAMA, {"data": (2 + 1) / 2 * WEIGHT_BYTES}),
    # All of this model's tensors are below the size from which ZeRO-3 gathers them again for each use.
    "zero3": (2, {"sharding": "zero3"}, LLAMA, {"data": (2 + 1) / 2 * WEIGHT_BYTES}),
}


class Save(TrainerCallback):
    """A thread that sends, as a save's does, and begins right before the step that is counted."""

    def __init__(self):
        self._group = dist.new_group(backend="gloo")
        self._thread = threading.Thread(target=self._send)

    def _send(self):
        tensor = torch.ones(WEIGHT_BYTES // 4)
        for _ in range(20):
            dist.all_reduce(tensor, group=self._group)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == NUM_STEPS - 1:
            self._thread.start()

    def wait(self):
        self._thread.join()


def train(names):
    found = {}
    for name in names:
        _, keys, sizes, _ = EXPECTED[name]
        forget_parent()
        folder = Path(gather_json(tempfile.mkdtemp())[0])
        trainer = make_trainer(
            str(folder), keys, sizes, batch=(GLOBAL_BATCH, MICRO_BATCH), sequence_tokens=NUM_TOKENS,
            max_steps=NUM_STEPS, callbacks=[], options=RunOptions(loss_head=LossHead()),
        )  # fmt: skip
        recorder = RunRecorder(folder, {}, dist.get_world_size()) if rank() == 0 else None
        save = Save()
        trainer.add_callback(save)
        trainer.add_callback(Traffic(trainer.strategy.topology, recorder, wait=save.wait))
        trainer.train()
        if rank() == 0:
            found[name] = json.loads((folder / "run.json").read_text())["traffic"]
            sent = {axis: of_axis["sent_bytes"] for axis, of_axis in found[name]["axes"].items()}
            assert read_run(folder).sent_bytes() == sent
    return found


# Of the others, plans say in test_plan_traffic.py what is sent.
ALWAYS = ("fsdp2", "context, ulysses", "pipeline and ddp", "zero1")


@pytest.fixture(scope="module")
def counted(request):
    """Of the cases that are asked for."""
    own = (item for item in request.session.items if item.path == request.path)
    asked = {call.params["name"] for item in own if (call := getattr(item, "callspec", None))}
    found = {}
    # accelerate stays with DeepSpeed in a process.
    for num_ranks, has_deepspeed in ((2, False), (4, False), (2, True)):
        kinds = {n: (case[0], n.startswith("zero")) for n, case in EXPECTED.items() if n in asked}
        names = [n for n, kind in kinds.items() if kind == (num_ranks, has_deepspeed)]
        if names:
            found |= run_ranks(train, num_ranks, names, timeout_seconds=240)[0]
    return found


@pytest.mark.parametrize("name", [name if name in ALWAYS else many(name) for name in EXPECTED])
def test_a_step_sends_along_each_axis_what_the_closed_form_says(counted, name):
    expected = EXPECTED[name][3]
    assert counted[name]["step"] == NUM_STEPS
    axes = counted[name]["axes"]
    assert {axis: axes[axis]["sent_bytes"] for axis in expected} == pytest.approx(expected, rel=0.05)
    # The count of targets, the norm and checks.
    rest = sum(of_axis["sent_bytes"] for axis, of_axis in axes.items() if axis not in expected)
    assert rest < 0.01 * sum(expected.values())
    for of_axis in axes.values():
        assert sum(of_axis["kinds"].values()) == of_axis["sent_bytes"] >= of_axis["mean_bytes"]


def call_both():
    """CPU seconds of a collective without the counting and with it, in turns."""
    tensor = torch.ones(8)

    def cost():
        begin = time.thread_time()
        for _ in range(200):
            dist.all_reduce(tensor)
        return (time.thread_time() - begin) / 200

    plain, counted = [], []
    for _ in range(4):
        plain.append(cost())
        with SentBytes() as sent:
            counted.append(cost())
        assert sent.num_bytes.total() == 200 * tensor.nbytes
        assert sum(sent.calls.values()) == 200
    return min(plain), min(counted)


def test_counting_a_call_costs_well_below_a_millisecond():
    for plain, counted in run_ranks(call_both, 2):
        assert counted - plain < 500e-6


def test_operators_have_the_arguments_that_are_read():
    """Torch does not document them: a new version may change them."""
    for name, known in _OPERATORS.items():
        arguments = getattr(torch.ops.c10d, name).default._schema.arguments
        assert str(arguments[known.group].type).endswith("ProcessGroup"), name
        assert "Tensor" in str(arguments[known.whole].type), name
    sends = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("c10d::")}
    silent = {"barrier", "monitored_barrier_", "recv_", "recv_any_source_", "check_for_nan"}
    assert {name.removeprefix("c10d::") for name in sends} == {*_OPERATORS, *silent}
