"""Write the job file of a run for a cluster: SLURM, Kubernetes, Ray, SkyPilot or AWS ParallelCluster. Submits nothing.

python recipes/job.py to=slurm cluster=slurm cluster.nodes=2 +experiment=demo strategy=ddp
"""

from hfdist.tools.jobs.command import main

if __name__ == "__main__":
    main()
