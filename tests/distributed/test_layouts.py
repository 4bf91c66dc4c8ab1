"""The one law: a layout changes speed and memory, never the mathematics.

Each value of each axis comes once, with the layout in which it is most likely to fail; schedules of pipelines are in
test_pipeline.py, tensor ranks and several axes in test_tensor.py and test_pipeline_mesh.py, starts from weights in
test_adapters.py.
"""

from importlib.util import find_spec

import pytest
import torch
from torch._inductor import config as inductor_config

from tests.distributed.runs import eval_losses, losses, pretrain, weights
from tests.marks import many

pytestmark = pytest.mark.distributed

# In so few steps the model learns what the comparison needs only at a high rate.
STEPS = ("train.max_steps=6", "optimizer.lr=1e-2")
needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
DEEPER = ("model.config.num_hidden_layers=4",)


@pytest.fixture(scope="module")
def single(tmp_path_factory, cache_dir):
    """The reference: one process, no sharding."""
    return pretrain(tmp_path_factory.mktemp("single"), 1, "strategy=single", *STEPS, "train.eval_every=3")


@pytest.fixture
def aot_eager(monkeypatch):
    """The compiler's front end alone: what follows takes half a minute on a CPU: `make matrices`."""
    compiler = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compiler(module, backend="aot_eager"))


def train(folder, num_processes, strategy, *overrides):
    # Without data ranks there are many micro batches.
    rows = f"train.micro_batch_size={2 if num_processes == 2 else 1}"
    return pretrain(folder, num_processes, *f"strategy={strategy}".split(), *STEPS, rows, *overrides)


@pytest.mark.parametrize(
    ("strategy", "num_processes"),
    [
        ("ddp train.micro_batch_size=4 train.eval_micro_batch_size=3", 2),
        *(many("ddp", 4), many("zero1", 2), many("zero2", 2), many("zero3", 2)),
        *(many("zero3_offload", 2), many("hsdp", 4), many("long_context", 2)),
        *(many("pipeline_zero1", 4), ("fsdp2 strategy.pipeline=2", 4)),
        *(many("tensor", 2), many("pipeline_zero1 strategy.context=2", 8), many("3d", 8)),
    ],
)
def test_same_losses_and_weights_as_one_process(single, tmp_path, strategy, num_processes):
    run = train(tmp_path, num_processes, *strategy.split(), "train.eval_every=3")
    assert len(losses(run)) == 6
    assert losses(run) == pytest.approx(losses(single), rel=1e-5)
    assert losses(single)[-1] < losses(single)[0] - 0.3
    assert eval_losses(run) == pytest.approx(eval_losses(single), rel=1e-5)
    theirs, references = weights(run), weights(single)
    assert theirs.keys() == references.keys()
    for name, reference in references.items():
        assert (theirs[name] - reference).norm() / reference.norm() < 1e-5, name


@pytest.mark.many  # how far two runs may differ is in tests/unit/test_parity.py
def test_the_comparison_can_fail(single, tmp_path):
    """Another seed of the weights must show: otherwise the tests above prove nothing."""
    run = train(tmp_path, 1, "single", "train.seed=1")
    assert max(abs(a - b) / b for a, b in zip(losses(run), losses(single), strict=True)) > 1e-4


