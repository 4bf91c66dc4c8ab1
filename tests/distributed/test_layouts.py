"""The one law: a layout changes speed and memory, never the mathematics."""

import pytest
import torch

from tests.distributed.runs import eval_losses, losses, pretrain, weights

pytestmark = pytest.mark.distributed

LAYOUTS = [
    ("ddp", 2),
    ("zero1", 2),
    ("zero2", 2),
    ("zero3", 2),
    ("zero3_offload", 2),
    ("zero2", 4),
    ("ddp", 4),
    ("zero3_offload", 1),
    ("pipeline", 2),
    ("pipeline", 4),
    ("pipeline_zero1", 4),
]


@pytest.fixture(scope="module")
def single(tmp_path_factory, cache_dir):
    """The reference: one process, no sharding."""
    return pretrain(tmp_path_factory.mktemp("single"), 1, "strategy=single", "train.eval_every=10")


@pytest.mark.parametrize(("strategy", "num_processes"), LAYOUTS)
def test_same_losses_and_weights_as_one_process(single, tmp_path, strategy, num_processes, record_property):
    run = pretrain(tmp_path, num_processes, f"strategy={strategy}", "train.eval_every=10")
    ours, reference = losses(run), losses(single)
    assert len(ours) == len(reference) == 20
    worst = max(abs(a - b) / b for a, b in zip(ours, reference, strict=True))
    record_property("largest_relative_difference", worst)
    assert worst < 1e-5
    assert reference[-1] < reference[0] - 0.3
    assert eval_losses(run) == pytest.approx(eval_losses(single), rel=1e-5)
    assert_same_weights(run, single)


def assert_same_weights(run, single):
    """By name, after all steps."""
    theirs, references = weights(run), weights(single)
    assert theirs.keys() == references.keys()
    for name, reference in references.items():
        assert (theirs[name] - reference).norm() / reference.norm() < 1e-5, name


def test_the_comparison_can_fail(single, tmp_path):
    """Another seed of the weights must show: otherwise the tests above prove nothing."""
    run = pretrain(tmp_path, 2, "strategy=ddp", "train.seed=1", "train.max_steps=3")
    assert max(abs(a - b) / b for a, b in zip(losses(run), losses(single)[:3], strict=True)) > 1e-4


@pytest.mark.parametrize("micro_batch_size", [2, 4])
def test_the_micro_batch_size_changes_nothing(single, tmp_path, micro_batch_size):
    run = pretrain(
        tmp_path, 2, "strategy=ddp", f"train.micro_batch_size={micro_batch_size}", "train.eval_micro_batch_size=3"
    )
    assert losses(run) == pytest.approx(losses(single), rel=1e-5)
    assert eval_losses(run)[-1] == pytest.approx(eval_losses(single)[-1], rel=1e-5)


@pytest.mark.parametrize(
    ("strategy", "num_processes", "precision"),
    [("single", 1, "bf16"), ("single", 1, "fp16"), ("ddp", 2, "bf16"), ("ddp", 2, "fp16"), ("zero2", 2, "bf16"),
     ("zero3", 2, "bf16"), ("pipeline", 2, "bf16"), ("pipeline", 4, "fp16"), ("pipeline_zero1", 4, "bf16"),
     ("pipeline_zero1", 4, "fp16")],
)  # fmt: skip
def test_half_precision_learns_and_stays_near_float32(single, tmp_path, strategy, num_processes, precision):
    run = pretrain(tmp_path, num_processes, f"strategy={strategy}", f"train.precision={precision}")
    ours, reference = losses(run), losses(single)
    assert ours[-1] < ours[0] - 0.3
    assert ours == pytest.approx(reference, rel=0.02)
    assert ours != reference
    exported = weights(run)
    assert all(torch.isfinite(tensor).all() for tensor in exported.values())


@pytest.mark.parametrize(
    ("strategy", "num_processes", "override"),
    [
        ("ddp", 2, "train.gradient_checkpointing=true"),
        ("zero3", 2, "train.gradient_checkpointing=true"),
        ("pipeline", 2, "train.gradient_checkpointing=true"),
        ("pipeline", 2, "train.compile=blocks"),
        ("pipeline", 2, "strategy.balance=measured"),
        ("pipeline", 2, "strategy.blocks_per_stage=[1,1]"),
        ("single", 1, "train.compile=blocks"),
        ("single", 1, "model.attention=eager"),
    ],
)
def test_ways_to_save_memory_or_time_change_nothing(single, tmp_path, strategy, num_processes, override):
    run = pretrain(tmp_path, num_processes, f"strategy={strategy}", override)
    assert losses(run) == pytest.approx(losses(single), rel=1e-5)


@pytest.mark.parametrize(("strategy", "num_processes"), [("ddp", 2), ("zero2", 2), ("zero3", 2), ("pipeline", 2)])
def test_pretrained_weights_start_and_train_alike(single, tmp_path, strategy, num_processes):
    """From the folder that another run has exported, as from any Hub model."""
    start = ("model=hub", f"model.name={single / 'model'}", "train.max_steps=3")
    reference = pretrain(tmp_path / "single", 1, "strategy=single", *start)
    run = pretrain(tmp_path / strategy, num_processes, f"strategy={strategy}", *start)
    assert losses(run) == pytest.approx(losses(reference), rel=1e-5)
    # Better than random weights, and not what they would give.
    assert losses(reference)[0] < losses(single)[0] - 0.2
    for name, tensor in weights(reference).items():
        assert torch.allclose(weights(run)[name], tensor, rtol=1e-5, atol=1e-6), name
