"""A parameter server: islands push gradients, it steps, and they take weights."""

import pytest

from tests.distributed.island_runs import difference, run_islands
from tests.distributed.runs import eval_losses, losses, pretrain, weights

SERVER = ("islands=parameter_server", "train.micro_batch_size=2", "data.packing=concat", "data.lanes=24")
STEPS = (*SERVER, "train.max_steps=6", "optimizer.lr=0.003", "train.max_grad_norm=0.5", "optimizer.eps=1e-5")
EACH = (*STEPS, "train.global_batch_size=4")
BOTH = (*STEPS[1:], "train.global_batch_size=8")


def of_both(folders):
    return [sum(both) / 2 for both in zip(*map(losses, folders), strict=True)]


@pytest.fixture(scope="module")
def of_ddp(tmp_path_factory, imported, reads_little):
    return pretrain(tmp_path_factory.mktemp("ddp") / "run", 2, "strategy=ddp", *BOTH)


@pytest.mark.parametrize("layout", ["single", "ddp", "zero1", "zero3", "fsdp2", "tensor", "pipeline"])
def test_a_synchronous_server_is_ddp(tmp_path, of_ddp, layout):
    folders = run_islands(tmp_path, 2, 1 if layout == "single" else 2, f"strategy={layout}", *EACH)
    assert of_both(folders) == pytest.approx(losses(of_ddp), rel=1e-5)
    assert eval_losses(folders[0]) == pytest.approx(eval_losses(of_ddp), rel=1e-5)
    assert difference(weights(folders[0]), weights(of_ddp)) < 1e-5
    assert difference(weights(folders[0]), weights(folders[1])) == 0
