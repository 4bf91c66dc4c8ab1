"""The comparison of two runs: what differs is found and named, and what is missing is no agreement."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from hfdist.checkpoint.piece import MASTER, STEP, WEIGHT, Piece
from hfdist.config.train import Precision
from hfdist.trainer.reporting.callbacks import METRICS
from hfdist.verify.parity import BOUNDS, FLOOR, certify, compare
from tests.unit.checkpoint.pieces import write_checkpoint

STEPS = 3


def tensors(step, keys=(WEIGHT, "exp_avg")):
    """Two parameters whose elements depend on parameter, key and step."""
    generator = torch.Generator().manual_seed(step)
    return {(name, key): torch.randn(6, 4, generator=generator) for name in ("first", "second") for key in keys}


def make_run(folder, steps=range(1, STEPS + 1), keys=(WEIGHT, "exp_avg")):
    """What a run leaves behind: metrics and a checkpoint of each step."""
    folder.mkdir()
    with (folder / METRICS).open("w") as file:
        for step in steps:
            file.write(json.dumps({"step": step, "loss": 7.0 - step, "grad_norm": 1.0 + step}) + "\n")
        file.write(json.dumps({"step": STEPS, "eval_loss": 5.0}) + "\n")
    for step in steps:
        pieces = [
            Piece(name=name, key=key, shape=tuple(tensor.shape), start=0, view=tensor)
            for (name, key), tensor in tensors(step, keys).items()
        ]
        pieces += [
            Piece(name=name, key=STEP, shape=(), start=0, view=torch.tensor(1.0)) for name in ("first", "second")
        ]
        write_checkpoint(
            folder / "checkpoints",
            step=step,
            pieces=pieces,
            state={},
            write_model_files=lambda path: (path / "config.json").write_text("{}"),
        )
    return folder


@pytest.fixture
def runs(tmp_path):
    return {
        "ours": make_run(tmp_path / "ours"),
        "reference": make_run(tmp_path / "reference"),
        "resumed": make_run(tmp_path / "resumed", steps=range(STEPS, STEPS + 1)),
    }


def check(runs):
    return certify("2 processes: data 2", bounds=BOUNDS[Precision.fp32], **runs)


def failed(certificate):
    return {row.what: row for row in certificate.rows if not row.passed}


def edit_tensor(path, name, change):
    """Change one tensor of a file in place."""
    content = load_file(path)
    content[name] = change(content[name])
    save_file(content, path)


def nudge(tensor):
    tensor.view(-1)[7] += 1e-3
    return tensor


def edit_metrics(run, **values):
    lines = [json.loads(line) for line in (run / METRICS).read_text().splitlines()]
    for line in lines:
        line.update({key: value for key, value in values.items() if key in line})
    (run / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_equal_runs_pass(runs):
    certificate = check(runs)
    assert certificate.passed
    assert len(certificate.rows) == 7
    assert {row.difference for row in certificate.rows} == {0.0}
    text = str(certificate)
    assert text.startswith("layout: 2 processes: data 2\n")
    assert text.endswith("CERTIFICATE: passed")


def test_one_element_of_one_weight_is_found_and_named(runs):
    edit_tensor(runs["ours"] / f"checkpoints/step-0000000{STEPS}/model.safetensors", "second", nudge)
    certificate = check(runs)
    bad = failed(certificate)
    # The part after resuming is compared with it as well.
    assert bad.keys() == {"weights at the end", "weights after resuming"}
    row = bad["weights at the end"]
    assert row.worst == "second"
    reference = tensors(STEPS)
    assert row.difference == pytest.approx(1e-3 / reference["second", WEIGHT].abs().max().item(), rel=1e-3)
    assert str(certificate).endswith("CERTIFICATE: failed")
    assert [line for line in str(certificate).splitlines() if "FAIL" in line and "second" in line]


def test_the_first_gradient_is_read_from_the_first_average(runs):
    [file] = (runs["ours"] / "checkpoints/step-00000001/training_state").glob("optimizer-*.safetensors")
    edit_tensor(file, "first/exp_avg", nudge)
    bad = failed(check(runs))
    assert bad.keys() == {"gradients of step 1"}
    assert bad["gradients of step 1"].worst == "first"


def test_norms_of_large_tensors_are_added_up_coarsely_on_a_cpu():
    bounds = BOUNDS[Precision.fp32]
    assert bounds.on_cpu(30_000) == bounds
    large = bounds.on_cpu(10**7)
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(10**7, generator=generator)
    error = abs(float(gradient.norm()) / float(gradient.double().norm()) - 1)
    assert bounds.grad_norm < error < large.grad_norm == large.gradient
    assert (large.loss, large.weight, large.resumed) == (bounds.loss, bounds.weight, bounds.resumed)


def test_a_resumed_run_that_went_elsewhere_is_found(runs):
    edit_metrics(runs["resumed"], loss=3.9)
    bad = failed(check(runs))
    assert bad.keys() == {"loss after resuming"}
    assert bad["loss after resuming"].worst == f"step {STEPS}"


@pytest.mark.parametrize(
    ("key", "what"), [("grad_norm", "gradient norm"), ("eval_loss", "held-out loss"), ("loss", "loss")]
)
def test_figures_are_compared(runs, key, what):
    edit_metrics(runs["ours"], **{key: 4.0001})
    assert what in failed(check(runs))


def test_a_figure_that_was_not_finite_fails(runs):
    for name in ("ours", "reference"):
        edit_metrics(runs[name], grad_norm=None)
    row = failed(check(runs))["gradient norm"]
    assert math.isnan(row.difference)


def test_a_missing_parameter_and_a_missing_step_fail(tmp_path, runs):
    path = runs["ours"] / f"checkpoints/step-0000000{STEPS}/model.safetensors"
    save_file({"first": load_file(path)["first"]}, path)
    text = (runs["ours"] / METRICS).read_text().splitlines(keepends=True)
    (runs["ours"] / METRICS).write_text("".join(text[1:]))
    bad = failed(check(runs))
    assert bad["weights at the end"].difference == math.inf
    assert "second" in bad["weights at the end"].worst
    assert "step 1" in bad["loss"].worst


def test_without_a_second_part_nothing_is_proven(tmp_path, runs):
    runs["resumed"] = make_run(tmp_path / "empty", steps=())
    assert "loss after resuming" in failed(check(runs))


def test_the_copy_that_the_optimizer_steps_is_compared_where_there_is_one(tmp_path, runs):
    """The weights of a half-precision layout are rounded; its masters are not."""
    runs["ours"] = make_run(tmp_path / "masters", keys=(WEIGHT, "exp_avg", MASTER))
    assert "weights at the end" in failed(check(runs))
    [file] = (runs["ours"] / f"checkpoints/step-0000000{STEPS}/training_state").glob("optimizer-*.safetensors")
    for name in ("first", "second"):
        edit_tensor(file, f"{name}/{MASTER}", lambda _, name=name: tensors(STEPS)[name, WEIGHT])
    edit_tensor(runs["ours"] / f"checkpoints/step-0000000{STEPS}/model.safetensors", "first", torch.zeros_like)
    assert "weights at the end" not in failed(check(runs))


def test_the_measure():
    large, zero = torch.tensor([4.0, -8.0]), torch.zeros(2)
    reference = {"large": large, "small": zero}
    row = compare("x", {"large": large + 0.08, "small": zero}, reference, 1e-2)
    assert (row.worst, row.difference) == ("large", pytest.approx(0.01, rel=1e-5))
    # What is zero but for rounding is judged on the scale of the largest.
    row = compare("x", {"large": large, "small": zero + 1e-7}, reference, 1e-5)
    assert row.difference == pytest.approx(1e-7 / (8 * FLOOR))
    assert row.passed
    assert not compare("x", {"large": large, "small": zero + 1e-5}, reference, 1e-5).passed


@pytest.mark.parametrize(
    ("ours", "reference"),
    [
        ({"a": torch.ones(2)}, {"a": torch.ones(2, 1)}),
        ({"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.ones(2)}),
        ({"a": torch.tensor([math.nan, 1.0])}, {"a": torch.ones(2)}),
        ({"a": torch.ones(2), "b": torch.tensor([math.nan])}, {"a": torch.ones(2), "b": torch.ones(1)}),
        ({"a": torch.tensor([math.inf])}, {"a": torch.tensor([math.inf])}),
        ({}, {}),
        ({"a": torch.zeros(2)}, {"a": torch.zeros(2)}),
    ],
    ids=["shape", "missing", "nan", "nan beside a number", "infinite", "nothing", "all zero"],
)
def test_what_proves_nothing_never_passes(ours, reference):
    assert not compare("x", ours, reference, 1e9).passed
