"""Prompts of later steps, read ahead on the stream of a data rank."""

from __future__ import annotations

from collections.abc import Iterator

from hfdist.data import TokenStream
from hfdist.strategies.engine import Batch


class Lookahead:
    """Reads ahead on the stream of one data rank, in that rank's process; the stream reads the same prompts later.

    Args:
        stream: stream of the training.
        data_rank: data rank of this process.
        data_size: number of data ranks, which take the prompts in turns.
    """

    def __init__(self, stream: TokenStream, *, data_rank: int, data_size: int) -> None:
        self._stream, self._data_rank, self._data_size = stream, data_rank, data_size
        self._rows: Iterator[tuple[int, Batch]] = iter(())
        self._newest = -1
        """Number in the run's data of the last prompt that was read here; -1: none."""

    def restart(self) -> None:
        """Begin anew, after what the stream has given."""
        self._rows, self._newest = iter(()), -1

    def read(self, last: int, until: int) -> Iterator[tuple[int, Batch]]:
        """Give what was not given yet: the number and the row, of shape [1, tokens], of each prompt.

        Args:
            last: number of the prompt that the stream has given last.
            until: number up to which prompts are read, this one included.
        """
        if self._newest < last:
            self._rows, self._newest = self._open(), last
        while self._newest < until:
            found = next(self._rows, None)
            if found is None:
                return
            self._newest = found[0]
            yield found

    def _open(self) -> Iterator[tuple[int, Batch]]:
        ahead = self._stream.ahead()
        for row in ahead:
            number = ahead.num_samples - self._data_size + self._data_rank
            yield number, {name: tensor[None] for name, tensor in row.items()}
