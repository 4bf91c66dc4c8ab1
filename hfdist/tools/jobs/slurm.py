"""The job file for SLURM: a batch script that starts torchrun on each machine, and requeues a run that can go on."""

from __future__ import annotations

import math
import os
import shlex

from hfdist.tools.jobs.job import Job, JobFile, JobFiles
from hfdist.tools.jobs.shell import node_function, setup_lines

_FIRST_PORT, _NUM_PORTS = 20000, 10000
"""Range of the port at which a job's ranks meet; it lies below the ports that systems give out by themselves."""

_SCRIPT = """\
#!/bin/bash
{head}{directives}
# Without -e: what a command ends with is looked at.
set -uo pipefail
{setup}
{node_function}
# A signal to the whole job reaches this script, too, which has to see the end of the run: bash acts on it after srun.
trap : TERM INT USR1

run_dir={run_dir}
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export FIRST="${{hosts[0]}}" LAST="${{hosts[-1]}}" PORT=$(({first_port} + SLURM_JOB_ID % {num_ports}))
export ID="$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}"

verdict() {{
    {verdict} -P -m hfdist.tools.jobs.verdict "$run_dir" "$@"
}}
node() {{
    {in_container}local peer="$FIRST"
    [ "$SLURM_NODEID" -eq 0 ] && peer="$LAST"
    start_ranks "$FIRST" "$peer" "$SLURM_NODEID" "$SLURM_JOB_NUM_NODES" "$PORT" "$ID"
}}

start=$(verdict) || exit 1
# A machine whose ranks have ended must not end the others while they save, whatever the site's own setting is.
srun {cpus}--ntasks-per-node=1 --kill-on-bad-exit=0 --wait={wait} {container}\\
    bash -c "$(declare -f start_ranks node); node"
launcher=$?
answer=$(verdict "$start" "$launcher" {max_restarts}) || exit 1
read -r code next <<<"$answer"
echo "hfdist: the run has ended with exit code $code, $next (srun: $launcher)"
{requeue}exit "$code"
"""
_REQUEUE = """
# A job that was cancelled, or that SLURM requeues by itself, is not running any more.
if [ "$next" = again ] && [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
    echo "hfdist: requeued"
    scontrol requeue "$SLURM_JOB_ID" && sleep {wait}  # SLURM ends this script
fi
"""


def write_slurm(job: Job, *, requeues: bool = True) -> JobFiles:
    """Give the batch script and the command that submits it.

    Args:
        job: the run and its machines.
        requeues: whether a run that can go on is started again: by its job, or by SLURM if SLURM has ended the job.
    """
    submit = f"sbatch {job.shell_path}"
    cluster = job.cluster
    setup, python = setup_lines(job), shlex.quote(cluster.python)
    container = container_words(job)
    if cluster.image is None:
        setup_of_script, setup_of_node, python_of_verdict = setup, "", python
    else:
        # The image has hfdist, the machine need not: all that needs it is done in a container. The set-up is not
        # indented there, as its texts may have several lines.
        setup_of_script, setup_of_node = "", f"{setup}    "
        python_of_verdict = f"srun --nodes=1 --ntasks=1 {container}{python}"
    text = _SCRIPT.format(
        head=job.head(submit),
        directives="".join(f"#SBATCH {line}\n" for line in _directives(job, requeues)),
        setup=setup_of_script,
        node_function=node_function(job),
        # An absolute path, as a step in a container begins in the image's own folder.
        run_dir=shlex.quote(os.path.join(job.folder or "", job.config.run.dir)),
        first_port=_FIRST_PORT,
        num_ports=_NUM_PORTS,
        verdict=python_of_verdict,
        in_container=setup_of_node,
        container=container,
        cpus=cpus_words(job),
        wait=cluster.grace_seconds,
        requeue=_REQUEUE.format(wait=cluster.grace_seconds) if requeues else "",
        max_restarts=cluster.max_restarts,
    )
    return JobFiles(files=[JobFile(path=job.path, text=text)], submit=[submit])


def cpus_words(job: Job) -> str:
    """Give the option of srun for the CPUs of a machine, with a space after it; empty: `cluster.cpus` is null."""
    # A step does not take the option over from its job.
    cluster = job.cluster
    return "" if cluster.cpus is None else f"--cpus-per-task={cluster.cpus * cluster.processes} "


def container_words(job: Job) -> str:
    """Give the options of srun for the image, with a space after them; empty: jobs run in no image."""
    image, mounts = job.cluster.image, job.cluster.slurm.mounts
    if image is None:
        return ""
    words = [f"--container-image={image}"]
    if mounts:
        words.append(f"--container-mounts={','.join(mounts)}")
    return f"{shlex.join(words)} "


def _directives(job: Job, requeues: bool) -> list[str]:
    """Give all options of sbatch, which the head of the script has as comments."""
    cluster = job.cluster
    lines = [
        f"--job-name={job.name}",
        f"--output={job.name}-%j.out",
        "--open-mode=append",  # A start after a requeue must not write over what the last one has printed.
        f"--nodes={cluster.nodes}",
        "--ntasks-per-node=1",
    ]
    if requeues:
        # For an end by SLURM itself: after a lost machine, or for a job of higher priority.
        lines.append("--requeue")
    # The signal goes to the processes of srun, which save, and not to this script.
    lines.append(f"--signal=TERM@{cluster.grace_seconds}")
    return [*lines, *directives_of(job)]


def directives_of(job: Job) -> list[str]:
    """Give the options of sbatch that say what each machine must have, and those that the user adds."""
    cluster, slurm = job.cluster, job.cluster.slurm
    lines = []
    if cluster.hours is not None:
        lines.append(f"--time={_duration(cluster.hours)}")
    if cluster.gpus:
        lines.append(f"--gpus-per-node={cluster.processes}")
    if cluster.cpus is not None:
        lines.append(f"--cpus-per-task={cluster.cpus * cluster.processes}")
    if cluster.memory_gib is not None:
        lines.append(f"--mem={cluster.memory_gib}G")
    for name in ("partition", "account", "qos"):
        value = getattr(slurm, name)
        if value is not None:
            lines.append(f"--{name}={value}")
    return [*lines, *slurm.options]


def _duration(hours: float) -> str:
    """Write a time as SLURM reads it, `days-hours:minutes:seconds`, in whole minutes."""
    whole_hours, minutes = divmod(math.ceil(hours * 60), 60)
    days, whole_hours = divmod(whole_hours, 24)
    return f"{days}-{whole_hours:02}:{minutes:02}:00"