@pytest.mark.parametrize(
    ("strategy", "num_processes", "overrides"),
    [
        ("zero3", 2, ["train.gradient_checkpointing=true", "model.attention=varlen"]),
        ("pipeline", 2, ["train.gradient_checkpointing=true", "strategy.balance=measured", "model.attention=varlen"]),
        many("pipeline", 2, ["train.compile=blocks", "strategy.schedule=zbv", *DEEPER]),
        many("hsdp", 4, ["train.gradient_checkpointing=true", "train.activation_offload=true", "strategy.offload=cpu"]),
        many("3d", 8, ["train.gradient_checkpointing=true", "model.loss=chunked", "strategy.schedule=zbv", *DEEPER]),
        many("pipeline", 4, ["train.compile=blocks", "model.loss=chunked", "strategy.context=2"]),
        many("tensor", 2, ["train.compile=blocks"]),
        ("fsdp2", 2, ["train.compile=blocks", "strategy.reshard=false", "strategy.prefetch=2"]),
        many(
            "long_context",
            4,
            ["strategy.data=2", "strategy.context_method=gather", "train.gradient_checkpointing=true"],
        ),
        many("ddp", 2, ["strategy.min_data=1", "strategy.context=2", "train.compile=blocks", "model.loss=chunked"]),
        many("fsdp2", 4, ["train.compile=blocks", "strategy.pipeline=2", "strategy.schedule=dualpipev", *DEEPER]),
        # Its masks are transformers' own.
        many("single", 1, ["model.attention=eager"]),
        ("long_context", 2, ["model.attention=varlen", "strategy.context_method=ulysses"]),
        many("tensor", 2, ["model.attention=varlen"]),
        many("fsdp2", 2, ["model.attention=varlen", "train.gradient_checkpointing=true", "train.recompute=cheap"]),
    ],
)
def test_ways_to_save_memory_or_time_change_nothing(single, tmp_path, aot_eager, strategy, num_processes, overrides):
    run = train(tmp_path / "run", num_processes, strategy, *overrides)
    layers = [override for override in overrides if "num_hidden_layers" in override]
    reference = train(tmp_path / "single", 1, "single", *layers) if layers else single
    assert losses(run) == pytest.approx(losses(reference), rel=1e-5)
    assert eval_losses(run)[-1] == pytest.approx(eval_losses(reference)[-1], rel=1e-5)


@pytest.mark.many  # what follows the front end is torch's alone, and takes half a minute
def test_compiled_blocks_and_a_loss_in_chunks_change_nothing(single, tmp_path):
    """With the compiler that a user gets, but for its other processes, each of which imports torch."""
    settings = ("strategy=single", *STEPS, "train.compile=blocks", "model.loss=chunked")
    # Not by monkeypatch, which would leave the config without this key.
    with inductor_config.patch(compile_threads=1):
        run = pretrain(tmp_path, 1, *settings, timeout_seconds=280)
    assert losses(run) == pytest.approx(losses(single), rel=1e-5)


@pytest.mark.parametrize(
    ("strategy", "num_processes", "precision"),
    [
        many("ddp", 2, "fp16"),
        # test_prove.py and test_numerics.py train in bf16.
        many("zero3", 2, "bf16"),
        many("long_context", 2, "bf16"),
        many("tensor", 2, "fp16"),
        ("pipeline", 2, "fp16"),
        many("pipeline_zero1", 4, "fp16"),
        many("3d", 8, "fp16"),
        many("pipeline strategy.context=2", 4, "bf16"),
        # Another run of it is compared below.
        pytest.param("fsdp2", 2, "fp8", marks=[needs_torchao, pytest.mark.many]),
    ],
)
def test_half_precision_learns_and_stays_near_float32(single, tmp_path, strategy, num_processes, precision):
    run = train(tmp_path, num_processes, *strategy.split(), f"train.precision={precision}", "model.loss=auto")
    ours, reference = losses(run), losses(single)
    assert ours[-1] < ours[0] - 0.3
    assert ours == pytest.approx(reference, rel=0.02)
    assert ours != reference
    assert all(torch.isfinite(tensor).all() for tensor in weights(run).values())


def train_briefly(folder, num_processes, strategy, precision):
    few = ("train.max_steps=5", "optimizer.eps=1e-6")
    return weights(train(folder, num_processes, strategy, f"train.precision={precision}", *few))


@pytest.fixture(scope="module")
def float8(tmp_path_factory, cache_dir):
    """Weights of one process that computes in float8."""
    return train_briefly(tmp_path_factory.mktemp("float8"), 1, "single", "fp8")


@needs_torchao
@pytest.mark.parametrize(
    ("strategy", "num_processes", "precision"),
    [("fsdp2", 2, "fp8"), many("pipeline", 2, "fp8"), many("long_context", 2, "fp8"), ("single", 1, "bf16")],
)
def test_float8_rounds_alike_in_every_layout(float8, tmp_path, strategy, num_processes, precision):
    """Only what bfloat16 rounds in another order differs; what is computed in bfloat16 differs by more."""
    found = train_briefly(tmp_path, num_processes, strategy, precision)
    difference = max(float((tensor - float8[name]).norm() / tensor.norm()) for name, tensor in found.items())
    assert difference < 0.02 if precision == "fp8" else difference > 0.04
