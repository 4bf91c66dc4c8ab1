"""Runs EleutherAI's evaluation harness on the exported model, in a child process (lm_eval_child.py).

In this process the harness would use the process group of the ranks.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hfdist.config.run import EvaluateConfig, RunConfig
from hfdist.errors import ConfigError, nearest
from hfdist.processes.child_python import module
from hfdist.topology import without_launcher

logger = logging.getLogger(__name__)


class HarnessError(Exception):
    """An error of the harness, with the harness's own message."""


def check(evaluate: EvaluateConfig, *, lists_tasks: bool) -> None:
    """Check that lm_eval is installed; with `lists_tasks`, which takes some seconds, also that it has the tasks.

    Raises:
        ConfigError: it is not installed, cannot list its tasks, or lacks one of them.
    """
    if importlib.util.find_spec("lm_eval") is None:
        what, hint = "the evaluation harness is not installed", "pip install lm-eval, or evaluate.lm_eval=[]"
        raise ConfigError(what, where="evaluate.lm_eval", found=", ".join(evaluate.lm_eval), hint=hint)
    if not lists_tasks:
        return
    try:
        known = _run_child("list_tasks", {"names": evaluate.lm_eval, "include": evaluate.lm_eval_include})
    except HarnessError as error:
        what = f"the evaluation harness cannot list its tasks: {error}"
        where = "evaluate.lm_eval, evaluate.lm_eval_include"
        raise ConfigError(what, where=where, found=evaluate.lm_eval_include) from error
    for name in evaluate.lm_eval:
        if name not in known:
            what = "the evaluation harness has no such task"
            allowed = f"one of {len(known):,} tasks: python -m lm_eval ls tasks"
            hint = nearest(name, known, "evaluate.lm_eval=[{}]") or "evaluate.lm_eval_include=FOLDER for your own tasks"
            raise ConfigError(what, where="evaluate.lm_eval", found=name, allowed=allowed, hint=hint)


def measure(folder: Path, config: RunConfig, *, device: object) -> dict[str, object]:
    """Run the tasks on a Hub model folder, on one process; give the harness's `results`, `versions` and `n-samples`."""
    arguments = {
        "model": str(folder.resolve()),
        "trust_remote_code": config.model.trust_remote_code,
        "tasks": config.evaluate.lm_eval,
        "include": config.evaluate.lm_eval_include,
        "batch_size": config.train.eval_micro_batch_size or config.train.micro_batch_size,
        "device": str(device),
    }
    logger.info("lm_eval measures %s", ", ".join(config.evaluate.lm_eval))
    return _run_child("measure", arguments)


def _run_child(function: str, arguments: Mapping[str, object]) -> Any:
    """Call a function of lm_eval_child.py in a child process, and give its answer; HarnessError: there is none."""
    environment = without_launcher(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        child = subprocess.run(
            module("hfdist.trainer.evaluation.lm_eval_child", function, json.dumps(arguments), str(answer)),
            env=environment | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            check=False,
        )
        reply: dict[str, Any] = {}
        # FileNotFoundError: the child was killed, or has crashed. ValueError: a full disk has left a part of the file.
        with suppress(FileNotFoundError, ValueError):
            reply = json.loads(answer.read_text(encoding="utf-8"))
        if "answer" not in reply:
            logger.debug("the evaluation harness says:\n%s", child.stderr)
            _, _, last_line = child.stderr.strip().rpartition("\n")
            raise HarnessError(reply.get("error") or last_line or f"it has ended with {child.returncode}")
        return reply["answer"]


def figures(results: Mapping[str, Any]) -> dict[str, float]:
    """Give all numbers of the results as `lm_eval/<task>/<metric>`, without the filter `none`."""
    found: dict[str, float] = {}
    for task, metrics in results["results"].items():
        for name, value in metrics.items():
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            # "sample_len" is the number of rows, which the harness puts beside the metrics.
            if is_number and name != "sample_len":
                found[f"lm_eval/{task}/{name.removesuffix(',none')}"] = float(value)
    return found


def table(values: Mapping[str, float]) -> str:
    """Give what `figures` gives as a text of lines, each with task, metric and number."""
    rows = []
    for key, value in values.items():
        task, _, metric = key.removeprefix("lm_eval/").rpartition("/")
        rows.append((task, metric, value))
    task_width = max((len(task) for task, _, _ in rows), default=0)
    metric_width = max((len(metric) for _, metric, _ in rows), default=0)
    return "\n".join(f"  {task:<{task_width}}  {metric:<{metric_width}}  {value:.4f}" for task, metric, value in rows)
