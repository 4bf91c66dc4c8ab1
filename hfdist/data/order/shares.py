"""Which of several runs reads which lanes of one stream, when some of them come and go.

A lane has a home: run `lane mod count`. Who is there reads the lanes of its home; the lanes of who is gone are dealt to
the others. What a lane has given counts once all runs have agreed on it: see `Shares.counted`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hfdist.whole_numbers import whole_number


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Who reads what. All runs have the same."""

    count: int
    """Number of runs."""
    readers: Mapping[int, int]
    """Run that reads each lane."""
    ends: Mapping[int, Mapping[int, int]]
    """End of what counts, in sequences, by lane and run: see `end_of`."""

    @classmethod
    def at_home(cls, num_lanes: int, count: int) -> Shares:
        """Each run reads the lanes of its home."""
        return cls(count=count, readers={lane: lane % count for lane in range(num_lanes)}, ends={})

    def lanes_of(self, run: int) -> list[int]:
        """Lanes that a run reads, rising."""
        return sorted(lane for lane, reader in self.readers.items() if reader == run)

    def end_of(self, lane: int, run: int) -> int:
        """Up to which sequence of a lane the records of a run count."""
        return self.ends.get(lane, {}).get(run, 0)

    def counted(self, run: int, sequences: Mapping[int, int]) -> Shares:
        """Count what a run has read: so many sequences from the begin of each of its lanes."""
        ends = {lane: {**self.ends.get(lane, {}), run: end} for lane, end in sequences.items()}
        return replace(self, ends={**self.ends, **ends})

    def dealt(self, there: Collection[int], unit: int) -> Shares:
        """Deal the lanes to the runs that are there; one that comes back gets those of its home.

        Args:
            there: runs, at least one.
            unit: lanes that one run gets together, so that its data ranks have equally many; divides those of a home.
        """
        readers = {
            lane: lane % self.count if lane % self.count in there else reader for lane, reader in self.readers.items()
        }
        orphans = [lane for lane, reader in sorted(readers.items()) if reader not in there]
        # A unit has lanes of one home, so that a run that comes back takes whole units.
        orphans.sort(key=lambda lane: (lane % self.count, lane))
        numbers = {run: sum(reader == run for reader in readers.values()) for run in sorted(there)}
        for start in range(0, len(orphans), unit):
            run = min(numbers, key=lambda one: numbers[one])
            readers |= dict.fromkeys(orphans[start : start + unit], run)
            numbers[run] += unit
        return replace(self, readers=readers)

    def to_json(self) -> dict[str, object]:
        """Give a value for JSON."""
        lanes = [
            [lane, reader, sorted(self.ends.get(lane, {}).items())] for lane, reader in sorted(self.readers.items())
        ]
        return {"count": self.count, "lanes": lanes}

    @classmethod
    def from_json(cls, value: Any) -> Shares:
        """Read what `to_json` gave. KeyError, TypeError, ValueError: it is damaged."""
        lanes = [(whole_number(lane), whole_number(reader), ends) for lane, reader, ends in value["lanes"]]
        count = whole_number(value["count"])
        if any(reader >= count for _, reader, _ in lanes):
            raise ValueError(f"a lane is read by a run that is none of {count}")
        return cls(
            count=count,
            readers={lane: reader for lane, reader, _ in lanes},
            ends={lane: {whole_number(run): whole_number(end) for run, end in ends} for lane, _, ends in lanes if ends},
        )
