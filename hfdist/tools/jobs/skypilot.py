"""The job file for SkyPilot: a task for `sky jobs launch`, which starts again after exit code 75 or lost machines."""

from __future__ import annotations

from hfdist.errors import ConfigError
from hfdist.tools.jobs.job import AGAIN, Job, JobFile, JobFiles
from hfdist.tools.jobs.manifest import to_documents
from hfdist.tools.jobs.shell import machine_script

_SCRIPT = """\
set -uo pipefail
FIRST=$(head -n 1 <<<"$SKYPILOT_NODE_IPS") LAST=$(tail -n 1 <<<"$SKYPILOT_NODE_IPS") NODE_RANK="$SKYPILOT_NODE_RANK"
[ "$NODE_RANK" -eq 0 ] && PEER="$LAST" || PEER="$FIRST"
ID="$SKYPILOT_TASK_ID"
{machine_script}# SkyPilot starts again after this code only: restarts after any error would have no limit.
[ "$next" = again ] && exit {again}
exit "$code"
"""


def write_skypilot(job: Job) -> JobFiles:
    """Give the task and the command that submits it.

    Raises:
        ConfigError: the run's folder would be lost with the machines, or they would have no hfdist, or no GPUs.
    """
    _check(job)
    options = job.cluster.skypilot
    job = job.starting_in(options.mount)
    cluster = job.cluster
    submit = f"sky jobs launch {job.shell_path}"
    accelerators = f"{options.accelerator}:{cluster.processes}" if options.accelerator is not None else None
    resources: dict[str, object] = {
        "infra": options.infra,
        "accelerators": accelerators,
        "cpus": None if cluster.cpus is None else f"{cluster.cpus * cluster.processes}+",
        "memory": None if cluster.memory_gib is None else f"{cluster.memory_gib}+",
        "image_id": None if cluster.image is None else f"docker:{cluster.image}",
        "use_spot": options.spot,
        # A restart after exit code 75 does not count as a restart on an error, of which there are none.
        "job_recovery": {"max_restarts_on_errors": 0, "recover_on_exit_codes": [AGAIN]},
    }
    task = {
        "name": job.name,
        "num_nodes": cluster.nodes,
        "resources": resources,
        "volumes": None if options.volume is None else {options.mount: options.volume},
        "setup": "".join(f"{line}\n" for line in options.install) or None,
        "run": _SCRIPT.format(machine_script=machine_script(job), again=AGAIN),
    }
    text = job.head(submit) + to_documents(task)
    return JobFiles(files=[JobFile(path=job.path, text=text)], submit=[submit])


def _check(job: Job) -> None:
    """Raise a ConfigError on machines on which the run could not start, or would not find its folder again."""
    options = job.cluster.skypilot
    if options.volume is None and job.cluster.folder is None:
        what = "the run's folder must be on a disk that all machines see, and those that come after them"
        hint = "cluster.skypilot.volume=NAME, or in cluster.folder a file system that cluster.skypilot.install mounts"
        raise ConfigError(what, where="cluster.skypilot.volume", found="null", hint=hint)
    if not options.install and job.cluster.image is None:
        what, where = "new machines have no hfdist", "cluster.skypilot.install"
        hint = "'cluster.skypilot.install=[\"pip install git+https://...\"]', or cluster.image=IMAGE, which has it"
        raise ConfigError(what, where=where, found="[]", hint=hint)
    if job.cluster.gpus != (options.accelerator is not None):
        what, where = "cluster.gpus and the kind of the GPUs must be set together", "cluster.skypilot.accelerator"
        found = f"{options.accelerator or 'null'}, with cluster.gpus={str(job.cluster.gpus).lower()}"
        hint = f"{where}=H100" if job.cluster.gpus else f"cluster.gpus=true, or {where}=null"
        raise ConfigError(what, where=where, found=found, hint=hint)
