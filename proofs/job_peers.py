"""Check job files by those who read them: `python -m proofs.job_peers PYTHON`, which `make jobs` does.

PYTHON has SkyPilot, AWS ParallelCluster and Ray, which are too large for the tests' environment. Their own schemas must
take the files, and refuse a misspelt key. On two Ray nodes of this machine a job is stopped, goes on, and ends; and a
sweep finds there what it finds without Ray.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUN = ("model=tiny", "strategy=ddp", "run.name=job", "train.max_steps=60", "report.sample_prompt=null")
JOBS = (
    ("to=skypilot", "cluster=skypilot", "cluster.skypilot.volume=runs", "cluster.image=some/image", "cluster.cpus=4",
     "cluster.skypilot.infra=aws", "train.global_batch_size=128"),
    ("to=parallelcluster", "cluster=aws", "cluster.aws.subnet=subnet-0123abcd", "cluster.aws.key_name=key",
     "train.global_batch_size=128"),
    ("to=ray", "cluster=slurm", f"cluster.python={sys.executable}", "train.global_batch_size=256"),
)  # fmt: skip
SKYPILOT = """
import os, yaml, jsonschema
os.environ |= {"SKYPILOT_DISABLE_USAGE_COLLECTION": "1", "IS_SKYPILOT_SERVER": "1"}
from sky.server import plugins
plugins.plugins_loaded = lambda: True  # then its schema takes no keys of plugins
import sky
from sky.utils import schemas
task = yaml.safe_load(open("job.skypilot.yaml"))
whole = jsonschema.Draft202012Validator(schemas.get_task_schema())
resources = jsonschema.Draft202012Validator(schemas.get_resources_schema())
whole.validate(task)
resources.validate(task["resources"])
recovery = {"recover_on_exit_code": 75}
assert list(whole.iter_errors(task | {"num_node": 2}))
assert list(resources.iter_errors(task["resources"] | {"job_recovery": recovery}))
assert sky.Task.from_yaml("job.skypilot.yaml").num_nodes == 2
"""
PARALLELCLUSTER = """
import copy, yaml
from marshmallow import ValidationError
from pcluster.schemas.cluster_schema import ClusterSchema
content = yaml.safe_load(open("job.cluster.yaml"))
cluster = ClusterSchema(cluster_name="job").load(copy.deepcopy(content))
assert cluster.scheduling.queues[0].compute_resources[0].max_count == 2
assert "#SBATCH --partition=" + cluster.scheduling.queues[0].name in open("job.sbatch").read()
content["HeadNode"]["InstanceTyp"] = "m7i.large"
try:
    ClusterSchema(cluster_name="job").load(content)
except ValidationError:
    pass
else:
    raise AssertionError("a misspelt key was taken")
"""
RAY = """
import json, os, signal, subprocess, sys, time
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
cluster.add_node(num_cpus=1)
os.environ["RAY_ADDRESS"] = cluster.address
def record():
    return json.load(open("runs/job/run.json")) if os.path.exists("runs/job/run.json") else {"step": 0}
first = subprocess.Popen([sys.executable, "job.ray.py"])
while first.poll() is None and record()["step"] < 3:
    time.sleep(0.2)
first.send_signal(signal.SIGTERM)
assert first.wait(timeout=120) == 75
stopped = record()
assert stopped["exit_code"] == 75 and 3 <= stopped["step"] < 60, stopped
assert subprocess.run([sys.executable, "job.ray.py"], timeout=300).returncode == 0
ended = record()
assert (ended["start"], ended["step"], ended["processes"], ended["exit_code"]) == (2, 60, 2, 0), ended
sweep = [sys.executable, "-m", "hfdist", "sweep", "sweep=grid", "optimizer.lr=1e-3,3e-3", "run.name=swept",
         "sweep.slots=2", "model=tiny", "strategy=ddp", "launch.processes=2", "train.max_steps=6", "report=quiet"]
on_ray = ["sweep.launcher=ray", "cluster.nodes=2", "cluster.python=" + os.environ["OURS"]]
assert subprocess.run([*sweep, *on_ray], timeout=300).returncode == 0
local = [os.environ["OURS"], *sweep[1:], "run.name=local"]
assert subprocess.run([word for word in local if word != "run.name=swept"], timeout=300).returncode == 0
def values(name):
    lines = [json.loads(line) for line in open(f"runs/{name}/sweep.jsonl")]
    return sorted((line["trial"], line["value"]) for line in lines if "value" in line)
assert len(values("swept")) == 2
both = zip(values("swept"), values("local"), strict=True)
assert all(abs(one[1] - other[1]) < 1e-5 for one, other in both), values("swept")
cluster.shutdown()
"""


def main() -> None:
    """Write the files, and let each one's reader check them."""
    peers = sys.argv[1] if len(sys.argv) == 2 else sys.exit(__doc__)
    ours = os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")])
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "OURS": sys.executable, "AWS_DEFAULT_REGION": "us-east-1", "OMP_NUM_THREADS": "1"}
        for arguments in JOBS:
            command = [sys.executable, "-m", "hfdist", "job", *arguments, *RUN]
            subprocess.run(command, cwd=folder, env=environment | {"PYTHONPATH": str(ROOT)}, check=True)
        for name, code, path in (
            ("SkyPilot", SKYPILOT, None),
            ("ParallelCluster", PARALLELCLUSTER, None),
            ("Ray", RAY, ours),
        ):
            given = environment | ({"PYTHONPATH": path} if path else {})
            subprocess.run([peers, "-c", code], cwd=folder, env=given, check=True)
            sys.stdout.write(f"{name}: as it should be\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
