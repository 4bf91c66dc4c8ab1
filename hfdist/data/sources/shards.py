"""The shards of a source in canonical order: facts of all shards without opening one, and each shard by its number."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, overload

from hfdist.data.cache import digest_of
from hfdist.data.order.runs import Runs
from hfdist.data.sources.base import FilePlace, Shard, holds_tokens
from hfdist.data.storage.identity import Contents


class ShardFacts(NamedTuple):
    """Facts of a shard, which need not be open."""

    name: str
    rows: int
    """Number of rows."""
    identity: str
    """Digest of what is read of the rows: `Shard.identity`."""
    contents: Contents | None
    """Hashes of the parts of the file; None: they are not known, or `identity` has all of it."""
    place: FilePlace | None
    """Address and version of a file whose changes may show nowhere else; None: they show in the fields above."""

    @classmethod
    def of(cls, shard: Shard) -> ShardFacts:
        """Take the facts of an open shard."""
        return cls(shard.name, sum(shard.runs), shard.identity, shard.contents, shard.place)

    @property
    def parts(self) -> str | None:
        """`contents` as hexadecimal digits, 16 for each hash; None: there are none."""
        return None if self.contents is None else self.contents.astype("<u8").tobytes().hex()


class Shards(Sequence[Shard]):
    """The shards of one source. Only `open` and indexing open a shard."""

    runs: Runs
    """Runs of all shards."""
    gives_examples: bool
    """Whether the texts of some shard are examples for fine-tuning."""
    holds_tokens: bool
    """Whether all shards are token files."""
    has_places: bool
    """Whether some shard has a `place`."""
    local_digest: str
    """Digest of the shards' `local_identity`, for this machine's caches."""

    @overload
    def __getitem__(self, number: int) -> Shard: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Shard]: ...
    def __getitem__(self, number: int | slice) -> Shard | Sequence[Shard]:
        """Open a shard, or several; DataError: a file has changed since it was indexed."""
        if isinstance(number, slice):
            return [self.open(one) for one in range(*number.indices(len(self)))]
        return self.open(range(len(self))[number])

    def __len__(self) -> int:
        """Count the shards."""
        return len(self.runs.per_shard)

    @abstractmethod
    def open(self, number: int) -> Shard:
        """Open the shard of a number from 0 on."""

    @abstractmethod
    def facts(self) -> Iterator[ShardFacts]:
        """Give the facts of each shard, in order."""

    @abstractmethod
    def name_of(self, number: int) -> str:
        """Give the name of the shard of a number, without opening it."""

    @abstractmethod
    def number_of(self, name: str) -> int | None:
        """Give the number of the shard of a name; None: there is none."""

    def identities_as_json(self, source: str) -> Iterator[str]:
        """Give JSON of [source, name, rows, identity] of each shard, in pieces that a comma joins."""
        yield json.dumps([[source, one.name, one.rows, one.identity] for one in self.facts()])[1:-1]

    def contents_as_json(self, source: str) -> Iterator[str]:
        """Give JSON of ["SOURCE:NAME", rows, identity, parts] of each shard, in pieces that a comma joins."""
        yield json.dumps([[f"{source}:{one.name}", one.rows, one.identity, one.parts] for one in self.facts()])[1:-1]


class OpenShards(Shards):
    """Shards that are all open already."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards
        self.runs = Runs.of(shard.runs for shard in shards)
        self.gives_examples = any(shard.gives_examples for shard in shards)
        self.holds_tokens = all(map(holds_tokens, shards))
        self.has_places = any(shard.place is not None for shard in shards)
        self.local_digest = digest_of([shard.local_identity for shard in shards])

    def open(self, number: int) -> Shard:
        """Give the shard of a number, which is open."""
        return self._shards[number]

    def facts(self) -> Iterator[ShardFacts]:
        """Give the facts of each shard, in order."""
        return map(ShardFacts.of, self._shards)

    def name_of(self, number: int) -> str:
        """Give the name of the shard of a number."""
        return self._shards[number].name

    def number_of(self, name: str) -> int | None:
        """Give the number of the shard of a name; None: there is none."""
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
        """Give the source's name and the shard, which is opened; of a slice a list of such pairs."""
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(len(self)))]
        source, place = self._find(number)
        return source, self._sources[source].open(place)

    def name_of(self, number: int) -> tuple[str, str]:
        """Give the names of a shard's source and of the shard, without opening it."""
        source, place = self._find(number)
        return source, self._sources[source].name_of(place)

    def _find(self, number: int) -> tuple[str, int]:
        """Give the source of a shard, and the shard's number there; IndexError: there is no such shard."""
        # A range turns negative numbers into places from the end, and refuses others.
        number = range(len(self))[number]
        first = 0
        for source, shards in self._sources.items():
            if number < first + len(shards):
                return source, number - first
            first += len(shards)
        raise IndexError(number)

    def __len__(self) -> int:
        """Count the shards of all sources."""
        return self._len


def json_of_pieces(begin: str, pieces: Iterable[str], end: str) -> Iterator[str]:
    """Give a JSON text in pieces: `begin`, the `pieces` that are not empty with commas between them, and `end`."""
    yield begin
    comma = ""
    for piece in filter(None, pieces):
        yield comma
        yield piece
        comma = ", "
    yield end
