"""Numbers that are not finite, and bits that flip: skipped, gone back, or stopped, in every layout alike."""

import math
import re

import pytest
import torch
from safetensors.torch import load_file

from hfdist.checkpoint import verify
from hfdist.config.composition.compose import compose_config
from hfdist.errors import NumericsError
from hfdist.records import RunFolder, read_lines
from hfdist.testing import RankFailed
from hfdist.verify.audit.past_run import open_past_run
from hfdist.verify.audit.step_contents import describe_step
from proofs.kills import newest_whole
from tests.distributed.bad_numbers import ALWAYS, Fault, Kind, pretrain_with
from tests.distributed.runs import SMALL, losses, weights
from tests.distributed.trainers import make_trainer, on_ranks
from tests.marks import many

pytestmark = pytest.mark.distributed

SAVING = ("checkpoint=default", "checkpoint.every=3", "train.max_steps=13", "train.micro_batch_size=2")

LAYOUTS = [
    *(many("single", 1), ("ddp", 2), many("zero3", 2), many("tensor", 2)),
    *(("pipeline", 2), many("pipeline_zero1", 4)),
]


# Two steps that no run can take; the last data rank has the wrong loss.
UNTAKEN = (Fault(Kind.nan_loss, (3,), -1), Fault(Kind.infinite_gradient, (5,)))
# Three in a row that it can take the second time.
PASSING = Fault(Kind.infinite_loss, (7, 8, 9), -1)
# Found by the comparison of every fifth step, and by that before the save of step 12.
FLIPPED = Fault(Kind.flipped_bit, (10, 12), -1)


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
    pretrain_with(UNTAKEN, folder, 1, "strategy=single", *SAVING)
    return folder


def test_a_step_is_skipped_where_whole_parameters_are_stepped_in_the_place_of_rows(tmp_path, cache_dir):
    for name, num_processes in (("single", 1), ("fsdp2", 2)):
        settings = (f"strategy={name}", "optimizer.name=adafactor", "train.max_steps=6", "checkpoint.every=null")
        pretrain_with(UNTAKEN, tmp_path / name, num_processes, *SAVING, *settings)
    single, own = ([math.nan if loss is None else loss for loss in losses(tmp_path / n)] for n in ("single", "fsdp2"))
    assert [step for step, loss in enumerate(own, 1) if math.isnan(loss)] == [3, 5]
    assert own == pytest.approx(single, rel=1e-5, nan_ok=True)


@pytest.mark.parametrize(("strategy", "num_processes"), LAYOUTS)
def test_all_ranks_skip_the_same_steps_and_go_back_together(single, tmp_path, strategy, num_processes):
    num_replicas = {"pipeline_zero1": 2, "pipeline": 1, "tensor": 1}.get(strategy, num_processes)
    faults = (*UNTAKEN, PASSING, *([FLIPPED] if num_replicas > 1 else []))
    settings = (f"strategy={strategy}", "train.compare_replicas_every=5", *SAVING)
    said = pretrain_with(faults, tmp_path, num_processes, *settings)

    lines = [line for line in read_lines(RunFolder(tmp_path).metrics) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 14))
    assert [line["step"] for line in lines if line.get("skipped")] == [3, 5]
    assert [line["step"] for line in lines if line["loss"] is None] == [3, 5]
    assert [line["tokens"] for line in lines] == [step * 8 * 64 for step in range(1, 14)]
    expected = [math.nan if loss is None else loss for loss in losses(single)]
    own = [math.nan if loss is None else loss for loss in losses(tmp_path)]
    assert own == pytest.approx(expected, rel=0 if strategy == "single" else 1e-5, nan_ok=True)
    for name, tensor in weights(single).items():
        assert torch.allclose(weights(tmp_path)[name], tensor, rtol=1e-4, atol=1e-6), name

    events = [event for event in read_lines(RunFolder(tmp_path).events) if event["event"] in ("skip", "rollback")]
    assert [event["step"] for event in events[:6]] == [3, 5, 7, 8, 9, 9]
    back = [event["to_step"] for event in events if event["event"] == "rollback"]
    assert back == ([6, 9, 9] if num_replicas > 1 else [6])
    assert said[:2] == [
        f"step 3 is skipped: its loss is not finite on data rank {num_replicas - 1}",
        "step 5 is skipped: its gradient is not finite, though its loss is",
    ]
    assert [text.split(":")[0] for text in said[2:5]] == [f"step {step} is skipped" for step in (7, 8, 9)]
    assert re.fullmatch(r"going back from step 9 to .*/step-00000006 \(1 of at most 2 .*", said[5])
    if num_replicas > 1:
        assert_found_flipped(said[6:])
    else:
        assert len(said) == 6
    assert_checkpoints_are_sound(tmp_path)


