"""A run grades its plan by what its ranks really hold, also where it goes on, and where there is no plan."""

import json

import pytest

from hfdist.planning.machines import STEPS, measure_cpu_once
from hfdist.run import own_plan
from tests.distributed.runs import pretrain, weights
from tests.marks import many

PLANNED = ("report.plan=true", "train.max_steps=6", "data.eval_sequences=1")


@pytest.fixture(autouse=True)
def cached(cache_dir):
    """The machine is measured here: a rank of a rank would wait for ever for the watchdog of faulthandler."""
    measure_cpu_once(cache_dir, 1)


def items_of(run_dir):
    content = json.loads((run_dir / "grade.json").read_text())
    return {item["name"]: item for item in content["items"]}


def test_a_run_and_its_resume_have_a_plan_and_a_grade(tmp_path, cache_dir):
    saving = ("checkpoint.every=3", "train.max_steps=9", "checkpoint.allow_changes=true", *PLANNED[:1], *PLANNED[2:])
    run_dir = pretrain(tmp_path / "run", 1, *saving, "train.max_steps=6")
    first = items_of(run_dir)
    for name in ("weights", "optimizer"):
        assert first[name]["error"] == pytest.approx(0, abs=0.01), first
    assert abs(first["peak memory"]["error"]) < 0.1, first
    assert first["step"]["measured"] > 0
    plan = json.loads((run_dir / "plan.json").read_text())
    assert plan["fits"]
    assert plan["max_steps"] == 6
    lines = (cache_dir / STEPS).read_text().splitlines()
    assert json.loads(lines[-1])["hardware"] == "cpu"
    pretrain(run_dir, 1, *saving)
    assert json.loads((run_dir / "grade.json").read_text())["steps"] == 3
    assert len((cache_dir / STEPS).read_text().splitlines()) == len(lines) + 1
    # Later plans learn from them.
    assert json.loads((run_dir / "plan.json").read_text())["timed_runs"] >= 1


def test_a_plan_that_fails_is_a_warning(tmp_path, monkeypatch, capfd):
    def fail(*arguments):
        raise RuntimeError("no luck")

    monkeypatch.setattr(own_plan, "make_plan", fail)
    run_dir = pretrain(tmp_path / "run", 1, *PLANNED)
    assert "no plan: RuntimeError: no luck" in capfd.readouterr().err
    assert not (run_dir / "plan.json").exists()
    assert not (run_dir / "grade.json").exists()
    assert (run_dir / "model").is_dir()


def test_a_run_that_does_not_fit_is_told_so_with_what_would_help(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("hfdist.planning.machines.usable_bytes", lambda processes: 2.0**20)
    pretrain(tmp_path / "run", 1, *PLANNED)
    assert "this run does not fit: a rank needs" in capfd.readouterr().err


HELD = {
    # Of 4 bytes a parameter, shared by two ranks: weights, gradients (None: not told apart), optimizer with masters.
    "ddp": (1.0, 1.0, 2.0),
    "zero1": (1.0, None, 1.5),
    "zero3": (0.5, None, 1.5),
    "fsdp2": (0.5, 0.5, 1.0),
}


@pytest.mark.parametrize("strategy", ["zero3", *map(many, ["ddp", "zero1", "fsdp2"])])
def test_ranks_count_what_they_hold(tmp_path, monkeypatch, strategy):
    def write(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            (tmp_path / "held.json").write_text(json.dumps(self._held))

    monkeypatch.setattr("hfdist.run.callbacks.plan_grader.PlanGrader.on_train_end", write)
    pretrain(tmp_path / "run", 2, *PLANNED, f"strategy={strategy}", "train.max_steps=3")
    found = json.loads((tmp_path / "held.json").read_text())
    parameters = sum(tensor.numel() for tensor in weights(tmp_path / "run").values())
    for name, share in zip(("weights", "gradients", "optimizer"), HELD[strategy], strict=True):
        if share is None:
            assert name not in found
        else:
            assert found[name] == pytest.approx(4 * share * parameters, rel=0.05), (name, found)
