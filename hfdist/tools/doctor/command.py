"""The command line of `hfdist doctor`: what is examined, and whether by this process alone or by several ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hfdist.config.checks.offline import go_offline
from hfdist.config.cli.arguments import FLAG, as_command, read_arguments, read_flag
from hfdist.config.run import AUTO
from hfdist.tools.doctor.arguments import read_processes, read_seconds
from hfdist.tools.doctor.examine import Request, check_machine, report

_HELP = """\
Examine a machine, or several, before a job: versions, GPUs, memory, limits, folders, the Hub, and each link between two
ranks. Each finding has a line: ok, warning or error, and what to do.

hfdist doctor                                          this machine, with a rank for each GPU, or two on the CPU
torchrun --nnodes 2 ... -m hfdist.recipes.doctor       several machines; or accelerate launch, or srun torchrun

processes=N|auto    ranks to start, where no launcher has; 1: no links are tried, and torch is not loaded
run.dir=FOLDER      where runs are to be; default: runs
pair_seconds=N      how long two ranks may take to connect, and for each message; default: 10
json=true, --json   for tools
--offline           ask nothing of the Hub

Exit codes: 0 no error, 2 a wrong argument, 7 an error.
"""
_KEYS = {"processes": f"N|{AUTO}", "run.dir": "FOLDER", "pair_seconds": "N", "json": FLAG, "offline": FLAG}


def _examine(arguments: list[str]) -> None:
    """Examine, and end with exit code 7 if there is an error."""
    # Set before torch is loaded: it would write of each dead link what a finding says.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    request, is_launched = parse_request(arguments)
    if request.is_offline:
        go_offline()
    if not is_launched and request.processes == 1:
        report(check_machine(request, num_hosts=1), [], [], as_json=request.as_json)
        return
    # Imported here, as they load torch, which one process does not need.
    from hfdist.launch.launch import start_ranks
    from hfdist.tools.doctor.ranks import examine_rank

    if is_launched:
        examine_rank(request)
    else:
        sys.exit(start_ranks(examine_rank, request, processes=request.processes, max_restarts=0))


def parse_request(arguments: list[str]) -> tuple[Request, bool]:
    """Read the command line.

    Returns:
        What is to be examined, and whether a launcher has started several processes for it.

    Raises:
        ConfigError: an unknown key, or a wrong value.
    """
    values = read_arguments(arguments, _KEYS)
    processes, is_launched = read_processes(values)
    request = Request(
        run_dir=Path(values.get("run.dir", "runs")),
        processes=processes,
        pair_seconds=read_seconds(values, "pair_seconds", "10"),
        as_json=read_flag(values, "json"),
        is_offline=read_flag(values, "offline"),
    )
    return request, is_launched


main = as_command(_HELP, _examine)
