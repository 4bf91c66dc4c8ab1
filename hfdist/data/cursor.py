"""Where the stream stands: a few integers a lane, with the same meaning for every number of processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hfdist.errors import CheckpointError

FORMAT = 1


class Place(NamedTuple):
    """Where a lane's next sequence begins."""

    epoch: int = 0
    """Passes of this lane over its documents."""
    position: int = 0
    """Document, counted in the lane's order of this epoch."""
    offset: int = 0
    """Token inside that document."""


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """Places of some lanes (one rank's) or of all (merged)."""

    identity: str
    """Of what the order depends on: corpus, tokenizer and settings."""
    lanes: int
    samples: int
    """Sequences that the whole run has consumed."""
    places: dict[int, Place]

    def to_json(self) -> dict[str, Any]:
        """Give a value for JSON."""
        return {
            "format": FORMAT,
            "identity": self.identity,
            "lanes": self.lanes,
            "samples": self.samples,
            "places": [[lane, *self.places[lane]] for lane in sorted(self.places)],
        }

    @classmethod
    def from_json(cls, value: Any) -> Cursor:
        """Read what `to_json` gave.

        Raises:
            CheckpointError: another format or a damaged value.
        """
        try:
            if value["format"] != FORMAT:
                raise CheckpointError(
                    "the data cursor has another format", where="cursor.format", found=value["format"], allowed="1"
                )
            places = {int(lane): Place(int(e), int(p), int(o)) for lane, e, p, o in value["places"]}
            if any(number < 0 for place in places.values() for number in (*place, int(value["samples"]))):
                raise ValueError("a number is below zero")
            return cls(
                identity=str(value["identity"]),
                lanes=int(value["lanes"]),
                samples=int(value["samples"]),
                places=places,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError("the data cursor is damaged", where="cursor", found=value) from error

    @staticmethod
    def merge(cursors: Sequence[Cursor]) -> Cursor:
        """Join the cursors of all data ranks; ranks that share a data rank bring the same lanes.

        Raises:
            CheckpointError: they do not belong together or leave lanes out.
        """
        first = cursors[0]
        places: dict[int, Place] = {}
        for cursor in cursors:
            if (cursor.identity, cursor.samples) != (first.identity, first.samples):
                raise CheckpointError("the data ranks stand at different places", where="cursor", found=cursor.samples)
            places |= cursor.places
        if sorted(places) != list(range(first.lanes)):
            raise CheckpointError("lanes are missing", where="cursor", found=f"{len(places)} of {first.lanes} lanes")
        return Cursor(identity=first.identity, lanes=first.lanes, samples=first.samples, places=places)
