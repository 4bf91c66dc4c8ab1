"""Ray: a program for `ray job submit`, which starts torchrun on each machine of a placement group."""

from __future__ import annotations

import pprint
import shlex

from hfdist.errors import ConfigError
from hfdist.tools.jobs.job import AGAIN, STANDARD_OUTPUT, Job, JobFile, JobFiles
from hfdist.tools.jobs.shell import machine_script

_SCRIPT = """\
set -uo pipefail
{machine_script}# What has started it starts it again by this code only.
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
    """Give the program. All values in it are Python's own literals."""
    cluster = job.cluster
    if job.folder is None:
        what = "the run's folder must be on a disk that all machines see"
        raise ConfigError(what, where="cluster.folder", found="null", hint="cluster.folder=/shared/work")
    # What this machine sees, the head sees; else Ray brings the program there, with this folder.
    file = job.path.absolute() if cluster.same_files else job.path.name
    program = shlex.join([cluster.python, "-P"]), "FILE" if job.path == STANDARD_OUTPUT else shlex.quote(str(file))
    place = "" if cluster.same_files else f"--working-dir {shlex.quote(str(job.path.parent))} "
    # Ray ends a job by force after three seconds, unless its head was started with more.
    start = f"RAY_JOB_STOP_WAIT_TIME_S={cluster.grace_seconds} ray start --head   # once, for the whole cluster"
    submit = f"ray job submit {place}-- {' '.join(program)}"
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
