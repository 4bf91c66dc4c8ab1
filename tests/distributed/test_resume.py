"""A run that was stopped goes on as if it had not been: losses, weights and the data's position."""

import json
import shutil

import pytest
import torch

from hfdist.config.composition.compose import compose_config
from hfdist.records import RunFolder, read_lines
from hfdist.records.lines import earlier
from hfdist.testing import RankFailed
from hfdist.verify.audit.past_run import open_past_run
from hfdist.verify.audit.run import prove_once
from tests.distributed.runs import SMALL, losses, pretrain, weights
from tests.marks import many
from tests.unit.checkpoint.pieces import edit_manifest, flip_a_bit

pytestmark = pytest.mark.distributed

SAVING = ("checkpoint=default", "checkpoint.every=5", "train.max_steps=12", "train.micro_batch_size=2")
# Dropout, so that the random state must be right as well.
DROPOUT = ("model.config.attention_dropout=0.1",)

# Other layouts go on in test_layout_changes.py, from each other and without dropout.
LAYOUTS = [
    ("single", 1, "fp16"),
    # ZeRO bit by bit in test_checkpoint_zero.py.
    many("zero2", 2, "bf16"),
    many("zero3", 2, "fp32"),
    # What tensor ranks draw is in test_tensor.py.
    many("tensor", 2, "fp32"),
    ("pipeline", 2, "fp32"),
    many("pipeline_zero1", 4, "fp32"),
]


def stopped(run, folder, step):
    """What a run that died after the checkpoint of `step` leaves: later checkpoints and the export are gone."""
    shutil.copytree(run, folder, dirs_exist_ok=True)
    for checkpoint in (folder / "checkpoints").glob("step-*"):
        if int(checkpoint.name.removeprefix("step-")) > step:
            shutil.rmtree(checkpoint)
    shutil.rmtree(folder / "model")


@pytest.fixture(scope="module")
def whole_runs(tmp_path_factory, cache_dir):
    """Uninterrupted runs, one a layout, made when first asked for."""
    made = {}

    def whole(strategy, num_processes, *more):
        key = (strategy, num_processes, more)
        if key not in made:
            folder = tmp_path_factory.mktemp(strategy)
            made[key] = pretrain(folder, num_processes, f"strategy={strategy}", *SAVING, *DROPOUT, *more)
        return made[key]

    return whole


@pytest.mark.parametrize(("strategy", "num_processes", "precision"), LAYOUTS)
def test_the_same_layout_goes_on_with_the_same_losses(whole_runs, tmp_path, strategy, num_processes, precision):
    more = () if precision == "fp32" else (f"train.precision={precision}", "model.loss=auto")
    whole = whole_runs(strategy, num_processes, *more)
    stopped(whole, tmp_path, 10)
    # Loader workers change nothing either.
    pretrain(tmp_path, num_processes, f"strategy={strategy}", *SAVING, *DROPOUT, *more, "data.workers=1")
    assert losses(tmp_path) == pytest.approx(losses(whole), rel=1e-7 if precision == "fp32" else 1e-6)
    steps = [line["step"] for line in read_lines(RunFolder(tmp_path).metrics) if "loss" in line]
    assert steps == list(range(1, 13))
    tokens = [line["tokens"] for line in read_lines(RunFolder(tmp_path).metrics) if "loss" in line]
    assert tokens == [step * 8 * 64 for step in steps]
    if precision == "fp32":
        for name, reference in weights(whole).items():
            assert torch.allclose(weights(tmp_path)[name], reference, rtol=1e-6, atol=1e-7), name


def snapshot(folder):
    """All but what tells of each start."""
    others = ("run.lock", "run.json", "events.jsonl")
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in others]
    return {path: path.read_bytes() for path in files}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: edit_manifest(path, lambda content: content.update(format=4)), "format 4, written by hfdist"),
        (lambda path: (path / "model.safetensors").write_bytes(b""), "none of the run's checkpoints can be used"),
    ],
)
def test_where_no_checkpoint_can_be_used_the_run_stops_and_touches_nothing(whole_runs, tmp_path, damage, message):
    shutil.copytree(whole_runs("single", 1), tmp_path, dirs_exist_ok=True)
    for checkpoint in (tmp_path / "checkpoints").iterdir():
        damage(checkpoint)
    before = snapshot(tmp_path)
    with pytest.raises(RankFailed, match=f"(?s)Checkpoint error.*{message}"):
        # With a key that may change, which config.yaml would show.
        pretrain(tmp_path, 1, "strategy=single", *SAVING, *DROPOUT, "report.log_every=2")
    assert snapshot(tmp_path) == before


def test_where_a_data_file_has_changed_the_run_stops_and_touches_nothing(tmp_path, cache_dir):
    rows = [json.dumps({"text": f"{number:03d} " + "lorem ipsum " * 20}) + "\n" for number in range(400)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(rows))
    source = ("data=files", f"data.sources.files.path={data}", "data.lanes=4", "strategy=single")
    run = pretrain(tmp_path / "run", 1, *source, *SAVING, "train.max_steps=5")
    data.write_text("".join(rows).replace("200 lorem", "200 Lorem"))
    before = snapshot(run)
    with pytest.raises(RankFailed, match=r"(?s)Checkpoint error: files have changed.*rows\.jsonl"):
        # With keys that may change, which config.yaml and metrics.jsonl would show.
        pretrain(run, 1, *source, *SAVING, "train.max_steps=5", "report.log_every=2")
    assert snapshot(run) == before


