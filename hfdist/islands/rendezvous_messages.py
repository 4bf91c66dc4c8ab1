"""The two messages of a rendezvous: where an island stands that comes to it, and who takes part in the exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from hfdist.messages.message import Message, NotAMessageError


class OuterVersion(NamedTuple):
    """What tells outer weights apart: the step after which they were made, and their digest."""

    step: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """Where an island stands when it comes to a rendezvous."""

    step: int
    """The step that the island has trained to."""
    outer_step: int
    """Step at which the last round that counts ended."""
    digest: str
    """Digest of the outer weights after the last round that counts."""
    weight: float = 1.0
    """Weight of the island's changes in the mean of all islands."""
    rests: bool = False
    """Whether the island does not train in this round, and waits for what the others learn."""
    read: object = None
    """What the island has read of the data, as JSON; only other islands look at it."""

    def to_json(self) -> list[object]:
        """Give the values of all fields, in their order, as a message has them."""
        return [self.step, self.outer_step, self.digest, self.weight, self.rests, self.read]

    @classmethod
    def from_json(cls, value: Sequence[object]) -> Arrival:
        """Make an arrival of what `to_json` gives; NotAMessageError: the values are not of that kind."""
        names = [one.name for one in fields(cls)]
        if len(value) != len(names):
            raise NotAMessageError(f"an arrival has {len(names)} members")
        message = Message(zip(names, value, strict=True))
        return cls(
            step=message.integer("step"),
            outer_step=message.integer("outer_step"),
            digest=message.text("digest"),
            weight=message.number("weight"),
            rests=message.flag("rests"),
            read=message["read"],
        )

    @property
    def outer(self) -> OuterVersion:
        """The version of the island's outer weights: equal for islands that may go on together."""
        return OuterVersion(self.outer_step, self.digest)

    @property
    def is_start(self) -> bool:
        """Whether the island has learned nothing since the last round that counts."""
        return self.step == self.outer_step


@dataclass(frozen=True, kw_only=True)
class Participants:
    """Who takes part in an exchange."""

    number: int
    members: Mapping[int, list[str]]
    """Islands that exchange, with the addresses of their ranks; empty: nothing is exchanged."""
    weights: Mapping[int, float]
    """Weight of what each island has learned, in the mean of all, by the island's index."""
    resting: list[int]
    """Islands that do not train in the next round."""
    there: list[int]
    """Islands that take part in the round that follows."""
    sources: Mapping[int, tuple[int, list[str]]]
    """The island that gives its state, and the addresses of the island that gets it, by the index of that one."""

    def island_of(self, address: str, rank: int) -> int:
        """Give the member whose rank has an address."""
        return next(index for index, addresses in self.members.items() if addresses[rank] == address)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Participants:
        """Read what `Member.arrive` has given."""
        addresses = {int(index): list(own) for index, own in value["addresses"].items()}
        return cls(
            number=int(value["round"]),
            members={int(index): addresses[int(index)] for index in value["members"]},
            weights={int(index): float(weight) for index, weight in value["weights"].items()},
            resting=[int(index) for index in value["resting"]],
            there=[int(index) for index in value["there"]],
            sources={int(index): (int(source), addresses[int(index)]) for index, source in value["sources"].items()},
        )
