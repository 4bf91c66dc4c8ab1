"""The few steps of a run from which later plans learn how fast such hardware is."""

from __future__ import annotations

import subprocess
import tempfile

from hfdist.config.cli.about_run import LineAboutRun
from hfdist.config.islands import IslandsConfig
from hfdist.config.plain_values import override_value, plain
from hfdist.errors import ResourceError
from hfdist.processes.child_python import module

_STEPS = (
    "train.max_steps=7",
    "train.epochs=null",
    "train.eval_every=null",
    "train.max_hours=null",
    "train.max_cost=null",
    "train.max_kwh=null",
    "train.deadline=null",
    "optimizer.warmup_steps=0",
    "optimizer.warmup_tokens=null",
    "optimizer.warmup_fraction=null",
    "data.eval_sequences=1",
    "checkpoint.every=null",
    "checkpoint.keep_best=false",
    "checkpoint.replicate_every=null",
    "checkpoint.mirror=null",
    "checkpoint.resume=auto",
    "evaluate.at_start=false",
    "evaluate.patience=null",
    "evaluate.min_delta=0",
    "evaluate.export=last",
    "evaluate.lm_eval=[]",
    "evaluate.lm_eval_include=null",
    "report.alerts=false",
    "report.alert_command=null",
    "report.to=[]",
    "report.progress=false",
    "report.plot=false",
    "report.plan=true",
    "report.sample_tokens=0",
    "export.push_to=null",
    *(f"islands.{key}={override_value(value)}" for key, value in plain(IslandsConfig()).items()),
)
"""Seven steps, of which two also warm up. What needs saves, evaluations or more steps is off.

So is what others would see: no island joins a training that there may be, and nobody is alerted.
"""


def run_steps(line: LineAboutRun, processes: int) -> None:
    """Run `_STEPS`, which later plans learn from; ResourceError: they failed."""
    with tempfile.TemporaryDirectory(prefix="hfdist-plan-") as folder:
        overrides = (*_STEPS, f"run.dir={folder}", f"launch.processes={processes}")
        command = module("hfdist", line.recipe, *line.recipe_arguments, *overrides)
        ended = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if ended.returncode != 0:
        what = "the steps that were to calibrate the plan have failed"
        found = tuple(ended.stderr.strip().splitlines()[-6:])
        hint = "plan.calibrate=false plans without them"
        raise ResourceError(what, where="plan.calibrate", found=found, hint=hint)