def test_never_refuses_a_folder_with_checkpoints(whole_runs, tmp_path):
    stopped(whole_runs("single", 1), tmp_path, 10)
    with pytest.raises(RankFailed, match="already holds checkpoints"):
        pretrain(tmp_path, 1, "strategy=single", *SAVING, *DROPOUT, "checkpoint.resume=never")


def test_a_path_chooses_the_checkpoint(whole_runs, tmp_path):
    whole = whole_runs("single", 1)
    chosen = whole / "checkpoints" / "step-00000010"
    # Of a life that began from the first step, and was killed before its first checkpoint.
    RunFolder(tmp_path).metrics.write_text('{"step": 3, "loss": 5.0}\n')
    run = pretrain(tmp_path, 1, "strategy=single", *SAVING, *DROPOUT, f"checkpoint.resume={chosen}")
    assert losses(run) == pytest.approx(losses(whole)[10:], rel=1e-7)
    assert read_lines(earlier(RunFolder(run).metrics)) == [{"step": 3, "loss": 5.0}]


def test_a_run_that_began_elsewhere_goes_on_from_its_own_checkpoints(whole_runs, tmp_path):
    """As a launcher or a scheduler starts it: the same command again."""
    whole = whole_runs("single", 1)
    stopped(whole, tmp_path / "run", 10)
    elsewhere = tmp_path / "other" / "step-00000012"
    shutil.copytree(whole / "checkpoints" / elsewhere.name, elsewhere)
    run = pretrain(tmp_path / "run", 1, "strategy=single", *SAVING, *DROPOUT, f"checkpoint.resume={elsewhere}")
    assert losses(run) == losses(whole)


def test_a_branch_in_the_same_folder_is_refused(whole_runs, tmp_path):
    shutil.copytree(whole_runs("single", 1), tmp_path, dirs_exist_ok=True)
    earlier = tmp_path / "checkpoints" / "step-00000010"
    with pytest.raises(RankFailed, match="two branches cannot share a folder"):
        pretrain(tmp_path, 1, "strategy=single", *SAVING, *DROPOUT, f"checkpoint.resume={earlier}")


def test_a_damaged_checkpoint_that_was_asked_for_is_an_error(whole_runs, tmp_path):
    shutil.copytree(whole_runs("single", 1), tmp_path / "old")
    chosen = tmp_path / "old" / "checkpoints" / "step-00000012"
    flip_a_bit(chosen / "model.safetensors")
    with pytest.raises(RankFailed, match=r"model\.safetensors"):
        pretrain(tmp_path / "new", 1, "strategy=single", *SAVING, *DROPOUT, f"checkpoint.resume={chosen}")


def test_what_changes_the_training_is_refused_unless_it_is_allowed(whole_runs, tmp_path):
    whole = whole_runs("single", 1)
    stopped(whole, tmp_path, 10)
    changes = ("optimizer.lr=1e-3", "train.global_batch_size=4", "report.log_every=2")
    with pytest.raises(RankFailed, match=r"(?s)optimizer\.lr: 0\.003 -> 0\.001.*train\.global_batch_size: 8 -> 4"):
        pretrain(tmp_path, 1, "strategy=single", *SAVING, *DROPOUT, *changes)
    # Before anything of the run is touched.
    assert "lr: 0.003" in (tmp_path / "config.yaml").read_text()
    pretrain(tmp_path, 1, "strategy=single", *SAVING, *DROPOUT, *changes, "checkpoint.allow_changes=true")
    last = [line for line in read_lines(RunFolder(tmp_path).metrics) if "loss" in line][-1]
    assert (last["step"], last["tokens"]) == (12, (10 * 8 + 2 * 4) * 64)


def test_other_data_are_read_from_their_beginning_if_that_is_allowed(whole_runs, tmp_path):
    stopped(whole_runs("single", 1), tmp_path, 10)
    # And keys that may change: they leave the training as it is.
    free = ("data.workers=1", "checkpoint.keep=1", "train.micro_batch_size=4", "report.plot=false")
    other = ("strategy=ddp", *SAVING, *DROPOUT, *free, "data.seed=7")
    with pytest.raises(RankFailed, match=r"data\.seed: 0 -> 7"):
        pretrain(tmp_path, 2, *other)
    pretrain(tmp_path, 2, *other, "checkpoint.allow_changes=true")
    assert len(losses(tmp_path)) == 12
    ledger = tmp_path / "ledger"
    # Two steps of 8 sequences, from the next round of the 48 lanes on.
    assert len(list(ledger.glob("*.records.until-80"))) == 48
    assert sorted(path.name for path in ledger.glob("*.records")) == [f"lane-{n:05d}.records" for n in range(16)]
    run = open_past_run(tmp_path, compose_config([*SMALL, f"run.dir={tmp_path}", *other]))
    said = list(prove_once(run))
    assert said[-1].startswith("AUDIT: passed")
