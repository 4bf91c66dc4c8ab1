"""The job files for AWS ParallelCluster: the file that makes a cluster with SLURM, and the run's batch script."""

from __future__ import annotations

import dataclasses
import shlex

from hfdist.errors import ConfigError
from hfdist.tools.jobs.cluster import AwsSection
from hfdist.tools.jobs.job import Job, JobFile, JobFiles
from hfdist.tools.jobs.manifest import to_documents
from hfdist.tools.jobs.slurm import write_slurm

_QUEUE = "train"
"""Name of the cluster's queue, unless `cluster.slurm.partition` has another one."""
SHARED = "/shared"
"""Folder in which all machines of the cluster see the shared file system."""


def write_parallelcluster(job: Job) -> JobFiles:
    """Give the batch script and the file of the cluster, with the commands that submit both.

    Raises:
        ConfigError: a key that the file of the cluster needs is null.
    """
    for name in ("region", "subnet", "key_name", "instance"):
        if getattr(job.cluster.aws, name) is None:
            key = f"cluster.aws.{name}"
            raise ConfigError("the file of the cluster needs this key", where=key, found="null", hint=f"{key}=...")
    # SLURM's partition is the queue of the cluster's file, so that both files have one name for it.
    queue = job.cluster.slurm.partition or _QUEUE
    slurm = dataclasses.replace(job.cluster.slurm, partition=queue)
    cluster = dataclasses.replace(job.cluster, slurm=slurm)
    script = write_slurm(dataclasses.replace(job, cluster=cluster).starting_in(SHARED))
    path = job.path.with_name(f"{job.path.stem}.cluster.yaml")
    create = f"pcluster create-cluster --cluster-name {job.name} --cluster-configuration {shlex.quote(str(path))}"
    text = job.head(create) + to_documents(_describe_cluster(cluster.aws, cluster.nodes, queue))
    files = [*script.files, JobFile(path=path, text=text)]
    return JobFiles(files=files, submit=[create, *(f"{line}   # on the head node" for line in script.submit)])


def _describe_cluster(aws: AwsSection, nodes: int, queue: str) -> dict[str, object]:
    """Give the content of the cluster's file; `to_documents` leaves out what is None."""
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
                    # By default a cluster that is deleted takes the disk with it, and so all checkpoints.
                    "DeletionPolicy": "Retain",
                },
            }
        ],
    }
