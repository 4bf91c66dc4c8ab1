"""What ranks write about themselves into the folder of the watch, for `explain-hang` to compare. Loads no torch.

`rank-00001.json`: a rank's own; `beats.json`: what one rank, rank 0 if it is there, has heard of all. A request of
`explain-hang` is a file that rank 0 finds. Neither values of variables nor the environment are in any of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

from hfdist.atomic_write import write_atomically
from hfdist.errors import ConfigError
from hfdist.records import RunFolder
from hfdist.watch.diagnosis import Heartbeat, PeerState, as_tuple

BEATS, REPORT = "beats.json", "report.txt"

ASKED = re.compile(r"asked-\d{8}-\d{6}")
"""Names of the folders of requests."""

_REQUEST = "request"


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

    @property
    def place(self) -> str:
        """Number and group of the collective, in words."""
        return f"number {self.number} of {self.description or 'its group'}"

    @property
    def text(self) -> str:
        """All that is known."""
        return f"{self.name} {self.sizes} ({self.place}, {'finished' if self.is_done else 'not finished'})"


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What a rank was doing."""

    rank: int
    beat: Heartbeat
    frames: list[list[object]] = field(default_factory=list)
    """File, line and function of its main thread, the innermost first, without those of torch and of Python itself."""
    collectives: list[Collective] = field(default_factory=list)
    """The newest of each group, the oldest first, as torch's flight recorder has them."""
    groups: dict[str, list[int]] = field(default_factory=dict)
    """Ranks of its process groups."""


def write_snapshot(folder: Path, snapshot: Snapshot) -> None:
    """Write it as `rank-00001.json`.

    Raises:
        OSError: it cannot be written.
    """
    _write(folder / f"rank-{snapshot.rank:05d}.json", asdict(snapshot))


def read_snapshots(folder: Path) -> dict[int, Snapshot]:
    """Read those of all ranks; a file that cannot be read is left out."""
    found = {}
    for path in sorted(folder.glob("rank-*.json")):
        with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            content = json.loads(path.read_text(encoding="utf-8"))
            beat, collectives = (
                as_tuple(Heartbeat, content["beat"]),
                [Collective(*one) for one in content["collectives"]],
            )
            found[int(content["rank"])] = Snapshot(**content | {"beat": beat, "collectives": collectives})
    return found


def write_beats(folder: Path, heard: Mapping[int, PeerState], own: Heartbeat, line: str | None) -> None:
    """Write what is known of all ranks, with what the processes of silent ones on this machine are doing.

    Raises:
        OSError: it cannot be written.
    """
    ranks = {
        rank: {"beat": one.beat, "silent_seconds": one.silent_seconds, "process": _state_of(one, own)}
        for rank, one in heard.items()
    }
    _write(folder / BEATS, {"line": line, "ranks": ranks})


class HeardRank(NamedTuple):
    """What others knew of a rank."""

    beat: Heartbeat
    silent_seconds: float
    process: str | None
    """What its process was doing, as `psutil` calls it; `ended`; None: not known."""


def read_beats(folder: Path) -> tuple[dict[int, HeardRank], str | None]:
    """Read what was known of all ranks, and the verdict of the watch. Nothing where there is none."""
    try:
        content = json.loads((folder / BEATS).read_text(encoding="utf-8"))
        ranks = {
            int(rank): HeardRank(as_tuple(Heartbeat, one["beat"]), float(one["silent_seconds"]), one["process"])
            for rank, one in content["ranks"].items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}, None
    return ranks, content.get("line")


def request(run_dir: Path, name: str) -> Path:
    """Ask the ranks of a run to write what they are doing, and give the folder into which they will.

    Args:
        run_dir: the run's folder.
        name: `asked-20260102-030405`.

    Raises:
        ConfigError: the folder cannot be written.
    """
    folder = RunFolder(run_dir).watch
    try:
        folder.mkdir(exist_ok=True)
        _write(folder / _REQUEST, name)
    except OSError as error:
        what, found = "the ranks cannot be asked", error.strerror
        raise ConfigError(what, where=str(folder), found=found, hint="the user of the run may write there") from error
    return folder / name


def take_request(run_dir: Path) -> str | None:
    """Find a request, and take it away; None: there is none."""
    path = RunFolder(run_dir).watch / _REQUEST
    with suppress(OSError, ValueError, RecursionError):
        name = json.loads(path.read_text(encoding="utf-8"))
        path.unlink()
        if isinstance(name, str) and ASKED.fullmatch(name):
            return name
    return None


def withdraw(run_dir: Path) -> None:
    """Take a request back that nobody has taken."""
    (RunFolder(run_dir).watch / _REQUEST).unlink(missing_ok=True)


def _state_of(one: PeerState, own: Heartbeat) -> str | None:
    """Give the state of a process on this machine, by its number."""
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
