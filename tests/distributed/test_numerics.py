"""Numbers that are not finite, and bits that flip: skipped, gone back, or stopped, in every layout alike."""

import math
import re

import pytest
import torch
from safetensors.torch import load_file

from hfdist.checkpoint import verify
from hfdist.config.compose import compose_config
from hfdist.testing import RankFailed
from hfdist.trainer.audit import describe_step, open_past_run
from hfdist.trainer.callbacks import METRICS, read_metrics
from tests.distributed.faults import ALWAYS, Fault, Kind, pretrain_with
from tests.distributed.kills import newest_whole
from tests.distributed.runs import SMALL, losses, weights

pytestmark = pytest.mark.distributed

SAVING = ("checkpoint=default", "checkpoint.every=3", "train.max_steps=11", "train.micro_batch_size=2")
SKIPPED = (3, 5)

LAYOUTS = [("ddp", 2), ("zero1", 2), ("zero2", 2), ("zero3", 2), ("pipeline", 2), ("pipeline_zero1", 4)]


def faults(last_data_rank):
    """Two steps that no run can take, and three in a row that it can, the second time."""
    return [
        Fault(Kind.nan_loss, (3,), last_data_rank),
        Fault(Kind.infinite_gradient, (5,)),
        Fault(Kind.infinite_loss, (7, 8, 9), last_data_rank),
    ]


def assert_checkpoints_are_sound(run_dir):
    newest = newest_whole(run_dir)
    assert newest is not None
    verify(run_dir / "checkpoints" / newest)
    for file in (run_dir / "checkpoints").rglob("*.safetensors"):
        if "rng" not in file.name:
            assert all(torch.isfinite(tensor).all() for tensor in load_file(file).values()), file


@pytest.fixture(scope="module")
def single(tmp_path_factory, cache_dir):
    """One process, with the two steps left out, and nothing else amiss."""
    folder = tmp_path_factory.mktemp("single")
    pretrain_with(faults(0)[:2], folder, 1, "strategy=single", *SAVING)
    return folder


@pytest.mark.parametrize(("strategy", "num_processes"), [("single", 1), *LAYOUTS])
def test_all_ranks_skip_the_same_steps_and_go_back_together(single, tmp_path, strategy, num_processes):
    last_data_rank = 0 if strategy in ("single", "pipeline") else 1
    said = pretrain_with(faults(last_data_rank), tmp_path, num_processes, f"strategy={strategy}", *SAVING)

    lines = [line for line in read_metrics(tmp_path / METRICS) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 12))
    assert [line["step"] for line in lines if line.get("skipped")] == list(SKIPPED)
    assert [line["step"] for line in lines if line["loss"] is None] == list(SKIPPED)
    assert [line["tokens"] for line in lines] == [step * 8 * 64 for step in range(1, 12)]
    expected = [math.nan if loss is None else loss for loss in losses(single)]
    own = [math.nan if loss is None else loss for loss in losses(tmp_path)]
    assert own == pytest.approx(expected, rel=0 if strategy == "single" else 1e-5, nan_ok=True)
    for name, tensor in weights(single).items():
        assert torch.allclose(weights(tmp_path)[name], tensor, rtol=1e-4, atol=1e-6), name

    assert said[0] == f"step 3 is skipped: its loss is not finite on data rank {last_data_rank}"
    assert said[1] == "step 5 is skipped: its gradient is not finite, though its loss is"
    assert [text.split(":")[0] for text in said[2:5]] == [f"step {step} is skipped" for step in (7, 8, 9)]
    assert re.fullmatch(r"going back from step 9 to .*/step-00000006 \(1 of at most 2 .*", said[5])
    assert len(said) == 6
    # That of step 3 was put off.
    assert_checkpoints_are_sound(tmp_path)


