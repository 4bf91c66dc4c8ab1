"""The two messages of a rendezvous: where an island stands that comes to it, and who takes part in the exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hfdist.messages.message import Message, NotAMessageError


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """Where an island stands when it comes to a rendezvous."""

    step: int
    outer_step: int
    """Step at which the last round that counts ended."""
    digest: str
    """Digest of the outer weights after the last round that counts."""
    weight: float = 1.0
    """Weight of what the island has learned, in the mean of all islands."""
    rests: bool = False
    """Whether the island does not train in this round, and waits for what the others learn."""
    read: object = None
    """What the island has read of the data, for the others."""

    def to_json(self) -> list[object]:
        """Give the place as a message has it."""
        return [self.step, self.outer_step, self.digest, self.weight, self.rests, self.read]

    @classmethod
    def from_json(cls, value: Sequence[object]) -> Arrival:
        """Read what `to_json` has given; NotAMessageError: it has not."""
        names = ("step", "outer_step", "digest", "weight", "rests", "read")
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
    def outer(self) -> tuple[int, str]:
        """Equal for islands that may go on together."""
        return self.outer_step, self.digest

    @property
    def is_start(self) -> bool:
        """Whether it has learned nothing since the last round that counts."""
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
