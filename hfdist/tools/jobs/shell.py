"""The shell text of a job for each machine: environment, network interface, and torchrun with the run's command.

All values are quoted, so that none is anything but a value; only the user's own set-up lines stand as they are.
"""

from __future__ import annotations

import shlex
import textwrap

from hfdist.tools.jobs.job import Job


def setup_lines(job: Job) -> str:
    """Give the lines that enter the run's folder, set the machine up, and export the job's variables."""
    cluster = job.cluster
    variables = {
        "PYTHONUNBUFFERED": "1",
        # torchrun would end its ranks by force after 30 s, in the middle of a save.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(job.shutdown_seconds),
    }
    if cluster.cpus is not None:
        variables["OMP_NUM_THREADS"] = str(cluster.cpus)
    lines = []
    if job.folder is not None:
        lines.append(f"cd {shlex.quote(job.folder)} || exit 1")
    if cluster.setup:
        # A site's own files may ask for variables that are not set.
        lines += ["set +u", *cluster.setup, "set -u"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in (variables | cluster.environment).items()]
    return "".join(f"{line}\n" for line in lines)


def node_function(job: Job) -> str:
    """Give the function `start_ranks FIRST PEER RANK NODES PORT ID` of shell, whose process becomes torchrun.

    So signals reach torchrun. FIRST is the name of the first machine, which hosts the rendezvous; PEER is the name of
    any other machine, by the route to which the network interface is found; RANK is the number of this machine.
    """
    cluster, python = job.cluster, shlex.quote(job.cluster.python)
    settings = {
        # Said, and not left to torchrun, which compares names: FIRST need not be the machine's name for itself.
        "is_host": "$is_host",
        "join_timeout": cluster.join_seconds,
        "read_timeout": cluster.join_seconds,
        "last_call_timeout": 5,
    }
    rendezvous = ",".join(f"{name}={value}" for name, value in settings.items())
    interface = "" if cluster.interface is None else f" {shlex.quote(cluster.interface)}"
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
        f'route=$({python} -P -m hfdist.launch.address "$peer"{interface}) || return 1',
        'read -r interface address <<<"$route"',
        'export GLOO_SOCKET_IFNAME="$interface" NCCL_SOCKET_IFNAME="=$interface"',
    ]
    indented = textwrap.indent("\n".join(body), "    ")
    # The command is not given to `indent`: a quoted value may have line breaks, which must stay as they are.
    command_lines = " \\\n        ".join(command)
    return f"start_ranks() {{\n{indented}\n    {command_lines}\n}}\n"


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
    """Give the script of one machine, which starts its ranks and waits for them.

    Before it, FIRST, PEER, NODE_RANK and ID must be set: the first machine, any other one, the number of this machine,
    and a name of this start; PORT may be. After it, `code` is the run's exit code, and `next` is `again` or `end`.
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
