"""Write the job file of a run for a cluster: SLURM, Kubernetes, Ray, SkyPilot or AWS ParallelCluster. Submits nothing.

python recipes/job.py to=slurm cluster=slurm cluster.nodes=2 +experiment=demo strategy=ddp
"""

from hfdist.jobs.command import job_recipe, write_job
from hfdist.jobs.job import Job


@job_recipe
def main(target: str, job: Job) -> None:
    """Write what was asked for."""
    write_job(target, job)


if __name__ == "__main__":
    main()
