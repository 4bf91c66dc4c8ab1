"""Which rank a hang is due to: it left a collective out, called another one, or is silent; and who waits for it."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from hfdist.watch.diagnosis import name_ranks
from hfdist.watch.snapshot import Collective, HeardRank, Snapshot

_SLOW_SECONDS = 5.0
"""A rank that has made progress since does not hang."""
_SHOWN_FRAMES = 3
_SAME_SIZES = ("all_reduce", "allreduce", "broadcast")
"""Collectives to which all ranks of a group bring a tensor of the same size."""


class Row(NamedTuple):
    """A rank in the table of an explanation."""

    rank: int
    host: str
    step: int
    idle_seconds: float
    """Seconds since the rank's last mark of progress."""
    does: str
    """What it does, in words."""
    where: str
    """File, line and function."""


class WaitingRanks(NamedTuple):
    """Ranks that wait for others in a collective."""

    waiting: list[int]
    awaited: list[int]
    collective: str


class Verdict(NamedTuple):
    """What is wrong, what to do, and who waits for whom."""

    verdict: str
    hint: str
    waits: list[WaitingRanks]


_FROM_CHECKPOINT = "the same command goes on from the last checkpoint"


class HangCase:
    """What all ranks were doing at one moment.

    Args:
        heard: what rank 0 knew of each rank.
        snapshots: what ranks have written themselves.
        silent_seconds: a rank without a snapshot that was silent for longer counts as silent.
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
        self._members: dict[str, list[int]] = {}
        """Ranks of each group, under its name and its ranks: groups of other ranks may have the same name."""
        self._pending: dict[int, list[Collective]] = {rank: [] for rank in snapshots}
        self._begun: dict[tuple[str, int], dict[int, Collective]] = {}
        self._newest: dict[tuple[str, int], int] = {}
        """Number of the newest collective, by group and rank."""
        for rank, snapshot in snapshots.items():
            for collective in snapshot.collectives:
                ranks = snapshot.groups.get(collective.group, [])
                call = collective._replace(group=f"{collective.group} {ranks}")
                self._members[call.group] = ranks
                if not call.is_done:
                    self._pending[rank].append(call)
                if not call.is_p2p:
                    self._begun.setdefault((call.group, call.number), {})[rank] = call
                    self._newest[call.group, rank] = max(call.number, self._newest.get((call.group, rank), 0))

    def rows(self) -> list[Row]:
        """Give a row for each rank, by its number."""
        return [
            Row(rank, beat.host or "?", beat.step, round(beat.idle_seconds, 1), self._does(rank), self._where(rank))
            for rank, beat in sorted(self._beats.items())
        ]

    def judge(self, line: str | None) -> Verdict:
        """Judge the ranks; `line`: the verdict of the watch, None: it has given none."""
        waits = self._waits()
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
        """Find the first number of a group under which ranks have begun different collectives."""
        for _, begun in sorted(self._begun.items()):
            knows_sizes = not any(call.is_done for call in begun.values())
            kinds = {rank: _kind(call, knows_sizes) for rank, call in begun.items()}
            (common, count), *others = Counter(kinds.values()).most_common()
            if not others:
                continue
            usual = [rank for rank in begun if kinds[rank] == common]
            odd = [rank for rank in begun if kinds[rank] != common]
            call = begun[usual[0]]
            called = f"{_short(begun[odd[0]])}{self._at(odd[0])} where {name_ranks(usual)} called {_short(call)}"
            guilty = f"{name_ranks(odd)} left" if count > len(odd) else "one side has left"
            verdict = (
                f"{name_ranks(odd)} called {called}{self._at(usual[0])}: both are {call.place}; {guilty} a collective "
                "out, or called one too many"
            )
            hint = "look for a condition in these lines, or above them, that is not the same on all ranks"
            return Verdict(verdict, hint, waits or [WaitingRanks(usual, odd, f"{_short(call)}, {call.place}")])
        return None

    def _judge_missing(self, waits: list[WaitingRanks]) -> Verdict | None:
        """Find ranks that others wait for, and that wait for nobody."""
        waiting = {rank for wait in waits for rank in wait.waiting}
        for wait in waits:
            behind = [rank for rank in wait.awaited if rank not in waiting and rank in self._snapshots]
            if not behind:
                continue
            doing = self._snapshots[behind[0]]
            verdict = (
                f"{name_ranks(wait.waiting)} {'wait' if len(wait.waiting) > 1 else 'waits'} in {wait.collective}"
                f"{self._at(wait.waiting[0])} for {name_ranks(behind)}, which never came to it: "
                f"{self._does(behind[0])}{self._at(behind[0])}"
            )
            if doing.beat.exempt is not None:
                return Verdict(verdict, "wait: this may take minutes, and is not counted as hanging", waits)
            hint = f"the line above: it does not end, or leaves the collective out; all of {self._file(behind[0])}"
            return Verdict(verdict, hint, waits)
        if waits and all(set(wait.awaited) & waiting for wait in waits):
            verdict = "the ranks wait for each other, each in a collective of another group: see above"
            return Verdict(verdict, "all ranks must call the collectives of all groups in the same order", waits)
        return None

    def _judge_all_inside(self, waits: list[WaitingRanks]) -> Verdict | None:
        """Find a collective in which all ranks of its group are, and which does not end."""
        for group in self._members:
            pending = {
                rank: [call for call in self._pending[rank] if call.group == group] for rank in self._members[group]
                if rank in self._snapshots
            }  # fmt: skip
            if len(pending) > 1 and len(pending) == len(self._members[group]) and all(pending.values()):
                call = pending[min(pending)][0]
                verdict = f"{name_ranks(pending)} are all in {_short(call)}, {call.place}, and it does not end"
                return Verdict(verdict, "the links between them: `hfdist doctor` tests each pair of ranks", waits)
        return None

    def _judge_by_progress(self, waits: list[WaitingRanks]) -> Verdict:
        if not self._beats:
            return Verdict("no rank has left anything here", "py-spy dump --pid PID, on each rank's machine", waits)
        exempt = {beat.exempt for beat in self._beats.values()} - {None}
        if exempt:
            words = f"no rank makes progress, while one is {', '.join(map(str, exempt))}, which may take minutes"
            return Verdict(words, "wait, or look where it is, above", waits)
        fewest = min(beat.marks for beat in self._beats.values())
        behind = [rank for rank, beat in self._beats.items() if beat.marks == fewest]
        waiting = [rank for rank in self._beats if rank not in behind]
        found = f"{name_ranks(behind)} made no progress{self._at(behind[0])}"
        waits = [*waits, WaitingRanks(waiting, behind, "what comes next")] if waiting else waits
        return Verdict(found, f"the line above; all of {self._file(behind[0])}", waits)

    # ---- who waits for whom ----

    def _waits(self) -> list[WaitingRanks]:
        """Say of each collective that has not ended who is in it, and who has not come to it."""
        found: dict[tuple[str, int, str], WaitingRanks] = {}
        for rank, pending in sorted(self._pending.items()):
            for call in pending[:1]:
                missing = [other for other in self._partners(rank, call) if not self._has_begun(other, call)]
                key = call.group, call.number, call.name if call.is_p2p else ""
                if missing:
                    waiting = [*(found[key].waiting if key in found else []), rank]
                    found[key] = WaitingRanks(waiting, missing, f"{_short(call)}, {call.place}")
        return list(found.values())

    def _partners(self, rank: int, call: Collective) -> list[int]:
        """Give the other ranks of the group, or the one at the other end, as of `nccl:recv 0<-1`."""
        members = self._members[call.group]
        end = re.search(r"(?:->|<-)(\d+)$", call.name) if call.is_p2p else None
        if call.is_p2p:
            members = [members[int(end[1])]] if end is not None and int(end[1]) < len(members) else []
        return [other for other in members if other != rank and other in self._beats]

    def _has_begun(self, rank: int, call: Collective) -> bool:
        if rank not in self._snapshots:
            # A silent rank has none; of a rank whose machine has a disk of its own nothing is known.
            return rank not in self._silent
        # Of the two ends of a message, both have numbers of their own.
        return not call.is_p2p and self._newest.get((call.group, rank), 0) >= call.number

    # ---- words ----

    def _does(self, rank: int) -> str:
        beat = self._beats[rank]
        if beat.left is not None:
            return f"has ended with exit code {beat.left}"
        if rank in self._silent:
            one = self._silent[rank]
            state = {None: "", "ended": ": its process has ended", "stopped": ": its process is stopped"}
            return f"silent for {one.silent_seconds:.1f} s{state.get(one.process, ': its process runs')}"
        pending = self._pending.get(rank)
        if pending:
            return f"is in {_short(pending[0])}, {pending[0].place}"
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


def _kind(call: Collective, knows_sizes: bool) -> str:
    """Give the part of a collective that must be equal on all ranks of a group."""
    return f"{call.name} {call.sizes}" if knows_sizes and any(name in call.name for name in _SAME_SIZES) else call.name


def _short(call: Collective) -> str:
    """Give the name of a collective without the backend's, and the sizes of its tensors."""
    name = call.name.partition(":")[2] or call.name
    sizes = ", ".join("x".join(map(str, size)) or "1" for size in call.sizes[:2])
    return f"{name} of {sizes}" if sizes else name
