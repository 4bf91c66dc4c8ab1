"""The command line of `hfdist job`: for which cluster, which run, and where the file goes. Nothing is submitted."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from hfdist.config.checks.offline import check_offline
from hfdist.config.checks.preflight import check_run, plan_run
from hfdist.config.cli.about_run import MEANINGS, choose, read_line
from hfdist.config.cli.arguments import as_command
from hfdist.config.cli.recipe_names import SHARED
from hfdist.config.conf_folder import list_options, shipped_folder
from hfdist.config.data import WHOLE
from hfdist.config.override_text import COMMAND_LINE
from hfdist.config.paths import expand_user
from hfdist.config.run import AUTO, RunConfig
from hfdist.config.strategy import simple_layout
from hfdist.errors import ConfigError
from hfdist.records import RunFolder, read_lines
from hfdist.tools.jobs.cluster import GROUP, ClusterConfig, cluster_keys, compose_cluster, describe_keys, refuse_home
from hfdist.tools.jobs.job import MARK, STANDARD_OUTPUT, Job, JobFiles
from hfdist.tools.jobs.kubernetes import write_kubernetes
from hfdist.tools.jobs.parallelcluster import write_parallelcluster
from hfdist.tools.jobs.ray import write_ray
from hfdist.tools.jobs.skypilot import write_skypilot
from hfdist.tools.jobs.slurm import write_slurm
from hfdist.tools.jobs.slurm_array import write_slurm_array


class Target(NamedTuple):
    """A kind of cluster for which a job file can be written."""

    ending: str
    """Ending of the file's name, without the dot."""
    write: Callable[[Job], JobFiles]
    """Function that makes the files of a job."""


TARGETS = {
    "slurm": Target("sbatch", write_slurm),
    "kubernetes": Target("kubernetes.yaml", write_kubernetes),
    "ray": Target("ray.py", write_ray),
    "skypilot": Target("skypilot.yaml", write_skypilot),
    "parallelcluster": Target("sbatch", write_parallelcluster),
}
"""Targets by their names."""
_ARRAY_TARGET = "slurm"
"""The target that has arrays, in which machines share the files of a corpus."""
_HELP = """\
Write the job file of a run for a cluster. It submits nothing.

hfdist job to=slurm cluster=slurm cluster.nodes=2 +experiment=demo strategy=ddp    writes demo.sbatch
hfdist job to=slurm cluster=slurm run=runs/demo out=again.sbatch                   goes on with that run

to=TARGET           {targets}; the name alone means the same
cluster=NAME|FILE   the machines: {clusters}; or a file of your own
cluster.KEY=VALUE   a key of the cluster:
{keys}

{meanings}
                    index and pretokenize, to=slurm: cluster.nodes machines share the files, in an array
out=FILE            default: the run's name in this folder; out=-: standard output
--offline, --config-dir DIR and --config-name NAME mean what they mean for the recipe. All other arguments are overrides
of the run's config, as `hfdist pretrain` takes them.

Exit codes: 0 written, 2 a mistake in the run's config, in the cluster, or in how they fit each other.
"""


def parse_job(arguments: Sequence[str]) -> tuple[str, Job]:
    """Read the command line, compose the run's config and the cluster, and check both.

    Returns:
        The name of the target, and the job.

    Raises:
        ConfigError: the first mistake.
    """
    arguments = [f"to={argument}" if argument in TARGETS else argument for argument in arguments]
    line = read_line(arguments, GROUP, cluster_keys(), ("to", "cluster", "out"), others=SHARED)
    target = choose("to", line.own.get("to"), tuple(TARGETS))
    config = line.compose()
    user_folder = None if line.config_dir is None else expand_user(line.config_dir)
    cluster = compose_cluster(line.own.get("cluster", "default"), line.of_group, user_folder)
    if not cluster.same_files:
        # The override, as the composed config has `~` written out already, by this machine's home.
        for override in line.overrides:
            if override.startswith("run.dir="):
                refuse_home("run.dir", override.partition("=")[2].strip("'\""))
    if line.recipe in SHARED:
        check_array(config, target, line.recipe, is_offline=line.is_offline)
    else:
        check_job(config, cluster, is_offline=line.is_offline)
    out = line.own.get("out", f"{config.run.name}.{TARGETS[target].ending}")
    job = Job(
        recipe=line.recipe,
        arguments=line.recipe_arguments,
        config=config,
        cluster=cluster,
        command=["hfdist", "job", *arguments],
        path=expand_user(out),
    )
    return target, job


def write_job(target: str, job: Job) -> None:
    """Write the files of a job, and print how they are submitted; or print the files themselves.

    Raises:
        ConfigError: another file is in the place of one, or none can be written there.
    """
    job_files = write_slurm_array(job) if job.recipe in SHARED else TARGETS[target].write(job)
    if job.path == STANDARD_OUTPUT:
        sys.stdout.write("".join(file.text for file in job_files.files))
        return
    try:
        for file in job_files.files:
            _check_place(file.path)
        job_files.write()
    except OSError as error:
        what, where = "the file cannot be written", f"out ({COMMAND_LINE})"
        raise ConfigError(what, where=where, found=f"{error.filename}: {error.strerror}", hint="out=-") from error
    sys.stdout.write("".join(f"written: {file.path}\n" for file in job_files.files))
    sys.stdout.write("".join(f"to submit it: {line}\n" for line in job_files.submit))


