"""The process in which the evaluation harness runs: a request and the path of its answer, both JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def answer(request: dict[str, Any]) -> Any:
    """Do what is asked: name all tasks unless those that are asked for are known, or measure a model."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    if request["what"] == "tasks" and request["include"] is not None:
        own = TaskManager(include_path=request["include"], include_defaults=False).all_tasks
        if set(request["tasks"]) <= set(own):
            # Its own thousands need not be read.
            return own
    tasks = TaskManager(include_path=request["include"])
    if request["what"] == "tasks":
        return sorted(tasks.all_tasks)
    measured = simple_evaluate(
        model="hf",
        # Not as text, in which a comma in the path would end it.
        model_args={"pretrained": request["model"], "trust_remote_code": request["trust_remote_code"]},
        tasks=request["tasks"],
        task_manager=tasks,
        batch_size=request["batch_size"],
        device=request["device"],
        log_samples=False,
    )
    assert measured is not None
    return {name: measured[name] for name in ("results", "versions", "n-samples") if name in measured}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(answer(json.loads(sys.argv[1])), default=str), encoding="utf-8")
