"""A run that changes its layout at every checkpoint, in a folder of its own. `make layouts` makes all 289 changes."""

import pytest

from hfdist.config.composition.compose import compose_config
from hfdist.testing import run_ranks
from hfdist.trainer.run.builder import Run
from recipes.pretrain import main
from tests.distributed.layout_changes import (
    COMMON,
    CONTROLS,
    LAYOUTS,
    LEAST_OF_CONTROLS,
    SINGLE,
    change_checkpoint,
    check_clipped,
)
from tests.distributed.runs import SMALL, StopsAt, losses, pretrain

pytestmark = pytest.mark.distributed

# Each layout goes on from one that keeps its state in another way. test_checkpoint_layouts.py has more changes, of
# engines without a Trainer, and test_optimizers.py goes from one process to others.
CHAIN = (
    "single", "fsdp2 x2 x tensor 2", "zero3 x4", "hsdp x4", "pp2 x fsdp2 x2 x tensor 2", "pp4 interleaved",
    "pp2 x context 2", "pp2 x zero1 x2",
)  # fmt: skip
STEPS = 2  # of each
SETTINGS = (*SMALL, *COMMON, f"train.max_steps={STEPS * len(CHAIN)}", "checkpoint=default", "checkpoint.keep=13")
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
    """One process that goes through, with a checkpoint in the middle."""
    folder = tmp_path_factory.mktemp("whole")
    return pretrain(folder, 1, *SETTINGS, f"strategy={SINGLE}", f"checkpoint.every={STEPS * len(CHAIN) // 2}")


def difference(ours, reference):
    return max(abs(a / b - 1) for a, b in zip(ours, reference, strict=True))


@pytest.mark.timeout(600)
def test_a_run_that_changes_its_layout_again_and_again_trains_as_one_process_does(whole, tmp_path):
    for number, name in enumerate(CHAIN, start=1):
        layout = LAYOUTS[name]
        saving = (f"run.dir={tmp_path}", f"checkpoint.every={STEPS}")
        config = compose_config([*SETTINGS, *layout.overrides, *saving])
        run_ranks(train_until, layout.num_ranks, config, STEPS * number, group=layout.num_ranks > 1)
        assert difference(losses(tmp_path), losses(whole)[: STEPS * number]) < BOUND, name
    check_clipped(tmp_path)


def test_a_learning_rate_that_begins_anew_shows(whole, tmp_path):
    """What it is to have lost the moments or the number of steps, test_checkpoint_layouts.py shows."""
    middle = STEPS * len(CHAIN) // 2
    checkpoint = whole / "checkpoints" / f"step-{middle:08d}"
    changed = change_checkpoint(checkpoint, tmp_path / "changed", CONTROLS["no schedule"])
    settings = (*SETTINGS, f"strategy={SINGLE}", f"checkpoint.resume={changed}", "checkpoint.every=null")
    run = pretrain(tmp_path / "run", 1, *settings)
    assert difference(losses(run), losses(whole)[middle:]) > LEAST_OF_CONTROLS
