"""The job file for Kubernetes: a JobSet, or a TrainJob of Kubeflow Trainer with a runtime that holds the same JobSet.

    JobSet     failurePolicy: what follows when its job has failed
      Job      podFailurePolicy: the end of any pod with one of these exit codes is the end of the job
        Pod    one on each machine; ends with the run's exit code

After exit code 75, or if the cluster has taken a pod away, all pods start again. After a mistake none does. After
another end, such as a lost rank, all start again as often as `cluster.max_restarts` says.
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
"""Name of the container in its pod, and of the job in the JobSet."""
_ATTEMPT = "jobset.sigs.k8s.io/restart-attempt"
"""Label of a pod with the number of times that all pods were started again."""

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
    """Give the manifest and the command that submits it.

    Raises:
        ConfigError: the cluster has no image, or no volume for the run's folder.
    """
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
    """Give a runtime with the JobSet, and the TrainJob that starts it."""
    api, num_nodes = "trainer.kubeflow.org/v1alpha1", {"numNodes": job.cluster.nodes}
    # By this label the TrainJob knows which job of the runtime trains.
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    # No torch policy: it would set torchrun's variables, and the script gives torchrun its arguments by itself.
    runtime = {"mlPolicy": num_nodes, "template": {"spec": _job_set_spec(job, labels=labels)}}
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name}
    return [
        _document(job, api, "TrainingRuntime", runtime),
        _document(job, api, "TrainJob", {"runtimeRef": reference, "trainer": num_nodes}, labels=_queue(job)),
    ]


def _document(
    job: Job, api: str, kind: str, spec: Mapping[str, object], labels: dict[str, str] | None = None
) -> dict[str, object]:
    """Give an object of Kubernetes with the job's name; `to_documents` leaves out what is None."""
    metadata = {"name": job.name, "namespace": job.cluster.kubernetes.namespace, "labels": labels}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, "spec": spec}


def _queue(job: Job) -> dict[str, str] | None:
    """Give the label with which Kueue takes an object into a queue; None: there is no queue."""
    queue = job.cluster.kubernetes.queue
    return None if queue is None else {"kueue.x-k8s.io/queue-name": queue}


def _job_set_spec(job: Job, labels: dict[str, str] | None = None) -> dict[str, object]:
    """Give the specification of the JobSet, with its rules for a job that has failed; `labels`: labels of its job."""
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
            "restartStrategy": "BlockingRecreate",  # An old pod must not meet a new one at the rendezvous.
            "rules": rules,
        },
        "replicatedJobs": [replicated],
    }


def _job_spec(job: Job) -> dict[str, object]:
    """Give the specification of a job: a pod on each machine, and the ends of a pod by which the job has failed."""
    num_pods = job.cluster.nodes
    return {
        "parallelism": num_pods,
        "completions": num_pods,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                _fail_on_codes(AGAIN),
                _fail_on_codes(*STAYS),
                # The cluster has taken a pod away: a machine is drained, or a job has higher priority.
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": {"spec": _pod_spec(job)},
    }


def _fail_on_codes(*codes: int) -> dict[str, object]:
    """Give the rule by which a job fails if a pod ends with one of these exit codes; its message has the code."""
    return {"action": "FailJob", "onExitCodes": {"containerName": _CONTAINER, "operator": "In", "values": [*codes]}}


def _pod_spec(job: Job) -> dict[str, object]:
    """Give the specification of a machine's pod, with the run's folder as a volume and memory for /dev/shm."""
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
        "command": ["bash", "-c", _escape_references(script)],
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


def _escape_references(text: str) -> str:
    """Escape what Kubernetes would replace in a command before bash sees it: `$(NAME)` and `$$`."""
    return re.sub(r"\$(?=[$(])", "$$", text)


def _label(name: str) -> dict[str, object]:
    """Give the source of a variable whose value is a label of the pod."""
    return {"fieldRef": {"fieldPath": f"metadata.labels['{name}']"}}
