"""An island's share of the one data stream that all islands read together.

The stream has lanes, and each lane is dealt to one island; those of an island that has left are dealt to the others.
What an island has read counts once an exchange counts: if it is lost, the others read anew what it has read since.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from hfdist.data import Cursor, TokenStream


class DataShare:
    """The data share of one island. All ranks of the island call its methods together.

    Args:
        stream: the data stream of this rank.
        data_size: number of data ranks of this island.
        merge: a collective that gives the cursor of all lanes.
        write_ledger: writes the list of what was read so far to the disk.
    """

    def __init__(
        self, stream: TokenStream, data_size: int, merge: Callable[[], Cursor], write_ledger: Callable[[], None]
    ) -> None:
        self._stream, self._data_size, self._merge, self._write_ledger = stream, data_size, merge, write_ledger

    def read(self) -> object:
        """Write the ledger, and give the cursor of this island's lanes, as JSON."""
        self._write_ledger()
        cursor = self._merge()
        lanes = {lane: cursor.lanes[lane] for lane in self._stream.lanes_of_run}
        # All islands have the same shares: they need not travel.
        return replace(cursor, lanes=lanes, shares=None).to_json()

    def deals(self, there: Sequence[int]) -> bool:
        """Whether some lane would change its island if these islands took part in the next round.

        Args:
            there: indices of the islands.
        """
        shares = self._stream.shares
        assert shares is not None
        return shares.dealt(there, self._data_size).readers != shares.readers

    def begin(self, there: Sequence[int]) -> None:
        """Begin to train, or go on, together with the islands of these indices."""
        self._stream.truncate_ledger()
        self.deal({}, there)

    def deal(self, read: Mapping[int, object], there: Sequence[int]) -> None:
        """Count what islands have read, and deal all lanes to those that are there.

        Args:
            read: what the method `read` has given on each island whose exchange counts, by the island's index.
            there: indices of the islands that take part in the round that follows.
        """
        cursor = self._merge()
        shares, lanes = cursor.shares, dict(cursor.lanes)
        assert shares is not None
        for index, value in read.items():
            found = Cursor.from_json(value)
            shares = shares.counted(index, {lane: state.sequences for lane, state in found.lanes.items()})
            # This island's own lanes may be further by now.
            lanes |= {lane: state for lane, state in found.lanes.items() if lane not in self._stream.lanes_of_run}
        self._stream.deal(replace(cursor, lanes=lanes, shares=shares.dealt(there, self._data_size)))

    def go_on_as(self, value: object) -> None:
        """Go on at the cursor of another island, as JSON."""
        self._stream.go_on_as(Cursor.from_json(value))
