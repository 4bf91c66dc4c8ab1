"""The job file for Ray: a program for `ray job submit`, which starts torchrun on each machine of a placement group."""

from __future__ import annotations

import pprint
import shlex
from pathlib import Path

from hfdist.errors import ConfigError
from hfdist.tools.jobs.job import AGAIN, STANDARD_OUTPUT, Job, JobFile, JobFiles
from hfdist.tools.jobs.shell import machine_script

_SCRIPT = """\
set -uo pipefail
{machine_script}# The program that has started this script starts it again by this code only.
[ "$next" = again ] && exit {again}
exit "$code"
"""
_PROGRAM = """\
{head}from hfdist.tools.jobs.on_ray import run_on_machines

JOB = {job}

if __name__ == "__main__":
    run_on_machines(**JOB)
"""


def write_ray(job: Job) -> JobFiles:
    """Give the program and the commands that submit it. All values in the program are literals of Python.

    Raises:
        ConfigError: it is not known in which folder the run starts.
    """
    cluster = job.cluster
    if job.folder is None:
        what = "the run's folder must be on a disk that all machines see"
        raise ConfigError(what, where="cluster.folder", found="null", hint="cluster.folder=/shared/work")
    if cluster.same_files:
        options, file = "", job.path.absolute()
    else:
        # Ray's head does not see this folder: Ray brings it there, and starts the program in it.
        options, file = f"--working-dir {shlex.quote(str(job.path.parent))} ", Path(job.path.name)
    program = "FILE" if job.path == STANDARD_OUTPUT else shlex.quote(str(file))
    # Ray ends a job by force after three seconds, unless its head was started with more.
    start = f"RAY_JOB_STOP_WAIT_TIME_S={cluster.grace_seconds} ray start --head   # once, for the whole cluster"
    submit = f"ray job submit {options}-- {shlex.join([cluster.python, '-P'])} {program}"
    values: dict[str, object] = {
        "nodes": cluster.nodes,
        "cpus": (cluster.cpus or 1) * cluster.processes,
        "gpus": cluster.processes if cluster.gpus else 0,
        "memory_gib": cluster.memory_gib,
        "max_restarts": cluster.max_restarts,
        "script": _SCRIPT.format(machine_script=machine_script(job), again=AGAIN),
    }
    text = _PROGRAM.format(head=job.head(start, submit), job=pprint.pformat(values, width=110, sort_dicts=False))
    return JobFiles(files=[JobFile(path=job.path, text=text)], submit=[start, submit])
