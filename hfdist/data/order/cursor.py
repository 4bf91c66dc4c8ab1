"""The position of a stream: a few integers a lane, with the same meaning for every number of processes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from hfdist.data.order.lane_state import Columns, LanesInColumns, LaneState, Place, Progress, check_columns, to_columns
from hfdist.data.order.shares import Shares
from hfdist.errors import CheckpointError, named_line
from hfdist.whole_numbers import whole_number

FORMAT = 3
"""Raise it when `to_json` changes, and `FORMAT_IN_COLUMNS` with it."""
FORMAT_IN_COLUMNS = 4
"""Version of the form in which the places of the lanes stand beside it, as columns."""


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """States of some lanes (one rank's) or of all (merged)."""

    identity: str
    """Digest of what the order depends on: corpus, tokenizer and settings."""
    contents: str
    """`Inventory.digest` of what the files held."""
    num_lanes: int
    samples: int
    """Sequences that the whole run has consumed."""
    lanes: Mapping[int, LaneState]
    next_lane: int
    """Lane that gives the next sequence."""
    shares: Shares | None = None
    """Which run reads which lanes, if several runs share them; else None."""

    def to_json(self) -> dict[str, object]:
        """Give a value for JSON."""
        places = [
            [lane, f"{state.digest:016x}", *([*pool.place, *pool[1:]] for pool in state.pools)]
            for lane, state in sorted(self.lanes.items())
        ]
        return {**self._head(), "format": FORMAT, "places": places}

    def to_columns(self) -> tuple[dict[str, object], dict[str, NDArray[Any]]]:
        """Give a short value for JSON, and columns for where each lane stands."""
        return self._head(), to_columns(self.lanes)

    def to_bytes(self) -> bytes:
        """Give both of `to_columns` as bytes for another rank, which builds the lanes that it asks for."""
        head, columns = self.to_columns()
        return b"%b\n%b" % (json.dumps(head).encode(), save(columns))

    @classmethod
    def from_bytes(cls, content: bytes) -> Cursor:
        """Read what `to_bytes` gave."""
        head, _, columns = content.partition(b"\n")
        return cls.from_json(json.loads(head), load(columns))

    def _head(self) -> dict[str, object]:
        """All but the places of the lanes."""
        even = {lane: _turns(self.samples, lane, self.num_lanes) for lane in self.lanes}
        counts = {lane: state.sequences for lane, state in self.lanes.items()}
        uneven = {"sequences": [counts[lane] for lane in sorted(counts)], "next": self.next_lane}
        return {
            "format": FORMAT_IN_COLUMNS,
            "identity": self.identity,
            "contents": self.contents,
            "lanes": self.num_lanes,
            "samples": self.samples,
            # Where lanes share the samples evenly, their counts follow from the samples.
            **({} if counts == even and self.shares is None else uneven),
            **({} if self.shares is None else {"shares": self.shares.to_json()}),
        }

    @classmethod
    def from_json(cls, value: Any, columns: Columns | None = None) -> Cursor:
        """Read what `to_json` or, with columns, `to_columns` gave.

        CheckpointError: it has another format or is damaged.
        """
        try:
            expected = FORMAT if columns is None else FORMAT_IN_COLUMNS
            if (found := value["format"]) != expected:
                is_without = columns is None and found == FORMAT_IN_COLUMNS
                what = "the file of the lanes is missing" if is_without else "the data cursor has another format"
                raise CheckpointError(what, where="cursor.format", found=found, allowed=str(expected))
            num_lanes, samples = whole_number(value["lanes"]), whole_number(value["samples"])
            shares = None if value.get("shares") is None else Shares.from_json(value["shares"])
            next_lane = whole_number(value.get("next", samples % num_lanes))
            # The number first: a foreign one may be too large for a list.
            has_all = shares is None or (
                len(shares.readers) == num_lanes and sorted(shares.readers) == [*range(num_lanes)]
            )
            if next_lane >= num_lanes or not has_all:
                raise ValueError("there are other lanes")
            counts = [whole_number(count) for count in value.get("sequences") or ()]
            lanes: Mapping[int, LaneState]
            if columns is None:
                numbers = [whole_number(lane) for lane, *_ in value["places"]]
                lanes = _lanes(value["places"], counts or [_turns(samples, lane, num_lanes) for lane in numbers])
            else:
                check_columns(columns)
                lanes = LanesInColumns(columns, counts or _turns(samples, columns["lane"].astype(np.int64), num_lanes))
            return cls(
                identity=str(value["identity"]),
                contents=str(value["contents"]),
                num_lanes=num_lanes,
                samples=samples,
                lanes=lanes,
                next_lane=next_lane,
                shares=shares,
            )
        except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
            found = named_line(error)
            raise CheckpointError("the data cursor is damaged", where="cursor", found=found) from error

    @staticmethod
    def merge(cursors: Sequence[Cursor], *, readers: int = 1) -> Cursor:
        """Join the cursors of all data ranks; ranks that share a data rank bring the same lanes.

        `readers` is how many runs read the lanes, if each knows its own only.

        CheckpointError: they are of different runs or places, or leave lanes out.
        """
        first = cursors[0]
        for cursor in cursors:
            place = cursor.identity, cursor.samples, cursor.next_lane, cursor.shares
            if place != (first.identity, first.samples, first.next_lane, first.shares):
                found = (
                    f"{first.samples} and {cursor.samples} sequences, "
                    f"next lane {first.next_lane} and {cursor.next_lane}"
                )
                raise CheckpointError("the data ranks stand at different places", where="cursor", found=found)
            if cursor.contents != first.contents:
                what = "the files that the data ranks read do not hold the same"
                raise CheckpointError(what, where="data.sources", hint="the same files on each machine")
        lanes = _Joined([cursor.lanes for cursor in cursors])
        if len(lanes) * readers != first.num_lanes or not all(0 <= lane < first.num_lanes for lane in lanes):
            found = f"{len(lanes)} of {first.num_lanes // readers} lanes"
            raise CheckpointError("lanes are missing", where="cursor", found=found)
        return replace(first, lanes=lanes)


class _Joined(Mapping[int, LaneState]):
    """Lanes of several cursors, each still built when it is asked for."""

    def __init__(self, parts: Sequence[Mapping[int, LaneState]]) -> None:
        self._owners = {lane: part for part in parts for lane in part}

    def __getitem__(self, lane: int) -> LaneState:
        return self._owners[lane][lane]

    def __iter__(self) -> Iterator[int]:
        return iter(self._owners)

    def __len__(self) -> int:
        return len(self._owners)


_Numbers = TypeVar("_Numbers", int, NDArray[np.int64])


def _turns(samples: int, lane: _Numbers, num_lanes: int) -> _Numbers:
    """How many of the first samples are of a lane, or of each of some, where all lanes take turns."""
    return (samples - lane + num_lanes - 1) // num_lanes


def _lanes(places: Sequence[Any], counts: Sequence[int]) -> dict[int, LaneState]:
    return {
        lane: _lane_state(digest, pools, count) for (lane, digest, *pools), count in zip(places, counts, strict=True)
    }


def _lane_state(digest: str, pools: Sequence[Sequence[int]], given: int) -> LaneState:
    progress = []
    for pool in pools:
        epoch, position, offset, sequences, tokens, documents = map(whole_number, pool)
        progress.append(Progress(Place(epoch, position, offset), sequences, tokens, documents))
    number = int(digest, 16)
    if not 0 <= number < 1 << 64:
        raise ValueError(f"a digest of {len(digest)} digits")
    return LaneState(digest=number, pools=tuple(progress), sequences=given)
