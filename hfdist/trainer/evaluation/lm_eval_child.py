"""The process in which EleutherAI's evaluation harness runs: it lists tasks, or measures a model.

python -m hfdist.trainer.evaluation.lm_eval_child FUNCTION ARGUMENTS_AS_JSON ANSWER_FILE
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from hfdist.errors import named_line

# The harness is optional, and so imported where it runs.


def list_tasks(*, names: Sequence[str], include: str | None) -> list[str]:
    """Give the names of the tasks of a folder, where it has all of `names`, or else of the harness, too."""
    from lm_eval.tasks import TaskManager

    if include is not None:
        # The harness has thousands of tasks, which take seconds to read.
        own = TaskManager(include_path=include, include_defaults=False).all_tasks
        if set(names) <= set(own):
            return list(own)
    return sorted(TaskManager(include_path=include).all_tasks)


def measure(
    *, model: str, trust_remote_code: bool, tasks: list[str], include: str | None, batch_size: int, device: str
) -> dict[str, object]:
    """Give the harness's `results`, `versions` and `n-samples` of a Hub model folder."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    measured = simple_evaluate(
        model="hf",
        # Not as text, in which a comma in the path would end it.
        model_args={"pretrained": model, "trust_remote_code": trust_remote_code},
        tasks=tasks,
        task_manager=TaskManager(include_path=include),
        batch_size=batch_size,
        device=device,
        log_samples=False,
    )
    assert measured is not None
    return {name: measured[name] for name in ("results", "versions", "n-samples") if name in measured}


if __name__ == "__main__":
    functions: dict[str, Callable[..., object]] = {"list_tasks": list_tasks, "measure": measure}
    try:
        answer = {"answer": functions[sys.argv[1]](**json.loads(sys.argv[2]))}
    except Exception as error:  # whatever the harness raises
        traceback.print_exc()
        answer = {"error": named_line(error)}
    Path(sys.argv[3]).write_text(json.dumps(answer, default=str), encoding="utf-8")
