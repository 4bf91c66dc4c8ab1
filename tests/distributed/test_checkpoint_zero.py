"""Where DeepSpeed keeps its state: every setting that moves it, saved in one and loaded into a single process."""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from hfdist.checkpoint import read_checkpoint
from hfdist.errors import CheckpointError
from hfdist.testing import run_ranks
from tests.distributed.checkpoint_engines import Replicated, Zero, write_config
from tests.unit.checkpoint.pieces import write_checkpoint

pytestmark = pytest.mark.distributed

HALF, END = 3, 6
OTHER_SEED = 1

# The tiny model's parameters are below every threshold: without persistence all of them are really cut.
SETTINGS = {
    "zero1_round_robin": (1, {"round_robin_gradients": True}),
    "zero2_round_robin": (2, {"round_robin_gradients": True}),
    "zero2_offload": (2, {"offload_optimizer": {"device": "cpu"}}),
    "zero3_not_persistent": (3, {"stage3_param_persistence_threshold": 0}),
    "zero3_sub_groups": (3, {"sub_group_size": 500, "stage3_param_persistence_threshold": 100}),
    "zero3_offload": (3, {"offload_optimizer": {"device": "cpu"}}),
    "zero3_offload_weights": (3, {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}),
}
HALF_PRECISION = {"zero1": 1, "zero2": 2, "zero3": 3}


@pytest.fixture(scope="module")
def reference():
    return run_ranks(train, 1, Replicated, END, group=False)[0]


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """By setting: the checkpoint after `HALF` steps, and the losses behind it in another engine of the setting."""
    return run_ranks(save_and_continue_all, 2, tmp_path_factory.mktemp("settings"))[0]


@pytest.fixture(scope="module")
def half_precision(tmp_path_factory):
    """By stage: the checkpoint, and the losses and final weights of the whole run and of the resumed one."""
    return run_ranks(resume_bf16_all, 2, tmp_path_factory.mktemp("bf16"))[0]


def train(build, steps):
    engine = build()
    return [engine.step(step) for step in range(steps)]


def save(engine, folder):
    return write_checkpoint(
        folder, step=HALF, pieces=engine.pieces(), state={}, write_model_files=write_config(engine.model)
    )


def resume(path, engine):
    read_checkpoint(path, engine.pieces())
    engine.after_load()
    return engine


def save_and_continue_all(root):
    results = {}
    for name, (stage, section) in SETTINGS.items():
        engine = Zero(stage, section=section)
        for step in range(HALF):
            engine.step(step)
        path = save(engine, root / name)
        engine.close()
        engine = Zero(stage, section=section, seed=OTHER_SEED)
        # A step before loading: what DeepSpeed derived from the old values must be made anew.
        engine.step(0)
        resume(path, engine)
        results[name] = path, [engine.step(step) for step in range(HALF, END)]
        engine.close()
    return results


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_moves_the_state_is_read_and_written_right(reference, settings, name):
    path, losses = settings[name]
    assert losses == pytest.approx(reference[HALF:], rel=1e-6)
    assert run_ranks(continue_alone, 1, path, group=False)[0] == pytest.approx(reference[HALF:], rel=1e-6)


def continue_alone(path):
    engine = resume(path, Replicated(seed=OTHER_SEED))
    return [engine.step(step) for step in range(HALF, END)]


def test_a_fused_optimizer_too(reference, tmp_path):
    for build, size in ((Replicated, 1), (Zero, 2)):
        arguments = (2,) if build is Zero else ()
        losses = run_ranks(resume_fused, size, build, arguments, tmp_path / str(size))[0]
        assert losses == pytest.approx(reference[HALF:], rel=1e-6)


def resume_fused(build, arguments, folder):
    engine = build(*arguments, fused=True)
    for step in range(HALF):
        engine.step(step)
    path = save(engine, folder)
    resumed = resume(path, build(*arguments, fused=True, seed=OTHER_SEED))
    return [resumed.step(step) for step in range(HALF, END)]


