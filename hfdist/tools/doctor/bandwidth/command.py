"""The command line of `hfdist bandwidth`: what is measured, by how many ranks, and where the figures go."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hfdist.config.cli.arguments import FLAG, as_command, read_arguments, read_flag
from hfdist.config.cli.process_end import stop_everywhere, told_in_one_message
from hfdist.config.override_text import COMMAND_LINE
from hfdist.config.paths import expand_user
from hfdist.config.run import AUTO
from hfdist.errors import ConfigError
from hfdist.tools.doctor.arguments import read_processes, read_seconds
from hfdist.tools.doctor.bandwidth.figures import LEAST_LINK_BYTES, describe_size, read_size

if TYPE_CHECKING:
    from hfdist.tools.doctor.bandwidth.measure import Request

_HELP = """\
Measure what the collectives of this machine, or of several, reach by size: latency, algorithm bandwidth and bus
bandwidth as NCCL's own tests define them, and the CPU time that they take.

hfdist bandwidth processes=4                          this machine; default: a rank for each GPU, or two on the CPU
torchrun --nnodes 2 ... -m hfdist.recipes.bandwidth   several machines; or accelerate launch, or srun torchrun

processes=N|auto    ranks to start, where no launcher has
largest=SIZE        the largest tensor, such as 256MiB; default: 64MiB
out=FILE.yaml       also write a file of hardware with these links, for hfdist plan plan.hardware=FILE.yaml
hardware=NAME       of which that file has all else, such as h100_80gb; default: the device at hand
call_seconds=N      how long ranks may take to connect, and for one call; default: 60
json=true, --json   for tools

Exit codes: 0, 2 a wrong argument, 7 ranks that do not come, cannot reach each other or do not answer.
"""
_KEYS = {
    "processes": f"N|{AUTO}",
    "largest": "SIZE",
    "out": "FILE.yaml",
    "hardware": "NAME",
    "call_seconds": "N",
    "json": FLAG,
}
_LEAST_BYTES = 1024


def _measure(arguments: list[str]) -> None:
    """Measure as the arguments say, by ranks that are started here, or as a rank that a launcher has started."""
    values = read_arguments(arguments, _KEYS)
    largest_bytes, out = _largest(values), _out(values)
    if out is not None and largest_bytes < LEAST_LINK_BYTES:
        what, hint = "tensors so small tell nothing of a link's speed", f"largest={describe_size(LEAST_LINK_BYTES)}"
        where, found = f"largest, out ({COMMAND_LINE})", values["largest"]
        raise ConfigError(what, where=where, found=found, hint=hint.replace(" ", ""))
    if "hardware" in values and out is None:
        what, hint = "there is no file for this hardware", f"out={values['hardware']}_measured.yaml"
        raise ConfigError(what, where=f"hardware ({COMMAND_LINE})", found=values["hardware"], hint=hint)
    if "hardware" in values:
        # A wrong name is refused now, before ranks are started.
        from hfdist.config.hardware import CPU, read_hardware

        if values["hardware"] != CPU:
            read_hardware(values["hardware"])
    # Set before torch is loaded: what fails is said once, by this command.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    processes, is_launched = read_processes(values)
    if processes == 1 and not is_launched:
        # Without a GPU, `auto` is two. Two ranks of one GPU can only meet on the CPU.
        is_only_gpu = values.get("processes", AUTO) == AUTO
        what = "one rank has nobody to send to"
        hint = "CUDA_VISIBLE_DEVICES= hfdist bandwidth processes=2" if is_only_gpu else "processes=2"
        raise ConfigError(what, where=f"processes ({COMMAND_LINE})", found=processes, hint=hint)
    from hfdist.tools.doctor.bandwidth.measure import Request

    request = Request(
        processes=processes,
        largest_bytes=largest_bytes,
        call_seconds=read_seconds(values, "call_seconds", "60"),
        as_json=read_flag(values, "json"),
        out=out,
        hardware=values.get("hardware"),
    )
    if is_launched:
        _be_rank(request)
    else:
        from hfdist.launch.launch import start_ranks

        sys.exit(start_ranks(_be_rank, request, processes=processes, max_restarts=0))


def _be_rank(request: Request) -> None:
    from hfdist.tools.doctor.bandwidth.measure import measure_rank

    with told_in_one_message(stop_everywhere):
        measure_rank(request)


def _largest(values: dict[str, str]) -> int:
    text = values.get("largest", "64MiB")
    size = read_size(text)
    if size is None or size < _LEAST_BYTES:
        where, allowed = f"largest ({COMMAND_LINE})", "1KiB or more, as in largest=64MiB"
        raise ConfigError("no such value", where=where, found=text, allowed=allowed)
    return size


def _out(values: dict[str, str]) -> Path | None:
    if "out" not in values:
        return None
    path = expand_user(values["out"])
    if path.suffix not in (".yaml", ".yml"):
        where, hint = f"out ({COMMAND_LINE})", f"out={path.with_suffix('.yaml')}"
        raise ConfigError("this is no such file", where=where, found=str(path), allowed=".yaml, .yml", hint=hint)
    return path


main = as_command(_HELP, _measure)