def assert_found_flipped(said):
    told = [text for text in said if "no majority says which is wrong" in text]
    back = [text for text in said if text not in told]
    assert re.match(r"after step 10 the replicas are not equal: model\.\S+: rank \d on \S+ and rank \d on", told[0])
    assert re.match(r"after step 12 the replicas are not equal: model\.", told[-1])
    assert re.fullmatch(r"going back from step 10 to .*/step-00000009 \(2 of at most 2 .*", back[0])
    assert re.fullmatch(r"going back from step 12 to .*/step-00000009 \(1 of at most 2 .*", back[1])
    assert len(back) == 2


def test_a_mean_of_several_steps_leaves_skipped_ones_out(single, tmp_path):
    pretrain_with(UNTAKEN, tmp_path, 1, "strategy=single", "report.log_every=4", *SAVING)
    logged = {line["step"]: line["loss"] for line in read_lines(RunFolder(tmp_path).metrics) if "loss" in line}
    by_step = dict(enumerate(losses(single), start=1))
    assert list(logged) == [3, 4, 5, 8, 12]
    assert logged[3] is logged[5] is None
    assert logged[4] == pytest.approx(sum(by_step[step] for step in (1, 2, 4)) / 3)
    assert logged[8] == pytest.approx(sum(by_step[step] for step in (6, 7, 8)) / 3)


def test_the_way_back_may_lead_to_the_checkpoint_of_another_run(single, tmp_path):
    start = single / "checkpoints" / "step-00000012"
    settings = (*SAVING, f"checkpoint.resume={start}", "train.max_skipped_steps=1")
    said = pretrain_with([Fault(Kind.nan_loss, (13,))], tmp_path, 1, "strategy=single", *settings)
    assert said[1].startswith(f"going back from step 13 to {start} ")
    assert losses(tmp_path) == losses(single)[-1:]


MOE = ("model.type=mixtral", "+model.config.num_local_experts=4", "+model.config.output_router_logits=true")
FIGURES = ("expert_load_max", "expert_load_min", "router_aux_loss")


def test_figures_of_routers_leave_out_what_was_skipped_or_undone(tmp_path, cache_dir):
    """The bit is found after the first of two steps that share a line."""
    skipped = Fault(Kind.nan_loss, (1,))
    steps = ("report.log_every=2", "train.compare_replicas_every=5", "checkpoint.every=4", "train.max_steps=6")
    settings = (*SAVING, "strategy=ddp", *MOE, *steps)
    for name, faults in (("plain", [skipped]), ("undone", [skipped, Fault(Kind.flipped_bit, (5,), -1)])):
        said = pretrain_with(faults, tmp_path / name, 2, *settings)
        assert sum("going back from step 5" in text for text in said) == (name == "undone")
    plain, undone = (
        [line for line in read_lines(RunFolder(tmp_path / name).metrics) if "loss" in line]
        for name in ("plain", "undone")
    )
    assert [line["step"] for line in plain] == [line["step"] for line in undone] == [1, 2, 4, 6]
    assert not set(FIGURES) & plain[0].keys()
    for line, again in zip(plain[1:], undone[1:], strict=True):
        assert [line[name] for name in FIGURES] == [again[name] for name in FIGURES]


