"""The part of a job that runs on each machine, as shell: interface, environment, and torchrun with the run's command.

All values but the user's own set-up lines are quoted, so that none of them is anything but a value.
"""

from __future__ import annotations

import shlex
import textwrap

from hfdist.tools.jobs.job import Job


def setup_lines(job: Job) -> str:
    """The folder, the user's own lines, and the variables of the job."""
    cluster = job.cluster
    variables = {
        "PYTHONUNBUFFERED": "1",
        # torchrun would end its ranks by force after 30 s, in the middle of a save.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(job.shutdown_seconds),
    }
    if cluster.cpus is not None:
        variables["OMP_NUM_THREADS"] = str(cluster.cpus)
    lines = [f"cd {shlex.quote(job.folder)} || exit 1"] if job.folder is not None else []
    # A site's own files may ask for variables that are not set.
    lines += ["set +u", *cluster.setup, "set -u"] if cluster.setup else []
    lines += [f"export {name}={shlex.quote(value)}" for name, value in (variables | cluster.environment).items()]
    return "".join(f"{line}\n" for line in lines)


def node_function(job: Job) -> str:
    """The function `start_ranks FIRST PEER RANK NODES PORT ID`. Its process becomes torchrun, so that signals reach it.

    FIRST is the name of the first machine, which hosts the rendezvous; PEER that of any other one, by whose route the
    interface is found; RANK this machine's number.
    """
    cluster, python = job.cluster, shlex.quote(job.cluster.python)
    rendezvous = ",".join(
        f"{name}={value}"
        for name, value in {
            # Its name need not be the one that the machine gives itself.
            "is_host": "$is_host",
            "join_timeout": cluster.join_seconds,
            "read_timeout": cluster.join_seconds,
            "last_call_timeout": 5,
        }.items()
    )
    asked = "" if cluster.interface is None else f" {shlex.quote(cluster.interface)}"
    command = [
        f"exec {python} -P -m torch.distributed.run",
        f'--nnodes="$nodes" --nproc-per-node={cluster.processes} --max-restarts=0',
        '--rdzv-backend=c10d --rdzv-endpoint="$first:$port" --rdzv-id="$id"',
        f'--rdzv-conf="{rendezvous}" --local-addr="$address"',
        f"--no-python {python} -P -m hfdist {shlex.join([job.recipe, *job.arguments])}",
    ]
    body = [
        'local first="$1" peer="$2" rank="$3" nodes="$4" port="$5" id="$6" is_host=0 route interface address',
        '[ "$rank" -eq 0 ] && is_host=1',
        "# Where a machine's own name leads to loopback, gloo and NCCL would not find the others.",
        f'route=$({python} -P -m hfdist.launch.address "$peer"{asked}) || return 1',
        'read -r interface address <<<"$route"',
        'export GLOO_SOCKET_IFNAME="$interface" NCCL_SOCKET_IFNAME="=$interface"',
    ]
    # Not given to `indent`: a quoted value may hold line breaks.
    last = " \\\n        ".join(command)
    return "start_ranks() {\n" + textwrap.indent("\n".join(body), "    ") + f"\n    {last}\n}}\n"


_ONE_MACHINE = """\
{setup}
{node_function}
run_dir={run_dir}
start=$({python} -P -m hfdist.tools.jobs.verdict "$run_dir") || exit 1
ranks='' ends=''
# A signal reaches only this shell: pass it on. The ranks save, and torchrun waits for them.
trap 'ends=1; [ -z "$ranks" ] || kill -TERM "$ranks" 2>/dev/null' TERM INT
start_ranks "$FIRST" "$PEER" "$NODE_RANK" {nodes} "${{PORT:-{port}}}" "$ID" &
ranks=$!
[ -z "$ends" ] || kill -TERM "$ranks" 2>/dev/null
wait "$ranks"
while kill -0 "$ranks" 2>/dev/null; do
    wait "$ranks"
done
# A signal may have ended the last wait and not the ranks; bash remembers how these ended.
wait "$ranks"
launcher=$?
answer=$({python} -P -m hfdist.tools.jobs.verdict "$run_dir" "$start" "$launcher" {max_restarts}) || exit 1
read -r code next <<<"$answer"
echo "hfdist: the run has ended with exit code $code, $next (torchrun: $launcher)"
"""
PORT = 29400
"""Default port of the rendezvous. It suits jobs whose machines each have a network address of their own."""


def machine_script(job: Job) -> str:
    """The script of one machine, which ends with `code` and `next` (`again` or `end`) set to the verdict.

    FIRST, PEER, NODE_RANK and ID are to be set before it (see `node_function`), and PORT may be.
    """
    return _ONE_MACHINE.format(
        setup=setup_lines(job),
        node_function=node_function(job),
        run_dir=shlex.quote(job.config.run.dir),
        python=shlex.quote(job.cluster.python),
        nodes=job.cluster.nodes,
        port=PORT,
        max_restarts=job.cluster.max_restarts,
    )
