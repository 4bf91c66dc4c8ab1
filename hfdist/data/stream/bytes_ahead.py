"""A limit of the bytes of decoded images that loader processes hold ahead of their rank.

loader process    wait while as much as the limit is ahead; decode a sequence; add its bytes; send it
rank              take a sequence; its bytes are not ahead any more
"""

from __future__ import annotations

import multiprocessing
import time

from hfdist.data.packing.sequence import Sequence

_LOOKS_EACH_SECONDS = 0.005


class BytesAhead:
    """What each loader process holds ahead: at most a limit, and one sequence more.

    Each sequence must be sent once it is made: a process that waits with one in hand would wait for ever.

    Args:
        num_workers: processes, which must be forked from here.
        limit: bytes.
    """

    def __init__(self, num_workers: int, limit: int) -> None:
        # Each number has one writer and needs no lock, which a process that is killed could hold for ever.
        context = multiprocessing.get_context("fork")
        self._limit, self._made, self._taken = limit, 0, context.RawArray("q", num_workers)
        self._is_closed = context.RawValue("b", 0)

    def wait(self, worker: int) -> None:
        """Wait, in a loader process, until it may make a sequence."""
        while self._made - self._taken[worker] >= self._limit and not self._is_closed.value:
            time.sleep(_LOOKS_EACH_SECONDS)

    def add(self, sequence: Sequence) -> None:
        """Count, in a loader process, a sequence that it sends."""
        self._made += _num_bytes(sequence)

    def take(self, worker: int, sequence: Sequence) -> None:
        """Count a sequence that the rank has taken."""
        self._taken[worker] += _num_bytes(sequence)

    def close(self) -> None:
        """Let nobody wait any more: the rank takes nothing else."""
        self._is_closed.value = 1


def _num_bytes(sequence: Sequence) -> int:
    return sum(values.nbytes for images in (sequence.images or {}).values() for values in images.inputs.values())
