"""Kubernetes: a JobSet, or a TrainJob of Kubeflow Trainer with a runtime that holds the same JobSet.

A pod ends with the run's exit code. Its job fails by the pod failure policy, and the JobSet's rules say what follows:
all pods start again after exit code 75 or the disruption of a pod, none does after a mistake, and after a lost rank
they start again as often as `cluster.max_restarts` says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from hfdist.errors import ConfigError
from hfdist.tools.jobs.cluster import PodStarter
from hfdist.tools.jobs.job import AGAIN, STAYS, Job, JobFile, JobFiles
from hfdist.tools.jobs.manifest import to_documents
from hfdist.tools.jobs.shell import machine_script

_CONTAINER = _REPLICATED_JOB = "node"
_ATTEMPT = "jobset.sigs.k8s.io/restart-attempt"

_SCRIPT = """\
# Kubernetes writes one dollar sign for two.
set -uo pipefail
# Names that the headless service of the JobSet gives to its pods.
FIRST="$JOBSET-{job}-0-0.$JOBSET" LAST="$JOBSET-{job}-0-{last}.$JOBSET" NODE_RANK="$JOB_COMPLETION_INDEX"
[ "$NODE_RANK" -eq 0 ] && PEER="$LAST" || PEER="$FIRST"
ID="$JOBSET-$RESTART_ATTEMPT"
{machine_script}exit "$code"
"""


def write_kubernetes(job: Job) -> JobFiles:
    """Give the manifest; ConfigError: no image, or no volume for the run's folder."""
    for key, value, why in (
        ("cluster.image", job.cluster.image, "pods need an image that has hfdist"),
        ("cluster.kubernetes.claim", job.cluster.kubernetes.claim, "all pods, and later ones, need the run's folder"),
    ):
        if value is None:
            raise ConfigError(why, where=key, found="null", hint=f"{key}=NAME")
    # A pod does not see this machine's folder, whatever `cluster.same_files` says.
    job = job.starting_in(job.cluster.kubernetes.mount)
    submit = f"kubectl create -f {job.shell_path}"
    if job.cluster.kubernetes.kind is PodStarter.jobset:
        spec = _job_set_spec(job)
        documents = [_document(job, "jobset.x-k8s.io/v1alpha2", "JobSet", spec, labels=_queue(job))]
    else:
        documents = _train_job(job)
    text = job.head(submit) + to_documents(*documents)
    return JobFiles(files=[JobFile(path=job.path, text=text)], submit=[submit])


def _train_job(job: Job) -> list[dict[str, object]]:
    api, trainer = "trainer.kubeflow.org/v1alpha1", {"numNodes": job.cluster.nodes}
    step = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    # No torch policy: it would set torchrun's variables, and the script gives torchrun its arguments by itself.
    runtime = {"mlPolicy": trainer, "template": {"spec": _job_set_spec(job, labels=step)}}
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name}
    return [
        _document(job, api, "TrainingRuntime", runtime),
        _document(job, api, "TrainJob", {"runtimeRef": reference, "trainer": trainer}, labels=_queue(job)),
    ]


def _document(
    job: Job, api: str, kind: str, spec: Mapping[str, object], labels: dict[str, str] | None = None
) -> dict[str, object]:
    metadata = {"name": job.name, "namespace": job.cluster.kubernetes.namespace, "labels": labels}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, "spec": spec}


def _queue(job: Job) -> dict[str, str] | None:
    queue = job.cluster.kubernetes.queue
    return None if queue is None else {"kueue.x-k8s.io/queue-name": queue}


def _job_set_spec(job: Job, labels: dict[str, str] | None = None) -> dict[str, object]:
    """Give the specification of a JobSet; `labels`: labels of its job."""
    replicated = {
        "name": _REPLICATED_JOB,
        "replicas": 1,
        "template": {"metadata": None if labels is None else {"labels": labels}, "spec": _job_spec(job)},
    }
    by_policy = ["PodFailurePolicy"]
    rules = [
        {
            "name": "startAgain",
            "action": "RestartJobSetAndIgnoreMaxRestarts",
            "onJobFailureReasons": by_policy,
            "onJobFailureMessagePatterns": [rf"exit code {AGAIN} matching", "DisruptionTarget"],
        },
        {"name": "stays", "action": "FailJobSet", "onJobFailureReasons": by_policy},
        # After any other exit code, such as 6, all pods start again up to maxRestarts times.
    ]
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {
            "maxRestarts": job.cluster.max_restarts,
            "restartStrategy": "BlockingRecreate",  # an old pod must not meet a new one at the rendezvous
            "rules": rules,
        },
        "replicatedJobs": [replicated],
    }


def _job_spec(job: Job) -> dict[str, object]:
    cluster = job.cluster

    def on_codes(*codes: int) -> dict[str, object]:
        found = {"containerName": _CONTAINER, "operator": "In", "values": [*codes]}
        return {"action": "FailJob", "onExitCodes": found}

    return {
        "parallelism": cluster.nodes,
        "completions": cluster.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                on_codes(AGAIN),
                on_codes(*STAYS),
                # Taken away by the cluster: a node that is drained, or a job of higher priority.
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": {"spec": _pod_spec(job)},
    }


def _pod_spec(job: Job) -> dict[str, object]:
    cluster, options = job.cluster, job.cluster.kubernetes
    limits: dict[str, object] = {
        "cpu": None if cluster.cpus is None else str(cluster.cpus * cluster.processes),
        "memory": None if cluster.memory_gib is None else f"{cluster.memory_gib}Gi",
        "nvidia.com/gpu": str(cluster.processes) if cluster.gpus else None,
    }
    script = _SCRIPT.format(job=_REPLICATED_JOB, last=cluster.nodes - 1, machine_script=machine_script(job))
    container = {
        "name": _CONTAINER,
        "image": cluster.image,
        "command": ["bash", "-c", _as_it_stands(script)],
        "env": [
            {"name": "JOBSET", "valueFrom": _label("jobset.sigs.k8s.io/jobset-name")},
            {"name": "RESTART_ATTEMPT", "valueFrom": _label(_ATTEMPT)},
        ],
        "resources": {"limits": limits} if any(limits.values()) else None,
        "volumeMounts": [{"name": "runs", "mountPath": options.mount}, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    memory = {"medium": "Memory", "sizeLimit": f"{options.shared_memory_gib}Gi"}
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": cluster.grace_seconds,
        "nodeSelector": options.node_selector or None,
        "containers": [container],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": options.claim}},
            {"name": "shm", "emptyDir": memory},
        ],
    }


def _as_it_stands(text: str) -> str:
    """Escape what Kubernetes would replace in a command before bash sees it: `$(NAME)`, and `$$`."""
    return re.sub(r"\$(?=[$(])", "$$", text)


def _label(name: str) -> dict[str, object]:
    return {"fieldRef": {"fieldPath": f"metadata.labels['{name}']"}}
