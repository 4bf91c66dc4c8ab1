"""Jobs to write, the programs of a cluster's machine that only note how they were called, and records of ended runs."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import yaml

from hfdist.records import Event, RunFolder, RunRecord, State, add_event
from hfdist.tools.jobs.command import TARGETS, parse_job

HOSTILE = [
    "report.sample_prompt=\"$(touch PWNED) `touch PWNED` ${run.name} $HOME $$(JOBSET) $(JOBSET)\"",
    "train.freeze=[\"'; touch PWNED; '\",\"\\\\\"]",
    'run.dir="runs/it\'s \\"$(touch PWNED)\\" #"',
    "model.revision=\"a\nEND\n#SBATCH --partition=other\ntouch PWNED\n: {x}\"",
]  # fmt: skip
RUN = ("model=tiny", "strategy=ddp", "run.name=Job_1")
NEEDED = {
    "slurm": (),
    "kubernetes": ("cluster.image=image:1", "cluster.kubernetes.claim=runs", "cluster.interface=lo"),
    "trainjob": (
        "cluster.image=image:1",
        "cluster.kubernetes.claim=runs",
        "cluster.interface=lo",
        "cluster.kubernetes.kind=trainjob",
    ),
    "ray": (),
    "skypilot": (
        "cluster.skypilot.volume=runs",
        "cluster.gpus=true",
        "cluster.skypilot.accelerator=H100",
        'cluster.skypilot.install=["pip install ."]',
    ),
    "parallelcluster": (
        "cluster.aws.region=us-east-1",
        "cluster.aws.subnet=subnet-0123abcd",
        "cluster.aws.key_name=key",
        "cluster.aws.instance=p5.48xlarge",
        "cluster.aws.efa=true",
    ),
}
"""What each target, and kind of a target, wants to know besides; names of pods are known in their cluster only."""

# Notes the arguments and variables of torchrun, and ends as it is told; other modules are the real ones.
_PYTHON = f"""#!{sys.executable} -S
import json, os, sys
if sys.argv[1:4] == ["-P", "-m", "torch.distributed.run"]:
    with open(os.environ["NOTES"], "a") as file:
        file.write(json.dumps([sys.argv[4:], dict(os.environ)]) + "\\n")
    os.path.exists("ENDED") and os.replace("ENDED", os.path.join(os.environ["RUN_DIR"], "run.json"))
    sys.exit(1)
os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])
"""
_PROGRAMS = {
    "python": _PYTHON,
    # A container begins in a folder of its own.
    "srun": '#!/bin/bash\nnodes="0 1"\n'
    'while [[ "$1" == --* ]]; do case "$1" in --nodes=1) nodes=0;; --container-image=*) cd /;; esac; shift; done\n'
    'export SLURM_NODEID\nfor SLURM_NODEID in $nodes; do "$@" || code=$?; done; exit "${code:-0}"\n',
    "scontrol": '#!/bin/bash\n[ "$2" = hostnames ] && printf "127.0.0.1\\n127.0.0.2\\n"'
    ' || echo "$@" >>"$NOTES.scontrol"\n',
    "squeue": '#!/bin/bash\necho "$JOB_STATE"\n',
    "sleep": "#!/bin/bash\n",
}


def make(target, *arguments, folder):
    """The job, and its files by their names."""
    kind = target
    target = "kubernetes" if target == "trainjob" else target
    out = folder / f"job.{TARGETS[target].ending}"
    _, job = parse_job([f"to={target}", *RUN, f"out={out}", *NEEDED[kind], *arguments])
    return job, {file.path.name: file.text for file in TARGETS[target].write(job).files}


def shell_of(target, texts):
    """What bash runs on a machine."""
    text = next(iter(texts.values()))
    if target in ("slurm", "parallelcluster"):
        return text
    if target == "ray":
        (values,) = (node.value for node in ast.parse(text).body if isinstance(node, ast.Assign))
        return ast.literal_eval(values)["script"]
    document = next(yaml.safe_load_all(text))
    if target == "skypilot":
        return document["run"]
    return expand(job_of(document)["template"]["spec"]["containers"][0]["command"][2], {"JOBSET": "replaced"})


def job_of(document):
    spec = document["spec"]
    spec = spec["template"]["spec"] if document["kind"] == "TrainingRuntime" else spec
    return spec["replicatedJobs"][0]["template"]["spec"]


def expand(text, variables):
    """What Kubernetes makes of a command: k8s.io/kubernetes/third_party/forked/golang/expansion."""

    def replace(match):
        given = match[0]
        return "$" if given == "$$" else variables.get(given[2:-1], given)

    return re.sub(r"\$\$|\$\([^)]*\)", replace, text)


def run_script(script, folder, *, state="RUNNING", **variables):
    """Run it as a cluster would, in `folder`; give how it ended, and the calls of torchrun."""
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    for name, text in _PROGRAMS.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    notes = folder / "notes"
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(Path(__file__).resolve().parents[3]),
        "NOTES": str(notes), "JOB_STATE": state, "HOME": "/home", "SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "nodes[0-1]", "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2", "SKYPILOT_NODE_RANK": "0",
        "SKYPILOT_TASK_ID": "task", "JOBSET": "job", "JOB_COMPLETION_INDEX": "0", "RESTART_ATTEMPT": "0",
        "FIRST": "127.0.0.1", "PEER": "127.0.0.2", "NODE_RANK": "0", "ID": "id", "PORT": "29999", **variables,
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "-c", script], env=environment, cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    calls = [json.loads(line) for line in notes.read_text().splitlines()] if notes.is_file() else []
    return done, calls


def leave(run_dir, *ends):
    """The record and events of starts that have ended; each end: (exit code, or None if it is lost; step)."""
    run_dir.mkdir(parents=True, exist_ok=True)
    for start, (exit_code, step) in enumerate(ends, 1):
        record = RunRecord(start=start, state=State.of(exit_code), exit_code=exit_code, step=step)
        RunFolder(run_dir).record.write_text(json.dumps(record.to_json()))
        add_event(run_dir, Event.end, start=start, step=step, exit_code=exit_code)
