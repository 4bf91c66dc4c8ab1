"""A parameter server: islands push gradients, it steps, and they take weights."""

import json
import re
from functools import cache

import pytest
import torch
from safetensors.torch import load_file

from hfdist.checkpoint.save_plan import OPTIMIZER_STEM, STATE_FILE
from hfdist.islands import cuts
from hfdist.records import RunFolder, read_lines
from hfdist.testing import RankFailed
from tests.distributed.island_runs import (
    Island,
    before_steps,
    die_at,
    difference,
    goes_on_as_if_nothing_had_been,
    overrides_of,
    run_islands,
    served,
    shards_beside,
    shows,
    wait_at,
)
from tests.distributed.runs import eval_losses, losses, pretrain, weights
from tests.marks import many

pytestmark = pytest.mark.distributed

SERVER = ("islands=parameter_server", "train.micro_batch_size=2", "data.packing=concat", "data.lanes=24")
STEPS = (*SERVER, "train.max_steps=6", "optimizer.lr=0.003", "train.max_grad_norm=0.5", "optimizer.eps=1e-5")
EACH = (*STEPS, "train.global_batch_size=4")
BOTH = (*STEPS[1:], "train.global_batch_size=8")


def of_both(folders):
    return [sum(both) / 2 for both in zip(*map(losses, folders), strict=True)]


SAVING = ("checkpoint=default", "checkpoint.every=3", "checkpoint.background=false")


@pytest.fixture(scope="module")
def of_ddp(tmp_path_factory, imported, reads_little):
    return pretrain(tmp_path_factory.mktemp("ddp") / "run", 2, "strategy=ddp", *BOTH, *SAVING)


@pytest.fixture(scope="module")
def islands_of(tmp_path_factory, imported, reads_little):
    """Folders of two islands of a layout, with a server that nothing happens to."""

    @cache
    def run(layout):
        num_ranks = 1 if layout == "single" else 2
        return run_islands(tmp_path_factory.mktemp(layout), 2, num_ranks, f"strategy={layout}", *EACH, *SAVING)

    return run


@pytest.mark.parametrize("layout", ["single", *map(many, ["ddp", "zero1", "zero3", "fsdp2", "tensor", "pipeline"])])
def test_a_synchronous_server_is_ddp(islands_of, of_ddp, layout):
    folders = islands_of(layout)
    assert of_both(folders) == pytest.approx(losses(of_ddp), rel=1e-5)
    assert eval_losses(folders[0]) == pytest.approx(eval_losses(of_ddp), rel=1e-5)
    assert difference(weights(folders[0]), weights(of_ddp)) < 1e-5
    assert difference(weights(folders[0]), weights(folders[1])) == 0


@pytest.mark.many  # where a shard is killed, below, both islands die, too
@pytest.mark.parametrize(("num_ranks", "layout"), [(1, "single"), (2, "zero1")])
def test_a_killed_job_goes_on_as_if_nothing_had_been(tmp_path, num_ranks, layout):
    goes_on_as_if_nothing_had_been(tmp_path, num_ranks, die_at(5), f"strategy={layout}", *EACH, *SAVING)


