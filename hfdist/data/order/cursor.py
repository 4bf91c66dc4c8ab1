"""The position of a stream: a few integers a lane, with the same meaning for every number of processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hfdist.errors import CheckpointError

FORMAT = 3


class Place(NamedTuple):
    """Where the next sequence of a lane begins, in one pool of documents."""

    epoch: int = 0
    """Passes of this lane over its documents."""
    position: int = 0
    """Document, counted in the lane's order of this epoch."""
    offset: int = 0
    """Token inside that document; of a window packing: sequence inside the window that begins at `position`."""


class Progress(NamedTuple):
    """How far a lane has come in one pool."""

    place: Place = Place()
    sequences: int = 0
    """Given so far."""
    tokens: int = 0
    """In those sequences, without filling."""
    documents: int = 0
    """Begun in those sequences, or passed over before them."""


class LaneState(NamedTuple):
    """How far a lane has come."""

    digest: int
    """Of the records of all sequences so far: see `records.chain`."""
    pools: tuple[Progress, ...]


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """States of some lanes (one rank's) or of all (merged)."""

    identity: str
    """Of what the order depends on: corpus, tokenizer and settings."""
    contents: str
    """`Inventory.digest` of what the files held."""
    num_lanes: int
    samples: int
    """Sequences that the whole run has consumed."""
    lanes: dict[int, LaneState]

    def to_json(self) -> dict[str, Any]:
        """Give a value for JSON."""
        return {
            "format": FORMAT,
            "identity": self.identity,
            "contents": self.contents,
            "lanes": self.num_lanes,
            "samples": self.samples,
            "places": [
                [lane, f"{state.digest:016x}", *([*pool.place, *pool[1:]] for pool in state.pools)]
                for lane, state in sorted(self.lanes.items())
            ],
        }

    @classmethod
    def from_json(cls, value: Any) -> Cursor:
        """Read what `to_json` gave; CheckpointError where it has another format or is damaged."""
        try:
            if (found := value["format"]) != FORMAT:
                what = "the data cursor has another format"
                raise CheckpointError(what, where="cursor.format", found=found, allowed=str(FORMAT))
            return cls(
                identity=str(value["identity"]),
                contents=str(value["contents"]),
                num_lanes=int(value["lanes"]),
                samples=_natural(value["samples"]),
                lanes={_natural(lane): _lane_state(digest, pools) for lane, digest, *pools in value["places"]},
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError("the data cursor is damaged", where="cursor", found=value) from error

    @staticmethod
    def merge(cursors: Sequence[Cursor], *, islands: int = 1) -> Cursor:
        """Join the cursors of all data ranks; ranks that share a data rank bring the same lanes.

        `islands` is how many runs share the lanes, of which these are one's.

        CheckpointError: they are of different runs or places, or leave lanes out.
        """
        first = cursors[0]
        lanes: dict[int, LaneState] = {}
        for cursor in cursors:
            if (cursor.identity, cursor.samples) != (first.identity, first.samples):
                raise CheckpointError("the data ranks stand at different places", where="cursor", found=cursor.samples)
            if cursor.contents != first.contents:
                what = "the files that the data ranks read do not hold the same"
                raise CheckpointError(what, where="data.sources", hint="the same files on each machine")
            lanes |= cursor.lanes
        if len(lanes) * islands != first.num_lanes or not all(0 <= lane < first.num_lanes for lane in lanes):
            found = f"{len(lanes)} of {first.num_lanes // islands} lanes"
            raise CheckpointError("lanes are missing", where="cursor", found=found)
        return replace(first, lanes=lanes)


def _lane_state(digest: str, pools: Sequence[Sequence[int]]) -> LaneState:
    progress = []
    for pool in pools:
        epoch, position, offset, sequences, tokens, documents = map(_natural, pool)
        progress.append(Progress(Place(epoch, position, offset), sequences, tokens, documents))
    return LaneState(digest=int(digest, 16), pools=tuple(progress))


def _natural(value: Any) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no number of things")
    return value
