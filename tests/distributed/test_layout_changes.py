"""A run that changes its layout at every checkpoint, in a folder of its own. `make layouts` makes all 330 changes."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hfdist.checkpoint import verify
from hfdist.config.composition.compose import compose_config
from hfdist.run.builder import Run
from hfdist.testing import run_ranks
from proofs.layout_changes import (
    COMMON,
    CONTROLS,
    LAYOUTS,
    LEAST_OF_CONTROLS,
    SINGLE,
    change_checkpoint,
    check_clipped,
)
from recipes.pretrain import main
from tests.distributed.runs import SMALL, StopsAt, losses, pretrain, weights

pytestmark = pytest.mark.distributed

# Each layout goes on from one that keeps its state in another way. test_optimizers.py goes from one process to others,
# and test_checkpoint_zero.py has what DeepSpeed's settings move.
CHAIN = (
    "single", "zero2 x2", "fsdp2 x2 x tensor 2", "zero3 x4", "hsdp x4", "tensor 2", "pp2 x fsdp2 x2 x tensor 2",
    "pp4 interleaved", "pp2 x context 2", "pp2 x zero1 x2",
)  # fmt: skip
STEPS = 2  # of each
SETTINGS = (
    *SMALL,
    *COMMON,
    f"train.max_steps={STEPS * len(CHAIN)}",
    # Those have no state.
    "train.freeze=[model.layers.0.input_layernorm.*,model.layers.1.mlp.up_proj.*]",
    "checkpoint=default",
    "checkpoint.keep=13",
    f"checkpoint.every={STEPS}",
)
BOUND = 1e-5


def train_until(config, step):
    build = Run.build_trainer

    def build_stopping(run):
        build(run)
        run.trainer.add_callback(StopsAt(step))

    Run.build_trainer = build_stopping
    main.__wrapped__(config)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, cache_dir):
    """One process that goes through."""
    return pretrain(tmp_path_factory.mktemp("whole"), 1, *SETTINGS, f"strategy={SINGLE}")


def difference(ours, reference):
    return max(abs(a / b - 1) for a, b in zip(ours, reference, strict=True))


def headers(checkpoint):
    """Of each file of tensors: their names, types, shapes and places."""
    contents = {path.name: path.read_bytes() for path in checkpoint.rglob("*.safetensors") if "rng" not in path.name}
    return {name: content[: 8 + int.from_bytes(content[:8], "little")] for name, content in contents.items()}


@pytest.mark.timeout(600)
@pytest.mark.many
def test_a_run_that_changes_its_layout_again_and_again_trains_as_one_process_does(whole, tmp_path):
    for number, name in enumerate(CHAIN, start=1):
        layout = LAYOUTS[name]
        config = compose_config([*SETTINGS, *layout.overrides, f"run.dir={tmp_path}"])
        run_ranks(train_until, layout.num_ranks, config, STEPS * number, group=layout.num_ranks > 1)
        assert difference(losses(tmp_path), losses(whole)[: STEPS * number]) < BOUND, name
        # The layout leaves no trace in the files.
        checkpoint, reference = (run / f"checkpoints/step-{STEPS * number:08d}" for run in (tmp_path, whole))
        verify(checkpoint)
        assert len(headers(checkpoint)) > 1
        assert headers(checkpoint) == headers(reference), name
    check_clipped(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    exported = weights(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(torch.equal(parameter, exported[name]) for name, parameter in model.named_parameters())


@pytest.mark.many
@pytest.mark.parametrize("name", CONTROLS)
def test_what_a_checkpoint_lacks_shows(whole, tmp_path, name):
    middle = STEPS * len(CHAIN) // 2
    checkpoint = whole / "checkpoints" / f"step-{middle:08d}"
    changed = change_checkpoint(checkpoint, tmp_path / "changed", CONTROLS[name])
    settings = (*SETTINGS, f"strategy={SINGLE}", f"checkpoint.resume={changed}", "checkpoint.every=null")
    run = pretrain(tmp_path / "run", 1, *settings)
    assert difference(losses(run), losses(whole)[middle:]) > LEAST_OF_CONTROLS