@pytest.mark.parametrize(("num_ranks", "layout"), [(1, "single"), many(2, "fsdp2"), many(2, "tensor")])
def test_shards_step_as_one_server_and_a_killed_one_ends_all_islands(
    tmp_path, islands_of, num_ranks, layout, monkeypatch
):
    """They end with one message, and others go on from what they have saved with another number of shards."""
    whole = islands_of(layout)
    # The embedding is cut.
    monkeypatch.setattr(cuts, "CUT_ELEMENTS", 5000)
    keys = (*EACH, *SAVING, f"strategy={layout}")
    folders = [tmp_path / f"island-{index}" for index in range(2)]

    def run(address, num_shards, *at_starts):
        more = (*keys, f"islands.server_shards={num_shards}")
        islands = [
            Island(folder, num_ranks, *overrides_of(address, index, 2, *more), at_start=at_start)
            for index, (folder, at_start) in enumerate(zip(folders, at_starts, strict=True))
        ]
        ends = [island.wait() for island in islands]
        for island in islands:
            island.kill()
        return ends

    with served() as address, shards_beside(address, 2) as shards:
        kills = before_steps(lambda now: shards[0].kill() if now == 5 else None)
        for end in run(address, 3, kills, lambda: None):
            assert "the server has ended this island" in end
            assert re.search(r"shard [23] of the server, at 127\.0\.0\.1:\d+, has ended", end)
    for folder, of_whole in zip(folders, whole, strict=True):
        assert len(losses(folder)) >= 4
        assert losses(folder) == losses(of_whole)[: len(losses(folder))]
    with served() as address, shards_beside(address, 1):
        assert run(address, 2, lambda: None, lambda: None) == [None, None]
    for folder, of_whole in zip(folders, whole, strict=True):
        assert losses(folder)[-3:] == losses(of_whole)[-3:]
        assert difference(weights(folder), weights(of_whole)) == 0


def state_of(run):
    """All tensors of its checkpoint of step 3."""
    folder = run / "checkpoints" / "step-00000003"
    files = [folder / "model.safetensors", *folder.glob(f"{OPTIMIZER_STEM}-*.safetensors")]
    steps = json.loads((folder / STATE_FILE).read_text())["steps"]
    tensors = {name: value for file in files for name, value in load_file(file).items()}
    return tensors | {f"{name}/step": torch.tensor(float(value)) for name, value in steps.items()}


# Pieces of any layout are in tests/unit/checkpoint.
@pytest.mark.parametrize("layout", ["single", many("fsdp2")])
def test_a_checkpoint_holds_what_that_of_ddp_does(islands_of, of_ddp, layout):
    folders = islands_of(layout)
    assert difference(state_of(folders[0]), state_of(of_ddp)) < 1e-5
    with pytest.raises(RankFailed, match="knows its own share of the data only"):
        pretrain(folders[0], 1, *BOTH, "checkpoint.allow_changes=true")


def test_islands_begin_at_a_checkpoint_of_ddp_and_train_what_it_would(tmp_path, of_ddp):
    start = (f"checkpoint.resume={of_ddp}/checkpoints/step-00000003", "checkpoint.allow_changes=true")
    folders = run_islands(tmp_path, 2, 1, *EACH, *start)
    assert difference(weights(folders[0]), weights(folders[1])) == 0
    assert of_both(folders)[-1] == pytest.approx(losses(of_ddp)[-1], rel=0.05)


@pytest.mark.parametrize("staleness", [many("0"), "1", many("null")])
def test_the_others_go_on_where_an_island_dies_and_it_comes_back(tmp_path, staleness):
    keys = (*EACH, "train.max_steps=12", "checkpoint=none", f"islands.staleness={staleness}")
    sign, last = tmp_path / "is there", tmp_path / "again"
    with served() as address:
        going = Island(tmp_path / "going", 1, *overrides_of(address, 0, 2, *keys), at_start=wait_at(8, sign))
        mortal = Island(tmp_path / "mortal", 1, *overrides_of(address, 1, 2, *keys), at_start=die_at(4))
        assert "died without a word" in mortal.wait()
        again = Island(last, 1, *overrides_of(address, 1, 2, *keys), at_start=shows(sign))
        ends = [going.wait(), again.wait()]
        for island in (going, mortal, again):
            island.kill()
    assert ends == [None, None]
    steps = [line["step"] for line in read_lines(RunFolder(last).metrics) if "loss" in line]
    # It begins where the other one is, which may go on by what it may be stale until this one has entered.
    last_begin = {"0": 9, "1": 10, "null": 12}[staleness]
    assert steps in [list(range(begin, 13)) for begin in range(9, last_begin + 1)]
    if staleness == "0":
        assert difference(weights(going.folder), weights(last)) == 0
