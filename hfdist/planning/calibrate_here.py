"""Five real steps of a run on this machine, in a folder that goes: the run notes what they took, for later plans."""

from __future__ import annotations

import subprocess
import tempfile

from hfdist.config.cli.about_run import LineAboutRun
from hfdist.errors import ResourceError
from hfdist.processes.child_python import module

_STEPS = (
    "train.max_steps=7",
    "train.epochs=null",
    "train.eval_every=null",
    "optimizer.warmup_steps=1",
    "optimizer.warmup_tokens=null",
    "optimizer.warmup_fraction=null",
    "data.eval_sequences=1",
    "checkpoint.every=null",
    "checkpoint.resume=auto",
    "evaluate.at_start=false",
    "evaluate.lm_eval=[]",
    "report.to=[]",
    "report.progress=false",
    "report.plot=false",
    "report.plan=true",
    "report.sample_tokens=0",
    "export.push_to=null",
)
"""Two that also warm up, and five."""


def run_steps(line: LineAboutRun, processes: int) -> None:
    """Run them; ResourceError: they failed."""
    with tempfile.TemporaryDirectory(prefix="hfdist-plan-") as folder:
        own = (*_STEPS, f"run.dir={folder}", f"launch.processes={processes}")
        command = module("hfdist", line.recipe, *line.recipe_arguments, *own)
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        what = "the steps that were to calibrate the plan have failed"
        found = tuple(ended.stderr.strip().splitlines()[-6:])
        hint = "plan.calibrate=false plans without them"
        raise ResourceError(what, where="plan.calibrate", found=found, hint=hint)
