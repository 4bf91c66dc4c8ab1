"""Who keeps a run from going on, by the heartbeats of all ranks: lost, stalled or ended by an error. Loads no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from hfdist.errors import PeerError
from hfdist.watch.heartbeat import Heartbeat, PeerState, beat_seconds

IDLE_TIMES = 5
"""A pause between two marks may be this many times the longest so far: a busy machine, a slow shard, long sequences."""

_BEATS_AFTER_A_BREAK = 2.5
"""Beats for which a rank may be silent once a connection between two ranks has broken."""
_LEAST_SILENT_SECONDS = 1.0
"""Least seconds for which a rank may be silent then, however short the beats are."""
_MOST_WAITS = 2
"""Most collectives that a verdict names."""


class Diagnosis(NamedTuple):
    """Why the run ends."""

    line: str
    """The verdict, for people."""
    exit_code: int = PeerError.exit_code
    """Exit code with which the processes are ended."""

    @property
    def is_alarm(self) -> bool:
        """Whether something is wrong that no rank has reported yet."""
        return self.exit_code == PeerError.exit_code


def find_left(heard: Mapping[int, PeerState], heartbeat_seconds: float) -> Diagnosis | None:
    """Find a rank that has ended with an error of its own, and without which others cannot go on.

    If all ranks meet the same error, each leaves by itself. So the others get the time of a heartbeat.
    """
    is_broken = any(other.beat.broken_seconds is not None for other in heard.values())
    for rank, one in sorted(heard.items()):
        if one.beat.left and (is_broken or one.silent_seconds > heartbeat_seconds):
            return Diagnosis(f"rank {rank} has ended with exit code {one.beat.left}, and has said why", one.beat.left)
    return None


def find_lost(heard: Mapping[int, PeerState], heartbeat_seconds: float) -> Diagnosis | None:
    """Find ranks that are silent: dead, stopped, cut off, or in code that never lets other threads run.

    Once a connection broke somewhere, a few missing beats are enough.
    """
    here = {rank: one for rank, one in heard.items() if one.beat.left is None}
    broken = {rank: one.beat.broken_seconds for rank, one in here.items() if one.beat.broken_seconds is not None}
    limit = heartbeat_seconds
    if broken:
        limit = min(limit, max(_LEAST_SILENT_SECONDS, _BEATS_AFTER_A_BREAK * beat_seconds(heartbeat_seconds)))
    lost = {rank: one for rank, one in here.items() if one.silent_seconds > limit}
    if lost:
        seconds = max(one.silent_seconds for one in lost.values())
        verb = "is" if len(lost) == 1 else "are"
        return Diagnosis(
            f"{_waiting(here, lost)} {_places(lost)}, which {verb} dead, stopped or cut off: silent for {seconds:.1f} s"
        )
    if broken and max(broken.values()) > heartbeat_seconds:
        return Diagnosis(f"{name_ranks(broken)} lost the connection to another rank, though no rank is silent")
    return None


def is_too_long(idle_seconds: float, longest_idle_seconds: float, heartbeat_seconds: float) -> bool:
    """Whether all ranks are without progress for longer than a heartbeat, and than their own pauses allow."""
    return idle_seconds > max(heartbeat_seconds, IDLE_TIMES * longest_idle_seconds)


def find_stalled(heard: Mapping[int, PeerState], heartbeat_seconds: float) -> Diagnosis | None:
    """Find who keeps all others waiting: no rank has made progress, and none is in a state that may take long.

    The limit grows with the run's own times between marks, so that neither a slow rank nor a micro batch that takes
    longer than the heartbeat counts as hung.
    """
    if any(one.beat.left for one in heard.values()):
        # The others wait for a rank that has ended with an error: `find_left` gives them time for that.
        return None
    here = {rank: one for rank, one in heard.items() if one.beat.left is None}
    beats = {rank: one.beat for rank, one in here.items()}
    if not beats or any(beat.exempt is not None for beat in beats.values()):
        return None
    idle_seconds = min(beat.idle_seconds for beat in beats.values())
    if not is_too_long(idle_seconds, max(beat.longest_idle_seconds for beat in beats.values()), heartbeat_seconds):
        return None
    # A rank that skipped a collective has more marks than those that wait in it: so ranks that are in none come first.
    busy = {rank: beat for rank, beat in beats.items() if beat.waits_in is None} or beats
    fewest = min(beat.marks for beat in busy.values())
    last = {rank: one for rank, one in here.items() if rank in busy and one.beat.marks == fewest}
    waiting = [rank for rank in beats if rank not in last]
    verb = "has" if len(last) == 1 else "have"
    since = f"which {verb} made no progress for {idle_seconds:.1f} s"
    if not waiting:
        return Diagnosis(f"{_places(last)} wait for each other: no progress for {idle_seconds:.1f} s{_waits(beats)}")
    return Diagnosis(f"{_waiting(here, last)} {_places(last)}, {since}{_waits(beats)}")


def name_ranks(ranks: Collection[int]) -> str:
    """Name ranks in short, as in `ranks 0, 4-7`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {words}"


def _waiting(here: Collection[int], awaited: Collection[int]) -> str:
    """Say which of the ranks `here` wait for others; the name of those others follows."""
    waiting = [rank for rank in here if rank not in awaited]
    if not waiting:
        return "nobody is left to wait for"
    return f"{name_ranks(waiting)} {'wait' if len(waiting) > 1 else 'waits'} for"


def _places(ranks: Mapping[int, PeerState]) -> str:
    """Name ranks with the place of the first: more would not fit a line, and the files have them all."""
    beat = ranks[min(ranks)].beat
    return f"{name_ranks(ranks)} (on {beat.host or '?'}, after {beat.mark}, {beat.step} steps done)"


def _waits(beats: Mapping[int, Heartbeat]) -> str:
    """Name the collectives in which ranks wait, each with its lowest rank; empty where none is known."""
    lowest_ranks: dict[str, int] = {}
    for rank, beat in sorted(beats.items()):
        if beat.waits_in is not None and beat.waits_in not in lowest_ranks:
            lowest_ranks[beat.waits_in] = rank
    named = list(lowest_ranks.items())[:_MOST_WAITS]
    return "".join(f"; rank {rank} is in {name}" for name, rank in named)
