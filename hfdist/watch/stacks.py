"""What the threads of this process are doing, and which collective it began last. Neither variables nor environment."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import distributed as dist

# Not merely any frame of the compiler: what it has compiled runs below such frames, too.
_COMPILING = (("_dynamo/convert_frame.py", ""), ("_inductor/compile_fx.py", "compile"))
_COLLECTIVES = os.path.join("torch", "distributed", "distributed_c10d.py")
_TORCH = os.path.dirname(torch.__file__) + os.sep


def write_stacks(path: Path, header: str) -> None:
    """Write the header and the stacks of all threads, as file, line and function.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        main = threading.main_thread().ident or 0
        file.write(f"{header}\nlast collectives: {last_collectives() or 'not known'}\nmain thread: {main:#018x}\n\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)


def is_compiling() -> bool:
    """Whether the main thread is in torch's compiler."""
    return any(
        frame.f_code.co_filename.endswith(file) and function in frame.f_code.co_name
        for frame in _main_frames()
        for file, function in _COMPILING
    )


def waits_in() -> str | None:
    """Name the collective in which the main thread is, with the line that called it; None: in none, or not known."""
    name = None
    for frame in _main_frames():
        code = frame.f_code
        if code.co_filename.endswith(_COLLECTIVES):
            name = code.co_name
        elif name is not None and not code.co_filename.startswith(_TORCH):
            return f"{name} of {_short(code.co_filename)}:{frame.f_lineno}"
    # Those that C++ calls in a backward have no frame.
    return ", ".join(_describe(entry) for entry in _recorded() if not entry["retired"]) or None


def last_collectives() -> str:
    """Describe those that have not finished, or else the last, by torch's flight recorder."""
    recorded = _recorded()
    unfinished = [entry for entry in recorded if not entry["retired"]]
    return ", ".join(_describe(entry) for entry in unfinished or recorded[-1:])


def _recorded() -> list[dict[str, Any]]:
    """Read torch's flight recorder, which is on by default (TORCH_FR_BUFFER_SIZE=0 switches it off).

    Private and without documentation: in torch 2.13 `_dump_fr_trace_json` gives gloo's collectives, and
    `_dump_nccl_trace_json` those of NCCL; each is missing where torch was built without it.
    """
    entries: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(torch._C._distributed_c10d, name, None)
        # Whatever another version gives: a watch that fails here would be taken for a dead rank.
        with contextlib.suppress(Exception):
            if dump is not None and dist.is_initialized():
                entries += map(_known_fields, json.loads(dump(includeCollectives=True, onlyActive=False))["entries"])
    return sorted(entries, key=lambda entry: entry["time_created_ns"])


def _known_fields(entry: dict[str, Any]) -> dict[str, Any]:
    """Give those that are used here.

    Raises:
        KeyError: one is missing.
    """
    names = ("time_created_ns", "process_group", "is_p2p", "p2p_seq_id", "collective_seq_id", "retired")
    return {name: entry[name] for name in (*names, "profiling_name", "input_sizes")}


def _describe(entry: dict[str, Any]) -> str:
    group = entry["process_group"][-1]
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    state = "finished" if entry["retired"] else "not finished"
    return f"{entry['profiling_name']} {entry['input_sizes']} (number {number} of {group or 'its group'}, {state})"


def _main_frames() -> Iterator[FrameType]:
    """From the innermost outwards."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _short(path: str) -> str:
    return os.sep.join(path.split(os.sep)[-2:])
