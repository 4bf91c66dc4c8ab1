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


@pytest.mark.parametrize("ideal", [{}, {"compute": 2.0}])
def test_only_steps_whose_parts_are_planned_are_kept_for_later_plans(ideal, tmp_path):
    folder, path, plan = RunFolder(tmp_path), tmp_path / "steps.jsonl", replace(PLAN, ideal_seconds=ideal)
    folder.ranks.write_text("".join(json.dumps({"step": n, "step_seconds": [3.0]}) + "\n" for n in range(1, 9)))
    grader = PlanGrader(plan, folder, Engine, runtime_bytes=None, recorder=None, steps=path)
    grader.on_train_end(TrainingArguments(tmp_path), TrainerState(global_step=8), TrainerControl())
    assert folder.grade.exists()
    assert path.exists() == bool(ideal)
    assert [step.step_seconds for step in read_steps(path, plan.hardware)] == [3.0] * len(ideal)
