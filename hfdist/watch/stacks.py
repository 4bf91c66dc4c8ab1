"""Stacks of this process's threads, and the collectives that it has begun, without any value of a variable."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch
from torch import distributed as dist

from hfdist.watch.heartbeat import Heartbeat
from hfdist.watch.snapshot import Collective, Frame, Snapshot

# Ends of files, and parts of names of functions in them, that run only while torch compiles. Other frames of the
# compiler do not tell: what is compiled runs below them, too.
_COMPILING = (("_dynamo/convert_frame.py", ""), ("_inductor/compile_fx.py", "compile"))
_COLLECTIVES = os.path.join("torch", "distributed", "distributed_c10d.py")
_TORCH = os.path.dirname(torch.__file__) + os.sep
_PYTHON, _PACKAGES = (sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib"))
_MOST_FRAMES = 40
"""Most frames of a snapshot."""
_MOST_OF_GROUP = 64
"""Most collectives of each process group in a snapshot."""
_MOST_LETTERS = 300
"""Most letters of the name of a collective, which each heartbeat may have."""


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
            file = os.sep.join(code.co_filename.split(os.sep)[-2:])
            return f"{name} of {file}:{frame.f_lineno}"[-_MOST_LETTERS:]
    # Collectives that C++ calls in a backward have no frame of Python. A hang of NCCL leaves hundreds of them.
    texts = [one.text for one in recorded_collectives() if not one.is_done]
    if not texts:
        return None
    more = f", and {len(texts) - 1} more" if len(texts) > 1 else ""
    return texts[0][:_MOST_LETTERS] + more


def last_collectives() -> str:
    """Describe the collectives that have not finished, or else the last one, by torch's flight recorder."""
    recorded = recorded_collectives()
    unfinished = [one for one in recorded if not one.is_done]
    return ", ".join(one.text for one in unfinished or recorded[-1:])


def take_snapshot(rank: int, beat: Heartbeat) -> Snapshot:
    """Make the snapshot of this rank, which `explain-hang` compares with others."""
    frames = [
        Frame(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name)
        for frame in _main_frames()
        if not _is_of_libraries(frame.f_code.co_filename)
    ]
    by_group: dict[str, list[Collective]] = {}
    for one in recorded_collectives():
        by_group.setdefault(one.group, []).append(one)
    collectives = [one for of_group in by_group.values() for one in of_group[-_MOST_OF_GROUP:]]
    return Snapshot(
        rank=rank, beat=beat, frames=frames[:_MOST_FRAMES], collectives=collectives, groups=_ranks_of_groups()
    )


def recorded_collectives() -> list[Collective]:
    """Read torch's flight recorder, the oldest first.

    It is on by default (TORCH_FR_BUFFER_SIZE=0 switches it off), private and without documentation: in torch 2.13
    `_dump_fr_trace_json` gives gloo's collectives, and `_dump_nccl_trace_json` those of NCCL; each is missing where
    torch was built without it. Its JSON has no lines of code.
    """
    entries: list[tuple[int, Collective]] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(torch._C._distributed_c10d, name, None)
        # Another version of torch may give anything: if the watch failed here, its rank would count as dead.
        with contextlib.suppress(Exception):
            if dump is not None and dist.is_initialized():
                for entry in json.loads(dump(includeCollectives=True, onlyActive=False))["entries"]:
                    group, is_p2p = entry["process_group"], entry["is_p2p"]
                    number = entry["p2p_seq_id"] if is_p2p else entry["collective_seq_id"]
                    sizes, is_done = entry["input_sizes"], entry["retired"]
                    one = Collective(group[0], number, entry["profiling_name"], sizes, is_done, group[-1], is_p2p)
                    entries.append((entry["time_created_ns"], one))
    return [one for _, one in sorted(entries, key=lambda entry: entry[0])]


def _ranks_of_groups() -> dict[str, list[int]]:
    """Give the ranks of each group by its name. The flight recorder has none of gloo's groups; `_world` is private."""
    with contextlib.suppress(Exception):
        return {
            name: dist.get_process_group_ranks(group) for group, name in dist.distributed_c10d._world.pg_names.items()
        }
    return {}


def _is_of_libraries(file: str) -> bool:
    """Whether a file belongs to torch or to Python itself, where the innermost calls of each wait are."""
    return file.startswith((_TORCH, "<")) or (file.startswith(_PYTHON) and not file.startswith(_PACKAGES))


def _main_frames() -> Iterator[FrameType]:
    """Frames of the main thread, from the innermost outwards."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back
