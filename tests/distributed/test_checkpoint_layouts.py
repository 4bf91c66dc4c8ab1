"""Any layout reads any checkpoint: three steps in one, three in another, equal to six in a single process."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hfdist.checkpoint import read_checkpoint, verify
from hfdist.checkpoint.folder import step_name
from hfdist.testing import run_ranks
from tests.distributed.checkpoint_engines import LAYOUTS, Replicated, Zero, write_config
from tests.unit.checkpoint.pieces import write_checkpoint

pytestmark = pytest.mark.distributed

HALF, END = 3, 6

NAMES = list(LAYOUTS)
# In every layout from the next two of the table; test_resume.py goes on in the same.
PAIRS = [(source, target) for number, target in enumerate(NAMES) for source in (NAMES * 2)[number + 1 : number + 3]]
OTHER_SEED = 1
"""Of the model that is loaded into: nothing may be right by chance, frozen weights least of all."""


@pytest.fixture(scope="module")
def reference():
    return run_ranks(train_uninterrupted, 1, group=False)[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """One checkpoint a layout, after `HALF` steps."""
    root, elsewhere = tmp_path_factory.mktemp("saved"), tmp_path_factory.mktemp("elsewhere")
    for size in (1, 2, 3, 4):
        run_ranks(save_all, size, root)
    # Nothing beside a checkpoint is needed to read it.
    return {name: Path(shutil.move(root / name, elsewhere)) / step_name(HALF) for name in LAYOUTS}


@pytest.fixture(scope="module")
def continued(saved):
    """Losses behind every checkpoint in every layout, by (from, to)."""
    return {pair: losses for size in (1, 2, 3, 4) for pair, losses in run_ranks(continue_all, size, saved)[0].items()}


def of_this_size():
    size = dist.get_world_size()
    return {name: build for name, (needed, build) in LAYOUTS.items() if needed == size}


def train_uninterrupted():
    engine = Replicated()
    return [engine.step(step) for step in range(END)]


def save_all(root):
    for name, build in of_this_size().items():
        engine = build()
        for step in range(HALF):
            engine.step(step)
        write_checkpoint(
            root / name,
            step=HALF,
            pieces=engine.pieces(),
            state={"cursor": [1, 2, 3]},
            write_model_files=write_config(engine.model),
        )
        engine.close()


def continue_all(saved):
    losses = {}
    for target, build in of_this_size().items():
        for source in (source for source, goal in PAIRS if goal == target):
            engine = build(seed=OTHER_SEED)
            assert read_checkpoint(saved[source], engine.pieces()) == {"cursor": [1, 2, 3]}
            engine.after_load()
            losses[source, target] = [engine.step(step) for step in range(HALF, END)]
            engine.close()
    return losses


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_every_layout_goes_on_from_every_checkpoint(reference, continued, source, target):
    assert continued[source, target] == pytest.approx(reference[HALF:], rel=1e-6)


def test_the_layout_leaves_no_trace_in_the_files(saved):
    """Equal headers; values to rounding, which the first steps of Adam amplify where a gradient is almost zero."""
    for name, path in saved.items():
        verify(path)
        for file_name in ("model.safetensors", "training_state/optimizer-00001-of-00001.safetensors"):
            ours, single = load_file(path / file_name), load_file(saved["single"] / file_name)
            assert header(path / file_name) == header(saved["single"] / file_name), name
            for tensor in single:
                assert torch.allclose(ours[tensor], single[tensor], rtol=1e-4, atol=1e-4), (name, tensor)


def header(path):
    content = path.read_bytes()
    return content[: 8 + int.from_bytes(content[:8], "little")]


def test_loading_and_saving_again_gives_the_same_bytes(saved, tmp_path):
    for size in (1, 2):
        for path in run_ranks(save_again, size, saved["zero3x3"], tmp_path)[0]:
            for file_name in ("model.safetensors", "training_state/optimizer-00001-of-00001.safetensors"):
                assert (path / file_name).read_bytes() == (saved["zero3x3"] / file_name).read_bytes(), path


def save_again(source, root):
    paths = []
    for name, build in of_this_size().items():
        engine = build(seed=OTHER_SEED)
        read_checkpoint(source, engine.pieces())
        engine.after_load()
        paths.append(
            write_checkpoint(
                root / name, step=9, pieces=engine.pieces(), state={}, write_model_files=write_config(engine.model)
            )
        )
        engine.close()
    return paths


def test_a_checkpoint_is_a_hub_model(saved):
    for path in saved.values():
        model = AutoModelForCausalLM.from_pretrained(path)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        written = load_file(path / "model.safetensors")
        assert "lm_head.weight" not in written
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, written[name]), name


def test_without_moments_or_step_counts_the_losses_differ(reference, saved):
    """The test of the test: what the comparison above would miss, it would be worth nothing."""
    for size, names in ((1, ["single"]), (2, ["zero2x2", "zero3x2"])):
        for case, losses in run_ranks(continue_spoilt, size, saved["zero1x2"], names)[0].items():
            differences = [abs(a / b - 1) for a, b in zip(losses, reference[HALF:], strict=True)]
            assert max(differences) > 1e-3, case


def continue_spoilt(path, names):
    losses = {}
    for name in names:
        for spoil in (forget_moments, forget_steps):
            engine = LAYOUTS[name][1](seed=OTHER_SEED)
            read_checkpoint(path, engine.pieces())
            engine.after_load()
            for state in engine.states():
                spoil(state)
            losses[name, spoil.__name__] = [engine.step(step) for step in range(HALF, END)]
            engine.close()
    return losses


def forget_moments(state):
    state["exp_avg"].zero_()
    state["exp_avg_sq"].zero_()


def forget_steps(state):
    state["step"].zero_()


def test_a_checkpoint_of_step_zero_starts_like_a_new_run(reference, tmp_path):
    path = run_ranks(save_untrained, 2, tmp_path)[0]
    assert run_ranks(start_from, 1, path, group=False)[0] == pytest.approx(reference, rel=1e-6)


def save_untrained(folder):
    engine = Zero(2)
    return write_checkpoint(
        folder, step=0, pieces=engine.pieces(), state={}, write_model_files=write_config(engine.model)
    )


def start_from(path):
    engine = Replicated(seed=OTHER_SEED)
    read_checkpoint(path, engine.pieces())
    return [engine.step(step) for step in range(END)]
