"""The shards of a source in canonical order: what is known of all of them, and each one opened when it is asked for."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, overload

from hfdist.data.cache import digest_of
from hfdist.data.order.runs import Runs
from hfdist.data.sources.base import Shard, holds_tokens
from hfdist.data.storage.identity import Contents


class ShardFacts(NamedTuple):
    """What is known of a shard that need not be open; see `Shard`."""

    name: str
    rows: int
    identity: str
    contents: Contents | None
    place: tuple[str, str] | None

    @classmethod
    def of(cls, shard: Shard) -> ShardFacts:
        """Take what a shard says."""
        return cls(shard.name, sum(shard.runs), shard.identity, shard.contents, shard.place)

    @property
    def parts(self) -> str | None:
        """`contents` in hexadecimal digits, as inventories have them."""
        return None if self.contents is None else self.contents.astype("<u8").tobytes().hex()


class Shards(Sequence[Shard]):
    """Shards of one source. `facts` and the JSON of them open none."""

    runs: Runs
    gives_examples: bool
    """Whether texts of some shard are examples; see `Shard`."""
    holds_tokens: bool
    """Whether all are token files."""
    has_places: bool
    """Whether `Shard.place` of some is known."""
    local_digest: str
    """Digest of the identities for this machine's caches."""

    @overload
    def __getitem__(self, number: int) -> Shard: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Shard]: ...
    def __getitem__(self, number: int | slice) -> Shard | Sequence[Shard]:
        """Open a shard, or several; DataError: the file is another one than is known."""
        if isinstance(number, slice):
            return [self.open(one) for one in range(*number.indices(len(self)))]
        return self.open(range(len(self))[number])

    def __len__(self) -> int:
        """Number of shards."""
        return len(self.runs.per_shard)

    @abstractmethod
    def open(self, number: int) -> Shard:
        """Open the shard of a number, which is in range."""

    @abstractmethod
    def facts(self) -> Iterator[ShardFacts]:
        """Give what is known of each."""

    @abstractmethod
    def name_of(self, number: int) -> str:
        """Give the name of a shard, which is not opened."""

    @abstractmethod
    def number_of(self, name: str) -> int | None:
        """Give the number of the shard of a name; None: there is none."""

    def identities_as_json(self, source: str) -> Iterator[str]:
        """Give [source, name, rows, identity] of each, in pieces of several that a comma joins."""
        yield json.dumps([[source, one.name, one.rows, one.identity] for one in self.facts()])[1:-1]

    def contents_as_json(self, source: str) -> Iterator[str]:
        """Give ["SOURCE:NAME", rows, identity, parts] of each, in such pieces."""
        yield json.dumps([[f"{source}:{one.name}", one.rows, one.identity, one.parts] for one in self.facts()])[1:-1]


class OpenShards(Shards):
    """Shards that a start has opened."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards
        self.runs = Runs.of(shard.runs for shard in shards)
        self.gives_examples = any(shard.gives_examples for shard in shards)
        self.holds_tokens = all(map(holds_tokens, shards))
        self.has_places = any(shard.place is not None for shard in shards)
        self.local_digest = digest_of([shard.local_identity for shard in shards])

    def open(self, number: int) -> Shard:
        """Give the shard."""
        return self._shards[number]

    def facts(self) -> Iterator[ShardFacts]:
        """Take them from the shards."""
        return map(ShardFacts.of, self._shards)

    def name_of(self, number: int) -> str:
        """Take it from the shard."""
        return self._shards[number].name

    def number_of(self, name: str) -> int | None:
        """Look the name up."""
        return self._numbers.get(name)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {shard.name: number for number, shard in enumerate(self._shards)}


class NamedShards(Sequence[tuple[str, Shard]]):
    """The shards of several sources end to end, each with the name of its source."""

    def __init__(self, sources: Mapping[str, Shards]) -> None:
        self._sources = sources
        self._len = sum(map(len, sources.values()))

    @overload
    def __getitem__(self, number: int) -> tuple[str, Shard]: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[tuple[str, Shard]]: ...
    def __getitem__(self, number: int | slice) -> tuple[str, Shard] | Sequence[tuple[str, Shard]]:
        """Open a shard, or several."""
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(len(self)))]
        source, place = self._find(number)
        return source, self._sources[source].open(place)

    def name_of(self, number: int) -> tuple[str, str]:
        """Give the names of a shard's source and of the shard, which is not opened."""
        source, place = self._find(number)
        return source, self._sources[source].name_of(place)

    def _find(self, number: int) -> tuple[str, int]:
        number = range(len(self))[number]
        for name, shards in self._sources.items():
            if number < len(shards):
                return name, number
            number -= len(shards)
        raise IndexError(number)

    def __len__(self) -> int:
        """Number of all shards."""
        return self._len


def json_of_pieces(begin: str, pieces: Iterable[str], end: str) -> Iterator[str]:
    """Give a JSON text: pieces that are not empty, with a comma between them."""
    yield begin
    comma = ""
    for piece in filter(None, pieces):
        yield comma
        yield piece
        comma = ", "
    yield end
