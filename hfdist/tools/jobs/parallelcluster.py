"""AWS ParallelCluster: the file of a cluster that runs SLURM, and the batch script of the run for it."""

from __future__ import annotations

import dataclasses
import shlex

from hfdist.errors import ConfigError
from hfdist.tools.jobs.cluster import AwsSection
from hfdist.tools.jobs.job import Job, JobFile, JobFiles
from hfdist.tools.jobs.manifest import to_documents
from hfdist.tools.jobs.slurm import write_slurm

_QUEUE = "train"
SHARED = "/shared"
"""Where all machines see the file system."""


def write_parallelcluster(job: Job) -> JobFiles:
    """Give the batch script and the file of the cluster; ConfigError: a key that the cluster needs is null."""
    for name in ("region", "subnet", "key_name", "instance"):
        if getattr(job.cluster.aws, name) is None:
            key = f"cluster.aws.{name}"
            raise ConfigError("the file of the cluster needs this key", where=key, found="null", hint=f"{key}=...")
    slurm = dataclasses.replace(job.cluster.slurm, partition=job.cluster.slurm.partition or _QUEUE)
    cluster = dataclasses.replace(job.cluster, slurm=slurm)
    script = write_slurm(dataclasses.replace(job, cluster=cluster).starting_in(SHARED))
    path = job.path.with_name(f"{job.path.stem}.cluster.yaml")
    create = f"pcluster create-cluster --cluster-name {job.name} --cluster-configuration {shlex.quote(str(path))}"
    text = job.head(create) + to_documents(_cluster(cluster.aws, cluster.nodes, slurm.partition or _QUEUE))
    files = [*script.files, JobFile(path=path, text=text)]
    return JobFiles(files=files, submit=[create, *(f"{line}   # on the head node" for line in script.submit)])


def _cluster(aws: AwsSection, nodes: int, queue: str) -> dict[str, object]:
    machines = {
        "Name": "nodes",
        "Instances": [{"InstanceType": aws.instance}],
        "MinCount": 0,
        "MaxCount": nodes,
        "Efa": {"Enabled": True} if aws.efa else None,
    }
    networking = {"SubnetIds": [aws.subnet], "PlacementGroup": {"Enabled": True} if aws.efa else None}
    return {
        "Region": aws.region,
        "Image": {"Os": aws.os},
        "HeadNode": {
            "InstanceType": aws.head_instance,
            "Networking": {"SubnetId": aws.head_subnet or aws.subnet},
            "Ssh": {"KeyName": aws.key_name},
        },
        "Scheduling": {
            "Scheduler": "slurm",
            "SlurmQueues": [
                {
                    "Name": queue,
                    "CapacityType": aws.capacity.value,
                    "ComputeResources": [machines],
                    "Networking": networking,
                }
            ],
        },
        "SharedStorage": [
            {
                "Name": "shared",
                "StorageType": "FsxLustre",
                "MountDir": SHARED,
                "FsxLustreSettings": {
                    "StorageCapacity": aws.shared_gib,
                    "DeploymentType": "SCRATCH_2",
                    # By default the disk goes with the cluster, and all checkpoints with it.
                    "DeletionPolicy": "Retain",
                },
            }
        ],
    }