def _write(arguments: list[str]) -> None:
    write_job(*parse_job(arguments))


def check_array(config: RunConfig, target: str, recipe: str, *, is_offline: bool) -> None:
    """Check a job whose machines share the files of a corpus. ConfigError: the first mistake."""
    if target != _ARRAY_TARGET:
        what, hint = f"machines that share the files of hfdist {recipe} are an array of SLURM", f"to={_ARRAY_TARGET}"
        raise ConfigError(what, where=f"to ({COMMAND_LINE})", found=target, hint=hint)
    if config.data.shard != WHOLE:
        what, hint = "the job gives each machine a share of its own", f"data.shard={WHOLE} cluster.nodes=4"
        raise ConfigError(what, where="data.shard", found=config.data.shard, allowed=WHOLE, hint=hint)
    if is_offline:
        check_offline(config)


def check_job(config: RunConfig, cluster: ClusterConfig, *, is_offline: bool) -> None:
    """Check a run as its own processes will, for the number of processes of the cluster.

    Raises:
        ConfigError: the first mistake.
    """
    processes = config.launch.processes
    if processes not in (AUTO, "1", str(cluster.world_size)):
        what = "the job's launcher starts another number of processes"
        found = f"{processes}, and {cluster.nodes} x {cluster.processes} of the cluster"
        hint = f"launch.processes=1 leaves it to the launcher; or cluster.nodes=1 cluster.processes={processes}"
        raise ConfigError(what, where="launch.processes", found=found, hint=hint)
    if is_offline:
        check_offline(config)
    # Paths and packages are checked only if the machines have the files of this one.
    check = check_run if cluster.same_files else plan_run
    try:
        check(config, world_size=cluster.world_size)
    except ConfigError as error:
        if error.where in ("strategy", "strategy.data"):
            # The hint of the error says how processes are started by hand, which a job does by its cluster's keys.
            fewest = config.strategy.mesh.world_size
            layout = simple_layout(config.strategy, cluster.world_size)
            error.hint = f"cluster.nodes=1 cluster.processes={fewest}, or another layout, such as {layout}"
        raise
    _check_grace(config.run.folder, cluster)


def _check_grace(folder: RunFolder, cluster: ClusterConfig) -> None:
    """Raise a ConfigError if a run that has begun before may need more time after a signal than the cluster gives.

    It ends a step and saves in that time: the longest ones so far count.
    """
    step = _longest(folder.metrics, "step_seconds")
    save = _longest(folder.events, "seconds", event="save")
    # Twice as long, as they may take longer this time, and a minute for the launcher and the scheduler.
    needed = 60 * math.ceil(2 * (step + save) / 60 + 1)
    has_begun = step + save > 0
    if has_begun and cluster.grace_seconds < needed:
        what = "the run would be ended by force before it has saved"
        found = f"{cluster.grace_seconds}; in {folder.path} a step took {step:.1f} s, a save {save:.1f} s"
        hint = f"cluster.grace_seconds={needed}"
        raise ConfigError(what, where="cluster.grace_seconds", found=found, allowed=f">= {needed}", hint=hint)


def _longest(path: Path, key: str, event: str | None = None) -> float:
    """Give the largest value of a key in the lines of a file, or in its lines about an event; 0: there is none."""
    values = (line.get(key) for line in read_lines(path) if event is None or line.get("event") == event)
    return max((float(value) for value in values if isinstance(value, (int, float))), default=0.0)


def _is_job_file(path: Path) -> bool:
    """Whether a file has the mark of `hfdist job` in its first lines."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return MARK in file.read(500).decode(errors="replace")


def _check_place(path: Path) -> None:
    """Raise a ConfigError if a file must not be replaced, or if its folder does not exist."""
    if path.exists() and not _is_job_file(path):
        hint = f"out={path / 'job'}" if path.is_dir() else f"out={path.stem}-job{path.suffix}"
        what = "this is a folder" if path.is_dir() else "another file is there, which no `hfdist job` has written"
        raise ConfigError(what, where=f"out ({COMMAND_LINE})", found=str(path), hint=hint)
    if not path.absolute().parent.is_dir():
        hint = f"mkdir -p {shlex.quote(str(path.parent))}, or out={path.name} for this folder"
        raise ConfigError("there is no such folder", where=f"out ({COMMAND_LINE})", found=str(path.parent), hint=hint)


main = as_command(
    _HELP.format(
        targets=" | ".join(TARGETS),
        keys=describe_keys(),
        meanings=MEANINGS,
        clusters=", ".join(list_options(shipped_folder(), GROUP)),
    ),
    _write,
)
