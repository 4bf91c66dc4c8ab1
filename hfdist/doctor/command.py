"""The command line of `hfdist doctor`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hfdist.config.cli.arguments import FLAG, as_command, read_arguments, read_flag
from hfdist.config.cli.command import go_offline
from hfdist.config.composition.overrides import COMMAND_LINE
from hfdist.config.run import AUTO
from hfdist.doctor.examine import Request, check_alone, examine_rank, report
from hfdist.errors import ConfigError
from hfdist.topology import read_launcher

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
    """Examine, and end with exit code 7 where there is an error."""
    # Before torch is loaded: it would say of each dead link what a finding says.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    request, is_launched = parse_request(arguments)
    if request.is_offline:
        go_offline()
    if is_launched:
        examine_rank(request)
    elif request.processes > 1:
        from hfdist.launch import start_ranks

        sys.exit(start_ranks(examine_rank, request, processes=request.processes, max_restarts=0))
    else:
        report(check_alone(request), [], [], as_json=request.as_json)


main = as_command(_HELP, _examine)


def parse_request(arguments: list[str]) -> tuple[Request, bool]:
    """Read the command line.

    Returns:
        What is to be examined, and whether a launcher has started several processes for it.

    Raises:
        ConfigError: an unknown key, or a wrong value.
    """
    values = read_arguments(arguments, _KEYS)
    place = read_launcher()
    processes = _number(values, "processes", AUTO) if values.get("processes", AUTO) != AUTO else None
    if place.world_size > 1 and processes not in (None, 1, place.world_size):
        found = f"{processes}, and {place.world_size} of the launcher"
        what, hint = "the launcher has started another number of processes", f"processes={AUTO}"
        raise ConfigError(what, where="processes", found=found, hint=hint)
    if place.world_size == 1 and processes != 1:
        processes = _choose(processes)
    request = Request(
        run_dir=Path(values.get("run.dir", "runs")),
        processes=processes or 1,
        pair_seconds=float(_number(values, "pair_seconds", "10")),
        as_json=read_flag(values, "json"),
        is_offline=read_flag(values, "offline"),
    )
    return request, place.world_size > 1


def _choose(asked: int | None) -> int:
    from hfdist.launch import count_gpus

    gpus = count_gpus()
    if asked is not None and 0 < gpus < asked:
        raise ConfigError("each rank needs a GPU of its own", where="processes", found=f"{asked}, with {gpus}",
                          hint=f"processes={AUTO}")  # fmt: skip
    # A single GPU has no link to try. Without one, two ranks show whether processes of this machine reach each other.
    return asked or gpus or 2


def _number(values: dict[str, str], name: str, default: str) -> int:
    text = values.get(name, default)
    if not text.isdecimal() or int(text) < 1:
        where, allowed = f"{name} ({COMMAND_LINE})", f"a whole number >= 1, as in {name}=2"
        raise ConfigError("no such value", where=where, found=text, allowed=allowed)
    return int(text)
