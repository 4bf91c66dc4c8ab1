"""What a run tells later plans at its end."""

import json
from dataclasses import replace

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from hfdist.planning.timing.calibration import read_steps
from hfdist.records import RunFolder
from hfdist.run.callbacks.plan_grader import PlanGrader
from hfdist.strategies.engine import Engine
from tests.unit.planning.plans import PLAN


@pytest.mark.parametrize(("ideal", "not_counted"), [({}, ""), ({"compute": 2.0}, ""), ({"compute": 2.0}, "images")])
def test_only_steps_whose_parts_are_planned_are_kept_for_later_plans(ideal, not_counted, tmp_path):
    folder, path = RunFolder(tmp_path), tmp_path / "steps.jsonl"
    plan = replace(PLAN, ideal_seconds=ideal, not_counted=not_counted)
    folder.ranks.write_text("".join(json.dumps({"step": n, "step_seconds": [3.0]}) + "\n" for n in range(1, 9)))
    grader = PlanGrader(plan, folder, Engine, runtime_bytes=None, recorder=None, steps=path)
    grader.on_train_end(TrainingArguments(tmp_path), TrainerState(global_step=8), TrainerControl())
    assert folder.grade.exists() != bool(not_counted)
    is_kept = bool(ideal) and not not_counted
    assert path.exists() == is_kept
    assert [step.step_seconds for step in read_steps(path, plan.hardware)] == [3.0] * is_kept