@pytest.mark.parametrize("strategy", ["zero2", many("zero3")])
def test_half_precision_skips_too(cache_dir, tmp_path, strategy):
    settings = ("train.precision=bf16", "train.max_steps=6", "train.micro_batch_size=2")
    said = pretrain_with(UNTAKEN, tmp_path, 2, f"strategy={strategy}", *settings)
    assert [text.split(":")[0] for text in said] == ["step 3 is skipped", "step 5 is skipped"]
    assert [line["step"] for line in read_lines(RunFolder(tmp_path).metrics) if line.get("loss", 0) is None] == [3, 5]


def test_a_loss_scale_that_cannot_help_comes_to_an_end(cache_dir, tmp_path):
    glitch = Fault(Kind.nan_loss, (2,))
    never = Fault(Kind.infinite_gradient, tuple(range(4, 60)), times=ALWAYS)
    settings = ("train.precision=fp16", "train.micro_batch_size=8", "checkpoint=default", "checkpoint.every=3",
                "train.max_rollbacks=1", "model.loss=auto")  # fmt: skip
    with pytest.raises(RankFailed, match=r"NumericsError[\s\S]*the run has gone back 1 times"):
        pretrain_with([glitch, never], tmp_path, 1, "strategy=single", "train.max_steps=60", *settings)
    lines = {line["step"]: line for line in read_lines(RunFolder(tmp_path).metrics) if "loss" in line}
    assert lines[2]["loss"] is None
    assert lines[4]["loss"] is not None
    # A scale of 2**16 comes down to 1 by 16 halves, the first at step 2.
    assert [step for step, line in lines.items() if step > 3 and line["loss"] is None] == [18, 19, 20]
    assert_checkpoints_are_sound(tmp_path)


def test_what_does_not_pass_stops_the_run_and_names_the_documents(cache_dir, tmp_path):
    num_processes, settings = 2, (*SAVING, "strategy=ddp")
    fault = Fault(Kind.nan_loss, tuple(range(5, 14)), -1, ALWAYS)
    with pytest.raises(RankFailed, match="NumericsError") as failure:
        pretrain_with([fault], tmp_path, num_processes, *settings)
    text = str(failure.value)
    assert "not finite 3 steps in a row, and the run has gone back 2 times without getting beyond it" in text
    assert "where:   step 5\n" in text
    named = re.search(rf"found:   its loss is not finite on data rank {num_processes - 1}\n +it read (\S+?),? ", text)
    assert f"'data.quarantine=[{named[1]}" in text
    assert f"hfdist audit run={tmp_path} step=5" in text
    run = open_past_run(tmp_path, compose_config([*SMALL, f"run.dir={tmp_path}", *settings]))
    assert any(named[1] in line for line in describe_step(run, 5, shows_all_text=False))
    assert newest_whole(tmp_path) == "step-00000003"
    assert_checkpoints_are_sound(tmp_path)


@on_ranks(1, group=False)
def test_other_data_than_a_stream_stop_at_once(tmp_path):
    def loss(outputs, labels, num_items_in_batch=None):
        return outputs["logits"].mean() * (torch.nan if trainer.state.global_step else 1)

    trainer = make_trainer(tmp_path, arguments={"save_strategy": "steps", "save_steps": 1}, compute_loss_func=loss)
    with pytest.raises(NumericsError, match="not finite 3 steps in a row, and only a hfdist TokenStream can go back"):
        trainer.train()
    logged = {line["step"]: line.get("loss") for line in trainer.state.log_history}
    assert trainer.state.global_step == 4
    assert logged[1] is not None
    assert logged[2] is logged[3] is logged[4] is None


def test_without_a_checkpoint_there_is_no_way_back(cache_dir, tmp_path):
    fault = Fault(Kind.nan_loss, (1, 2, 3))
    with pytest.raises(RankFailed, match="not finite 3 steps in a row, and there is no checkpoint to go back to"):
        pretrain_with([fault], tmp_path, 1, "strategy=single", "train.max_steps=4")
