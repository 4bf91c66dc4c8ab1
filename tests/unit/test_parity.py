"""The comparison of two runs: what differs is found and named, and what is missing is no agreement."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from hfdist.checkpoint.piece import MASTER, STEP, WEIGHT, Piece
from hfdist.config.train import Precision
from hfdist.records import Event, RunFolder, add_event
from hfdist.verify.certificate import BOUNDS
from hfdist.verify.compare_runs import FLOOR, certify, compare
from tests.unit.checkpoint.pieces import write_checkpoint

STEPS = 3
LAST = f"checkpoints/step-0000000{STEPS}"
OPTIMIZER = "training_state/optimizer-00001-of-00001.safetensors"


def tensors(step, keys=(WEIGHT, "exp_avg")):
    """Two parameters whose elements depend on parameter, key and step."""
    generator = torch.Generator().manual_seed(step)
    return {(name, key): torch.randn(6, 4, generator=generator) for name in ("first", "second") for key in keys}


def make_run(folder, steps=range(1, STEPS + 1), keys=(WEIGHT, "exp_avg")):
    """What a run leaves behind: metrics and a checkpoint of each step."""
    folder.mkdir()
    with RunFolder(folder).metrics.open("w") as file:
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


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "ours")
    make_run(folder / "resumed", steps=range(STEPS, STEPS + 1))
    return folder


@pytest.fixture
def runs(made, tmp_path):
    folders = {"ours": tmp_path / "ours", "reference": tmp_path / "reference", "resumed": tmp_path / "resumed"}
    for name, folder in folders.items():
        shutil.copytree(made / ("resumed" if name == "resumed" else "ours"), folder)
    return folders


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
    lines = [json.loads(line) for line in RunFolder(run).metrics.read_text().splitlines()]
    for line in lines:
        line.update({key: value for key, value in values.items() if key in line})
    RunFolder(run).metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_equal_runs_pass(runs):
    certificate = check(runs)
    assert certificate.passed
    assert len(certificate.rows) == 7
    assert {row.difference for row in certificate.rows} == {0.0}
    text = str(certificate)
    assert text.startswith("layout: 2 processes: data 2\n")
    assert text.endswith("CERTIFICATE: passed")


def edit_weight(runs):
    edit_tensor(runs["ours"] / LAST / "model.safetensors", "second", nudge)


def edit_first_average(runs):
    edit_tensor(runs["ours"] / "checkpoints/step-00000001" / OPTIMIZER, "first/exp_avg", nudge)


@pytest.mark.parametrize(
    ("edit", "places"),
    [
        # The part after resuming is compared with it as well.
        (edit_weight, {"weights at the end": "second", "weights after resuming": "second"}),
        (edit_first_average, {"gradients of step 1": "first"}),
        (lambda runs: edit_metrics(runs["resumed"], loss=3.9), {"loss after resuming": f"step {STEPS}"}),
        (lambda runs: edit_metrics(runs["ours"], grad_norm=4.0001), {"gradient norm": "step 1"}),
        (lambda runs: edit_metrics(runs["ours"], eval_loss=4.0001), {"held-out loss": f"step {STEPS}"}),
        (lambda runs: edit_metrics(runs["reference"], loss=4.0001), {"loss": "step 1"}),
    ],
)
def test_what_differs_is_found_and_named(runs, edit, places):
    edit(runs)
    certificate = check(runs)
    assert {name: row.worst for name, row in failed(certificate).items()} == places
    assert str(certificate).endswith("CERTIFICATE: failed")
    assert str(certificate).count("FAIL") == len(places)


def test_norms_of_large_tensors_are_added_up_coarsely_on_a_cpu():
    bounds = BOUNDS[Precision.fp32]
    assert bounds.on_cpu(30_000) == bounds
    large = bounds.on_cpu(10**7)
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(10**7, generator=generator)
    error = abs(float(gradient.norm()) / float(gradient.double().norm()) - 1)
    assert bounds.grad_norm < error < large.grad_norm == large.gradient
    assert (large.loss, large.weight, large.resumed) == (bounds.loss, bounds.weight, bounds.resumed)


def test_a_figure_that_was_not_finite_fails(runs):
    for name in ("ours", "reference"):
        edit_metrics(runs[name], grad_norm=None)
    row = failed(check(runs))["gradient norm"]
    assert math.isnan(row.difference)


def test_a_missing_parameter_and_a_missing_step_fail(runs):
    path = runs["ours"] / LAST / "model.safetensors"
    save_file({"first": load_file(path)["first"]}, path)
    text = RunFolder(runs["ours"]).metrics.read_text().splitlines(keepends=True)
    RunFolder(runs["ours"]).metrics.write_text("".join(text[1:]))
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
    weights = tensors(STEPS)
    for name in ("first", "second"):
        edit_tensor(runs["ours"] / LAST / OPTIMIZER, f"{name}/{MASTER}", lambda _, name=name: weights[name, WEIGHT])
    edit_tensor(runs["ours"] / LAST / "model.safetensors", "first", torch.zeros_like)
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


def halve(runs):
    """Lose the float32 weights of the layout."""
    for name in ("first", "second"):
        edit_tensor(runs["ours"] / LAST / "model.safetensors", name, lambda tensor: tensor.bfloat16().float())


@pytest.mark.parametrize(("edit", "passes"), [(lambda runs: None, True), (halve, False)])
def test_float32_weights_beside_bfloat16_are_not_bfloat16_numbers(runs, edit, passes):
    edit(runs)
    certificate = certify("2 processes", bounds=BOUNDS[Precision.fp32], half=torch.bfloat16, **runs)
    assert [row.passed for row in certificate.rows if row.what == "share of bfloat16 weights"] == [passes]


def test_steps_that_were_skipped_or_done_again_are_said(runs):
    add_event(runs["ours"], Event.rollback, start=1, step=3, to_step=2)
    add_event(runs["reference"], Event.skip, start=1, step=1)
    add_event(runs["reference"], Event.save, start=1, step=1)
    assert str(check(runs)).splitlines()[-3:] == [
        "ours: the ranks went back from step 3 to step 2",
        "reference: step 1 was skipped",
        "CERTIFICATE: passed",
    ]
