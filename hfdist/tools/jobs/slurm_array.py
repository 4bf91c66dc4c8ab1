"""A batch script for SLURM that shares the files of a corpus: an array of tasks, each with its own `data.shard`."""

from __future__ import annotations

import shlex

from hfdist.tools.jobs.job import Job, JobFile, JobFiles
from hfdist.tools.jobs.shell import setup_lines
from hfdist.tools.jobs.slurm import container_words, cpus_words, directives_of

_SCRIPT = """\
#!/bin/bash
{head}{directives}
set -uo pipefail
{body}"""


def write_slurm_array(job: Job) -> JobFiles:
    """Give the batch script: `cluster.nodes` tasks of a machine each. They need not run at the same time.

    A task that SLURM ends is queued again, and goes on from the files that are finished.
    """
    submit, count = f"sbatch {job.shell_path}", job.cluster.nodes
    command = shlex.join([job.cluster.python, "-P", "-m", "hfdist", job.recipe, *job.arguments])
    body = f'{setup_lines(job)}exec {command} "data.shard=$SLURM_ARRAY_TASK_ID/{count}"\n'
    if job.cluster.image is not None:
        body = f"exec srun {cpus_words(job)}--nodes=1 --ntasks=1 {container_words(job)}bash -c {shlex.quote(body)}\n"
    lines = [
        f"--output={job.name}-%A-%a.out",
        "--open-mode=append",  # a start after a requeue writes after the last one
        f"--array=0-{count - 1}",
        "--nodes=1",
        "--ntasks=1",
        "--requeue",
    ]
    directives = "".join(f"#SBATCH {line}\n" for line in [f"--job-name={job.name}", *lines, *directives_of(job)])
    text = _SCRIPT.format(head=job.head(submit), directives=directives, body=body)
    return JobFiles(files=[JobFile(path=job.path, text=text)], submit=[submit])
