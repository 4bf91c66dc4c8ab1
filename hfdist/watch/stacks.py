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
            return f"{name} of {os.sep.join(code.co_filename.split(os.sep)[-2:])}:{frame.f_lineno}"
    # Those that C++ calls in a backward have no frame.
    return ", ".join(text for is_done, text in _recorded() if not is_done) or None


def last_collectives() -> str:
    """Describe those that have not finished, or else the last, by torch's flight recorder."""
    recorded = _recorded()
    return ", ".join([text for is_done, text in recorded if not is_done] or [text for _, text in recorded[-1:]])


def _recorded() -> list[tuple[bool, str]]:
    """Read torch's flight recorder: whether each collective has finished, and its description, the oldest first.

    It is on by default (TORCH_FR_BUFFER_SIZE=0 switches it off), private and without documentation: in torch 2.13
    `_dump_fr_trace_json` gives gloo's collectives, and `_dump_nccl_trace_json` those of NCCL; each is missing where
    torch was built without it.
    """
    entries: list[tuple[int, bool, str]] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(torch._C._distributed_c10d, name, None)
        # Whatever another version gives: a watch that fails here would be taken for a dead rank.
        with contextlib.suppress(Exception):
            if dump is not None and dist.is_initialized():
                for entry in json.loads(dump(includeCollectives=True, onlyActive=False))["entries"]:
                    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
                    place = f"number {number} of {entry['process_group'][-1] or 'its group'}"
                    state = "finished" if entry["retired"] else "not finished"
                    text = f"{entry['profiling_name']} {entry['input_sizes']} ({place}, {state})"
                    entries.append((entry["time_created_ns"], entry["retired"], text))
    return [(is_done, text) for _, is_done, text in sorted(entries)]


def _main_frames() -> Iterator[FrameType]:
    """From the innermost outwards."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back
