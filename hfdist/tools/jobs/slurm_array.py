"""The job file for SLURM with which machines share the files of a corpus: an array of tasks, a `data.shard` each."""

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
    """Give the batch script, and the command that submits it.

    The array has `cluster.nodes` tasks of a machine each, which need not run at the same time. A task that SLURM ends
    is queued again, and goes on from the files that are finished.
    """
    submit, num_tasks = f"sbatch {job.shell_path}", job.cluster.nodes
    command = shlex.join([job.cluster.python, "-P", "-m", "hfdist", job.recipe, *job.arguments])
    body = f'{setup_lines(job)}exec {command} "data.shard=$SLURM_ARRAY_TASK_ID/{num_tasks}"\n'
    if job.cluster.image is not None:
        # All of it is done in the container, which has hfdist.
        body = f"exec srun {cpus_words(job)}--nodes=1 --ntasks=1 {container_words(job)}bash -c {shlex.quote(body)}\n"
    options = [
        f"--job-name={job.name}",
        f"--output={job.name}-%A-%a.out",
        "--open-mode=append",  # A start after a requeue must not write over what the last one has printed.
        f"--array=0-{num_tasks - 1}",
        "--nodes=1",
        "--ntasks=1",
        "--requeue",
        *directives_of(job),
    ]
    directives = "".join(f"#SBATCH {option}\n" for option in options)
    text = _SCRIPT.format(head=job.head(submit), directives=directives, body=body)
    return JobFiles(files=[JobFile(path=job.path, text=text)], submit=[submit])
