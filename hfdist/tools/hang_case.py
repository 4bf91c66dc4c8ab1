"""The case of a hang: from what all ranks were doing, the rank is found that left a collective out, or is silent."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from hfdist.tools.begun_collectives import BegunCollectives, WaitingRanks, kinds_of, short_name
from hfdist.watch.diagnosis import name_ranks
from hfdist.watch.snapshot import HeardRank, Snapshot

_SLOW_SECONDS = 5.0
"""A rank that has made progress within so many seconds does not hang."""
_SHOWN_FRAMES = 3
"""Number of lines of a stack in a verdict."""
_FROM_CHECKPOINT = "the same command goes on from the last checkpoint"


class Row(NamedTuple):
    """A rank in the table of an explanation."""

    rank: int
    host: str
    step: int
    idle_seconds: float
    """Seconds since the rank's last mark of progress."""
    does: str
    """What the rank does, in words."""
    where: str
    """File, line and function at which the rank is; `-`: not known."""


class Verdict(NamedTuple):
    """The answer to why ranks hang."""

    verdict: str
    """What is wrong."""
    hint: str
    """What to do."""
    waits: list[WaitingRanks]
    """Ranks that wait for other ranks."""


class HangCase:
    """What all ranks were doing at one moment.

    Args:
        heard: what rank 0 has heard of each rank, by rank.
        snapshots: snapshots that ranks have written themselves, by rank.
        silent_seconds: seconds after which a rank without a snapshot, of which nothing is heard, counts as silent.
    """

    def __init__(
        self, heard: Mapping[int, HeardRank], snapshots: Mapping[int, Snapshot], silent_seconds: float
    ) -> None:
        self._snapshots = snapshots
        self._beats = {rank: one.beat for rank, one in heard.items()} | {r: s.beat for r, s in snapshots.items()}
        self._silent = {
            rank: one
            for rank, one in heard.items()
            if rank not in snapshots and one.beat.left is None and one.silent_seconds > silent_seconds
        }
        self._collectives = BegunCollectives(snapshots, self._beats, self._silent)

    def rows(self) -> list[Row]:
        """Give a row for each rank, by its number."""
        return [
            Row(rank, beat.host or "?", beat.step, round(beat.idle_seconds, 1), self._does(rank), self._where(rank))
            for rank, beat in sorted(self._beats.items())
        ]

    def judge(self, line: str | None) -> Verdict:
        """Judge the ranks, the surest reason first; `line` is the verdict of the watch, None: it has given none."""
        waits = self._collectives.waits()
        left = {rank: beat.left for rank, beat in self._beats.items() if beat.left}
        if self._silent:
            return self._judge_silent(waits)
        if left:
            codes = ", ".join(f"rank {rank} with exit code {code}" for rank, code in sorted(left.items()))
            return Verdict(f"{codes} ended by an error of its own", "its log says what was wrong", waits)
        last = min((beat.idle_seconds for beat in self._beats.values()), default=0.0)
        if line is None and self._beats and last < _SLOW_SECONDS:
            return Verdict(f"nothing hangs: the last progress was {last:.1f} s ago", "ask again later", [])
        found = self._judge_differing(waits) or self._judge_missing(waits) or self._judge_all_inside(waits)
        if found is not None:
            return found
        if line is not None:
            return Verdict(line, f"the stacks of the rank that is waited for; {_FROM_CHECKPOINT}", waits)
        return self._judge_by_progress(waits)

    # ---- what may be wrong, the surest first ----

    def _judge_silent(self, waits: list[WaitingRanks]) -> Verdict:
        silent = sorted(self._silent)
        waiting = [rank for rank in self._beats if rank not in self._silent]
        if not any(set(wait.awaited) & set(silent) for wait in waits) and waiting:
            waits = [*waits, WaitingRanks(waiting, silent, "whatever comes next")]
        first = self._silent[silent[0]]
        place = f"{name_ranks(silent)} (on {first.beat.host or '?'}, process {first.beat.pid or 'unknown'})"
        after = f"after {first.beat.mark}, {first.beat.step} steps done"
        if first.process == "ended":
            verdict = f"{place} died without a word, {after}"
            hint = f"`dmesg` tells whether memory ran out; {_FROM_CHECKPOINT}"
        elif first.process == "stopped":
            verdict = f"{place} is stopped by a signal or a debugger, {after}"
            hint = f"kill -CONT {first.beat.pid}, or kill -KILL {first.beat.pid} and start again"
        elif first.process is not None:
            verdict = f"{place} is alive, but runs code that never lets another thread run, {after}"
            hint = f"py-spy dump --native --pid {first.beat.pid} shows where, while it lives"
        else:
            verdict = f"{place} is dead, stopped or cut off, {after}"
            hint = f"ssh {first.beat.host} ps {first.beat.pid}; if it is there, `hfdist doctor` tests the links"
        return Verdict(verdict, hint, waits)

    def _judge_differing(self, waits: list[WaitingRanks]) -> Verdict | None:
        """Find ranks that have called another collective than most, under the same number of the same group."""
        calls = self._collectives.first_differing()
        if not calls:
            return None
        kinds = kinds_of(calls)
        common = Counter(kinds.values()).most_common(1)[0][0]
        usual = [rank for rank in calls if kinds[rank] == common]
        odd = [rank for rank in calls if kinds[rank] != common]
        call = calls[usual[0]]
        called = f"{short_name(calls[odd[0]])}{self._at(odd[0])} where {name_ranks(usual)} called {short_name(call)}"
        guilty = f"{name_ranks(odd)} left" if len(usual) > len(odd) else "one side has left"
        verdict = (
            f"{name_ranks(odd)} called {called}{self._at(usual[0])}: both are {call.place}; {guilty} a collective "
            "out, or called one too many"
        )
        hint = "look for a condition in these lines, or above them, that is not the same on all ranks"
        return Verdict(verdict, hint, waits or [WaitingRanks(usual, odd, f"{short_name(call)}, {call.place}")])

    def _judge_missing(self, waits: list[WaitingRanks]) -> Verdict | None:
        """Find ranks that other ranks wait for, and that wait for nobody themselves."""
        waiting = {rank for wait in waits for rank in wait.waiting}
        for wait in waits:
            missing = [rank for rank in wait.awaited if rank not in waiting and rank in self._snapshots]
            if not missing:
                continue
            verdict = (
                f"{name_ranks(wait.waiting)} {'wait' if len(wait.waiting) > 1 else 'waits'} in {wait.collective}"
                f"{self._at(wait.waiting[0])} for {name_ranks(missing)}, which never came to it: "
                f"{self._does(missing[0])}{self._at(missing[0])}"
            )
            if self._snapshots[missing[0]].beat.exempt is not None:
                return Verdict(verdict, "wait: this may take minutes, and is not counted as hanging", waits)
            hint = f"the line above: it does not end, or leaves the collective out; all of {self._file(missing[0])}"
            return Verdict(verdict, hint, waits)
        if waits and all(set(wait.awaited) & waiting for wait in waits):
            verdict = "the ranks wait for each other, each in a collective of another group: see above"
            return Verdict(verdict, "all ranks must call the collectives of all groups in the same order", waits)
        return None

    def _judge_all_inside(self, waits: list[WaitingRanks]) -> Verdict | None:
        """Find a collective in which all ranks of its group are, and which does not end."""
        calls = self._collectives.without_end()
        if not calls:
            return None
        call = calls[min(calls)]
        verdict = f"{name_ranks(calls)} are all in {short_name(call)}, {call.place}, and it does not end"
        return Verdict(verdict, "the links between them: `hfdist doctor` tests each pair of ranks", waits)

    def _judge_by_progress(self, waits: list[WaitingRanks]) -> Verdict:
        if not self._beats:
            return Verdict("no rank has left anything here", "py-spy dump --pid PID, on each rank's machine", waits)
        exempt = {beat.exempt for beat in self._beats.values()} - {None}
        if exempt:
            words = f"no rank makes progress, while one is {', '.join(map(str, exempt))}, which may take minutes"
            return Verdict(words, "wait, or look where it is, above", waits)
        fewest = min(beat.marks for beat in self._beats.values())
        last = [rank for rank, beat in self._beats.items() if beat.marks == fewest]
        waiting = [rank for rank in self._beats if rank not in last]
        found = f"{name_ranks(last)} made no progress{self._at(last[0])}"
        waits = [*waits, WaitingRanks(waiting, last, "what comes next")] if waiting else waits
        return Verdict(found, f"the line above; all of {self._file(last[0])}", waits)

    # ---- words ----

    def _does(self, rank: int) -> str:
        beat = self._beats[rank]
        if beat.left is not None:
            return f"has ended with exit code {beat.left}"
        if rank in self._silent:
            one = self._silent[rank]
            state = {None: "", "ended": ": its process has ended", "stopped": ": its process is stopped"}
            return f"silent for {one.silent_seconds:.1f} s{state.get(one.process, ': its process runs')}"
        pending = self._collectives.pending(rank)
        if pending is not None:
            return f"is in {short_name(pending)}, {pending.place}"
        if beat.waits_in is not None:
            return f"is in {beat.waits_in}"
        if rank not in self._snapshots:
            return "beats; its stack is not here"
        if beat.broken_seconds is not None:
            return "has lost the connection to another rank"
        doing = beat.exempt or "runs its own code"
        return f"{doing}, after {beat.mark}"

    def _where(self, rank: int) -> str:
        return next(self._places(rank), "-")

    def _at(self, rank: int) -> str:
        """Name the line at which a rank is, and the lines that called it."""
        places = list(itertools.islice(self._places(rank), _SHOWN_FRAMES))
        return f" at {', from '.join(places)}" if places else ""

    def _places(self, rank: int) -> Iterator[str]:
        frames = self._snapshots[rank].frames if rank in self._snapshots else []
        for file, line, function in frames:
            yield f"{'/'.join(Path(file).parts[-2:])}:{line} {function}"

    @staticmethod
    def _file(rank: int) -> str:
        return f"rank-{rank:05d}.txt"