@pytest.mark.parametrize(("strategy", "num_processes"), [("single", 1), ("zero2", 2), ("zero3", 2), ("zero1", 2)])
def test_half_precision_skips_too(cache_dir, tmp_path, strategy, num_processes):
    said = pretrain_with(
        faults(num_processes - 1), tmp_path, num_processes, f"strategy={strategy}", "train.precision=bf16", *SAVING
    )
    assert [text.split()[0] for text in said] == ["step"] * 5 + ["going"]
    lines = [line for line in read_metrics(tmp_path / METRICS) if "loss" in line]
    assert [line["step"] for line in lines if line["loss"] is None] == list(SKIPPED)
    assert_checkpoints_are_sound(tmp_path)


def test_a_loss_scale_that_cannot_help_comes_to_an_end(cache_dir, tmp_path):
    glitch = Fault(Kind.nan_loss, (2,), 1)
    never = Fault(Kind.infinite_gradient, tuple(range(4, 60)), 1, ALWAYS)
    settings = ("train.precision=fp16", "checkpoint=default", "checkpoint.every=3", "train.max_steps=60")
    with pytest.raises(RankFailed, match=r"NumericsError[\s\S]*again after going back to the last checkpoint 2 times"):
        pretrain_with([glitch, never], tmp_path, 2, "strategy=ddp", "train.micro_batch_size=4", *settings)
    lines = {line["step"]: line for line in read_metrics(tmp_path / METRICS) if "loss" in line}
    assert lines[2]["loss"] is None
    assert lines[4]["loss"] is not None
    assert_checkpoints_are_sound(tmp_path)


@pytest.mark.parametrize(("strategy", "num_processes"), [("single", 1), ("ddp", 2)])
def test_what_does_not_pass_stops_the_run_and_names_the_documents(cache_dir, tmp_path, strategy, num_processes):
    settings = (*SAVING, f"strategy={strategy}")
    fault = Fault(Kind.nan_loss, tuple(range(5, 12)), num_processes - 1, ALWAYS)
    with pytest.raises(RankFailed, match="NumericsError") as failure:
        pretrain_with([fault], tmp_path, num_processes, *settings)
    text = str(failure.value)
    assert "not finite 3 steps in a row, again after going back to the last checkpoint 2 times" in text
    assert "where:   step 5\n" in text
    named = re.search(rf"step 5: its loss is not finite on data rank {num_processes - 1}; it read (\S+?),? ", text)
    quarantine = re.search(r"'data\.quarantine=\[\"(.+?)\"\]'", text)
    assert named[1] == quarantine[1]
    assert f"recipes/audit.py run={tmp_path} step=5" in text
    run = open_past_run(tmp_path, compose_config([*SMALL, f"run.dir={tmp_path}", *settings]))
    assert any(named[1] in line for line in describe_step(run, 5, shows_all_text=False))
    assert newest_whole(tmp_path) == "step-00000003"
    assert_checkpoints_are_sound(tmp_path)


def test_without_a_checkpoint_there_is_no_way_back(cache_dir, tmp_path):
    fault = Fault(Kind.nan_loss, (1, 2, 3))
    with pytest.raises(RankFailed, match=r"not finite 3 steps in a row\n"):
        pretrain_with([fault], tmp_path, 1, "strategy=single", "train.max_steps=4")


@pytest.mark.parametrize(("strategy", "num_processes"), [("ddp", 3), ("zero2", 2), ("pipeline_zero1", 4)])
def test_a_flipped_bit_is_found_and_undone(cache_dir, tmp_path, strategy, num_processes):
    layout = (f"strategy={strategy}", "data.lanes=12", "train.global_batch_size=12", "train.compare_replicas_every=2")
    settings = (*SAVING, *layout)
    pretrain_with([], tmp_path / "whole", num_processes, *settings)
    said = pretrain_with([Fault(Kind.flipped_bit, (8,), 1)], tmp_path / "flipped", num_processes, *settings)
    wrong = "and no majority says which is wrong" if num_processes != 3 else "differs from the majority"
    for text in said[:-1]:
        assert "after step 8 the replicas are not equal: model." in text
        assert re.search(r"rank 1 on \S+", text) or strategy == "pipeline_zero1"
        assert text.endswith(wrong)
    assert re.fullmatch(r"going back from step 8 to .*/step-00000006 .*", said[-1])
    assert losses(tmp_path / "flipped") == losses(tmp_path / "whole")