def resume_bf16_all(root):
    results = {}
    for name, stage in HALF_PRECISION.items():
        whole = Zero(stage, precision="bf16")
        for step in range(HALF):
            whole.step(step)
        path = save(whole, root / name)
        losses = [whole.step(step) for step in range(HALF, END)]
        weights = final_weights(whole, root / f"{name}-whole")
        whole.close()
        resumed = resume(path, Zero(stage, precision="bf16", seed=OTHER_SEED))
        again = [resumed.step(step) for step in range(HALF, END)]
        results[name] = path, (losses, weights), (again, final_weights(resumed, root / f"{name}-resumed"))
        resumed.close()
    return results


def final_weights(engine, folder):
    return save(engine, folder) / "model.safetensors"


@pytest.mark.parametrize("name", HALF_PRECISION)
def test_bfloat16_goes_on_bit_by_bit(half_precision, name):
    path, (losses, weights), (losses_again, weights_again) = half_precision[name]
    assert losses_again == losses
    assert weights_again.read_bytes() == weights.read_bytes()
    saved = load_file(path / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    optimizer = load_file(path / "training_state" / "optimizer-00001-of-00001.safetensors")
    masters = {key.removesuffix("/master"): value for key, value in optimizer.items() if key.endswith("/master")}
    assert set(saved) - set(masters) == {
        "model.layers.0.input_layernorm.weight",
        "model.layers.1.mlp.up_proj.weight",
    }, "frozen parameters need no master"
    for tensor, master in masters.items():
        assert master.dtype == torch.float32
        assert torch.equal(master.to(torch.bfloat16), saved[tensor])


@pytest.mark.parametrize("name", HALF_PRECISION)
def test_float32_layouts_read_the_masters(half_precision, tmp_path, name):
    """A bfloat16 checkpoint continued in float32 starts from the masters, not from the rounded weights."""
    path = half_precision[name][0]
    optimizer = load_file(path / "training_state" / "optimizer-00001-of-00001.safetensors")
    again = load_file(run_ranks(save_as_float32, 2, path, tmp_path)[0] / "model.safetensors")
    for tensor, value in again.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, optimizer.get(f"{tensor}/master", value)), tensor


def save_as_float32(path, folder):
    return save(resume(path, Replicated(seed=OTHER_SEED)), folder)


def test_bfloat16_reads_a_float32_checkpoint(settings, tmp_path):
    """Masters come from the saved float32 weights; the weights are those, rounded."""
    path = settings["zero3_sub_groups"][0]
    written = run_ranks(save_as_bf16, 2, path, tmp_path)[0]
    before = load_file(path / "model.safetensors")
    optimizer = load_file(written / "training_state" / "optimizer-00001-of-00001.safetensors")
    after = load_file(written / "model.safetensors")
    for tensor, value in before.items():
        assert torch.equal(after[tensor], value.to(torch.bfloat16)), tensor
        assert torch.equal(optimizer.get(f"{tensor}/master", value), value), tensor


def save_as_bf16(path, folder):
    return save(resume(path, Zero(2, precision="bf16", seed=OTHER_SEED)), folder)


def test_weights_that_drifted_from_their_masters_are_not_saved(tmp_path):
    for stage in (2, 3):
        for message in run_ranks(save_drifted, 2, stage, tmp_path):
            assert "drifted apart" in message
    assert not list(tmp_path.iterdir())


def save_drifted(stage, folder):
    engine = Zero(stage, precision="bf16")
    # On rank 1 alone: the other must not wait for it.
    if dist.get_rank() == 1:
        for parameter in engine.model.parameters():
            getattr(parameter, "ds_tensor", parameter).data.add_(1.0)
    with pytest.raises(CheckpointError) as caught:
        save(engine, folder)
    return str(caught.value)
