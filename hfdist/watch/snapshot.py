"""What ranks write about themselves into the folder of the watch, for `explain-hang` to compare. Loads no torch.

`rank-00001.json`: a rank's own snapshot; `beats.json`: what one rank, rank 0 if it is there, has heard of all. Neither
values of variables nor the environment are in them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

from hfdist.atomic_write import write_atomically
from hfdist.watch.heartbeat import Heartbeat, PeerState, as_tuple

BEATS, REPORT = "beats.json", "report.txt"


class Frame(NamedTuple):
    """A call on the stack of the main thread."""

    file: str
    line: int
    function: str


class Collective(NamedTuple):
    """A collective that a rank has begun."""

    group: str
    """Name of its process group, equal on all ranks of the group."""
    number: int
    """Number of the collective within its group; the first is 1."""
    name: str
    """Backend and operation, as `gloo:all_reduce`."""
    sizes: list[list[int]]
    is_done: bool
    description: str = ""
    """Description of the group."""
    is_p2p: bool = False
    """Whether it is a message from one rank to another."""

    @property
    def place(self) -> str:
        """Number and group of the collective, in words."""
        return f"number {self.number} of {self.description or 'its group'}"

    @property
    def text(self) -> str:
        """The collective in words, with all that is known of it."""
        return f"{self.name} {self.sizes} ({self.place}, {'finished' if self.is_done else 'not finished'})"


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What a rank was doing."""

    rank: int
    beat: Heartbeat
    frames: list[Frame] = field(default_factory=list)
    """Stack of the main thread, the innermost call first, without calls in torch and in Python itself."""
    collectives: list[Collective] = field(default_factory=list)
    """The newest collectives of each group, the oldest first, as torch's flight recorder has them."""
    groups: dict[str, list[int]] = field(default_factory=dict)
    """Ranks of its process groups."""


def write_snapshot(folder: Path, snapshot: Snapshot) -> None:
    """Write a snapshot as `rank-00001.json`.

    Raises:
        OSError: it cannot be written.
    """
    _write(folder / f"rank-{snapshot.rank:05d}.json", asdict(snapshot))


def read_snapshots(folder: Path) -> dict[int, Snapshot]:
    """Read the snapshots of all ranks; a file that cannot be read is left out."""
    found = {}
    for path in sorted(folder.glob("rank-*.json")):
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            snapshot = _read_snapshot(path)
            found[snapshot.rank] = snapshot
    return found


def _read_snapshot(path: Path) -> Snapshot:
    """Read one; OSError, ValueError, TypeError, KeyError, AttributeError or RecursionError: it is damaged."""
    content = json.loads(path.read_text(encoding="utf-8"))
    collectives = [as_tuple(Collective, one) for one in content["collectives"]]
    sizes = [size for one in collectives for size in one.sizes]
    if not all(type(number) is int for numbers in (*sizes, *content["groups"].values()) for number in numbers):
        raise TypeError("a size or a rank is no number")
    return Snapshot(
        rank=int(content["rank"]),
        beat=as_tuple(Heartbeat, content["beat"]),
        frames=[as_tuple(Frame, one) for one in content["frames"]],
        collectives=collectives,
        groups=content["groups"],
    )


def write_beats(folder: Path, heard: Mapping[int, PeerState], own: Heartbeat, line: str | None) -> None:
    """Write what is known of all ranks, with the state of each process on this machine.

    Raises:
        OSError: it cannot be written.
    """
    ranks = {
        rank: {"beat": one.beat, "silent_seconds": one.silent_seconds, "process": _state_of(one, own)}
        for rank, one in heard.items()
    }
    _write(folder / BEATS, {"line": line, "ranks": ranks})


class HeardRank(NamedTuple):
    """What the other ranks knew of a rank."""

    beat: Heartbeat
    silent_seconds: float
    process: str | None
    """State of its process, as `psutil` calls it, or `ended`; None: not known."""


def read_beats(folder: Path) -> tuple[dict[int, HeardRank], str | None]:
    """Read what was known of all ranks, and the verdict of the watch; nothing where there is no such file."""
    try:
        content = json.loads((folder / BEATS).read_text(encoding="utf-8"))
        ranks = {
            int(rank): HeardRank(as_tuple(Heartbeat, one["beat"]), float(one["silent_seconds"]), one["process"])
            for rank, one in content["ranks"].items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}, None
    return ranks, content.get("line")


def _state_of(one: PeerState, own: Heartbeat) -> str | None:
    """Give the state of a rank's process by its pid; None: it is on another machine, or the state is not known."""
    if not one.beat.pid or one.beat.host != own.host:
        return None
    try:
        state = str(psutil.Process(one.beat.pid).status())
    except psutil.NoSuchProcess:
        return "ended"
    except psutil.Error:
        return None
    return "ended" if state in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else state


def _write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Another process may be reading.
    write_atomically(path, json.dumps(content).encode(), is_durable=False)
