"""The cursor of a stream: how far each lane has come, in integers that mean the same for every number of processes."""

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
"""Version of the JSON of a cursor with the places of its lanes. Raise both versions when `Cursor.to_json` changes."""
FORMAT_IN_COLUMNS = 4
"""Version of the JSON of a cursor whose lanes' places stand beside it, as columns."""


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """The states of the lanes of one rank or, merged, of all lanes."""

    identity: str
    """Digest of all that the order depends on: corpus, tokenizer and settings."""
    contents: str
    """Digest of the contents of the corpus's files."""
    num_lanes: int
    """Number of lanes of the stream, and not only of those in `lanes`."""
    samples: int
    """Sequences that the whole run has consumed."""
    lanes: Mapping[int, LaneState]
    """The state of each lane, by its number."""
    next_lane: int
    """Number of the lane that gives the next sequence."""
    shares: Shares | None = None
    """Which run reads which lanes; None: one run reads all."""

    def to_json(self) -> dict[str, object]:
        """Give the cursor as one value for JSON."""
        places = [
            [lane, f"{state.digest:016x}", *([*pool.place, *pool[1:]] for pool in state.pools)]
            for lane, state in sorted(self.lanes.items())
        ]
        return {**self._head(), "format": FORMAT, "places": places}

    def to_columns(self) -> tuple[dict[str, object], dict[str, NDArray[Any]]]:
        """Give the cursor as a short value for JSON, and the places of its lanes as columns."""
        return self._head(), to_columns(self.lanes)

    def to_bytes(self) -> bytes:
        """Give the cursor as bytes for another rank: a line of JSON, then the columns in the format of safetensors."""
        head, columns = self.to_columns()
        return b"%b\n%b" % (json.dumps(head).encode(), save(columns))

    @classmethod
    def from_bytes(cls, content: bytes) -> Cursor:
        """Read a cursor from the bytes of `to_bytes`; its lanes are built when they are asked for."""
        head, _, columns = content.partition(b"\n")
        return cls.from_json(json.loads(head), load(columns))

    def _head(self) -> dict[str, object]:
        """Give all of the cursor but the places of its lanes, as a value for JSON."""
        head: dict[str, object] = {
            "format": FORMAT_IN_COLUMNS,
            "identity": self.identity,
            "contents": self.contents,
            "lanes": self.num_lanes,
            "samples": self.samples,
        }
        # Where lanes share the samples evenly, their numbers of sequences and the next lane follow from the samples.
        counts = {lane: state.sequences for lane, state in sorted(self.lanes.items())}
        is_even = all(count == _turns(self.samples, lane, self.num_lanes) for lane, count in counts.items())
        if not is_even or self.shares is not None:
            head |= {"sequences": list(counts.values()), "next": self.next_lane}
        if self.shares is not None:
            head["shares"] = self.shares.to_json()
        return head

    @classmethod
    def from_json(cls, value: Any, columns: Columns | None = None) -> Cursor:
        """Read a cursor from a value of `to_json` or, with columns, from both values of `to_columns`.

        CheckpointError: the value has another format, or is damaged.
        """
        try:
            _check_format(value["format"], has_columns=columns is not None)
            num_lanes, samples = whole_number(value["lanes"]), whole_number(value["samples"])
            shares = None if value.get("shares") is None else Shares.from_json(value["shares"])
            next_lane = whole_number(value.get("next", samples % num_lanes))
            if next_lane >= num_lanes or (shares is not None and not _shares_all(shares, num_lanes)):
                raise ValueError("there are other lanes")
            return cls(
                identity=str(value["identity"]),
                contents=str(value["contents"]),
                num_lanes=num_lanes,
                samples=samples,
                lanes=_read_lanes(value, columns, samples, num_lanes),
                next_lane=next_lane,
                shares=shares,
            )
        except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
            found = named_line(error)
            raise CheckpointError("the data cursor is damaged", where="cursor", found=found) from error

    @staticmethod
    def merge(cursors: Sequence[Cursor], *, readers: int = 1) -> Cursor:
        """Join the cursors of all data ranks to one; ranks that share a data rank bring the same lanes.

        Args:
            cursors: one cursor of each rank, at least one.
            readers: the number of runs that read the lanes, if each brings only its own lanes; else 1.

        Raises:
            CheckpointError: the cursors are of different runs or places, or leave lanes out.
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
    """The states of the lanes of several cursors by number, each still built when it is asked for."""

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
    """Count how many of the first samples are of a lane, or of each lane of an array, if all lanes take turns."""
    return (samples - lane + num_lanes - 1) // num_lanes


def _check_format(found: object, *, has_columns: bool) -> None:
    """Raise a CheckpointError if a cursor with or without columns has another format."""
    expected = FORMAT_IN_COLUMNS if has_columns else FORMAT
    if found == expected:
        return
    what = "the data cursor has another format"
    if found == FORMAT_IN_COLUMNS:
        what = "the file of the lanes is missing"
    raise CheckpointError(what, where="cursor.format", found=found, allowed=str(expected))


def _shares_all(shares: Shares, num_lanes: int) -> bool:
    """Whether the shares name each lane."""
    # Their number first: a damaged `num_lanes` may be too large for a list.
    return len(shares.readers) == num_lanes and sorted(shares.readers) == [*range(num_lanes)]


def _read_lanes(value: Any, columns: Columns | None, samples: int, num_lanes: int) -> Mapping[int, LaneState]:
    """Read the states of lanes from a cursor's JSON, or from its columns; see `Cursor.from_json`."""
    counts = [whole_number(count) for count in value.get("sequences") or ()]
    if columns is not None:
        check_columns(columns)
        return LanesInColumns(columns, counts or _turns(samples, columns["lane"].astype(np.int64), num_lanes))
    places = value["places"]
    if not counts:
        counts = [_turns(samples, whole_number(lane), num_lanes) for lane, *_ in places]
    return {
        whole_number(lane): _lane_state(digest, pools, count)
        for (lane, digest, *pools), count in zip(places, counts, strict=True)
    }


def _lane_state(digest: str, pools: Sequence[Sequence[int]], given: int) -> LaneState:
    """Read the state of a lane, which has given so many sequences, from its values in a cursor's JSON."""
    progress = []
    for pool in pools:
        epoch, position, offset, sequences, tokens, documents = map(whole_number, pool)
        progress.append(Progress(Place(epoch, position, offset), sequences, tokens, documents))
    number = int(digest, 16)
    if not 0 <= number < 1 << 64:
        raise ValueError(f"a digest of {len(digest)} digits")
    return LaneState(digest=number, pools=tuple(progress), sequences=given)
