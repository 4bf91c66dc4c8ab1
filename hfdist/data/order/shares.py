"""The lanes of one stream shared by several runs, some of which come and go.

    lanes              0  1  2  3  4  5
    all of 3 runs      0  1  2  0  1  2       a lane's home is run `lane mod count`
    run 1 is gone      0  0  2  0  2  2       its lanes are dealt to the others
    run 1 is back      0  1  2  0  1  2       a run that is there reads the lanes of its home

The sequences that a run has read of a lane count once all runs have agreed on them: `ends` says up to which one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hfdist.whole_numbers import whole_number


@dataclass(frozen=True, kw_only=True)
class Shares:
    """The run that reads each lane, and what counts of each lane. All runs have equal shares."""

    count: int
    """Number of runs, those that are gone included."""
    readers: Mapping[int, int]
    """The run that reads each lane, by lane."""
    ends: Mapping[int, Mapping[int, int]]
    """The number of the sequence in a lane at which the records of a run end to count, by lane and then by run."""

    @classmethod
    def at_home(cls, num_lanes: int, count: int) -> Shares:
        """Make the shares in which each run reads the lanes of its home, and nothing counts yet."""
        return cls(count=count, readers={lane: lane % count for lane in range(num_lanes)}, ends={})

    def lanes_of(self, run: int) -> list[int]:
        """Give the lanes that a run reads, in rising order."""
        return sorted(lane for lane, reader in self.readers.items() if reader == run)

    def end_of(self, lane: int, run: int) -> int:
        """Give the number of the sequence in a lane up to which the records of a run count; 0: none of them does."""
        return self.ends.get(lane, {}).get(run, 0)

    def counted(self, run: int, sequences: Mapping[int, int]) -> Shares:
        """Give shares in which the records of a run count up to `sequences[lane]` of each of its lanes."""
        ends = {lane: {**self.ends.get(lane, {}), run: end} for lane, end in sequences.items()}
        return replace(self, ends={**self.ends, **ends})

    def dealt(self, there: Collection[int], unit: int) -> Shares:
        """Give shares in which the runs that are there read all lanes; a run that comes back gets its home's lanes.

        Args:
            there: numbers of the runs that are there, at least one.
            unit: number of lanes that one run gets together, so that its data ranks have equally many; it divides the
                number of lanes of a home.
        """
        readers = dict(self.readers)
        for lane in readers:
            home = lane % self.count
            if home in there:
                readers[lane] = home
        orphans = [lane for lane, reader in readers.items() if reader not in there]
        # A unit has lanes of one home, so that a run that comes back takes whole units.
        orphans.sort(key=lambda lane: (lane % self.count, lane))
        num_lanes = {run: sum(reader == run for reader in readers.values()) for run in sorted(there)}
        for start in range(0, len(orphans), unit):
            run_with_fewest = min(num_lanes, key=lambda run: num_lanes[run])
            readers |= dict.fromkeys(orphans[start : start + unit], run_with_fewest)
            num_lanes[run_with_fewest] += unit
        return replace(self, readers=readers)

    def to_json(self) -> dict[str, object]:
        """Give the shares as a value for JSON: the number of runs, and `[lane, reader, [[run, end], ...]]` by lane."""
        lanes = [
            [lane, reader, sorted(self.ends.get(lane, {}).items())] for lane, reader in sorted(self.readers.items())
        ]
        return {"count": self.count, "lanes": lanes}

    @classmethod
    def from_json(cls, value: Any) -> Shares:
        """Read shares from a value of `to_json`. KeyError, TypeError, ValueError: the value is damaged."""
        lanes = [(whole_number(lane), whole_number(reader), ends) for lane, reader, ends in value["lanes"]]
        count = whole_number(value["count"])
        if any(reader >= count for _, reader, _ in lanes):
            raise ValueError(f"a lane is read by a run that is none of {count}")
        return cls(
            count=count,
            readers={lane: reader for lane, reader, _ in lanes},
            ends={lane: {whole_number(run): whole_number(end) for run, end in ends} for lane, _, ends in lanes if ends},
        )
