"""A limit on the bytes of decoded images that loader processes hold and their rank has not taken yet.

loader process    wait while its bytes ahead reach the limit; decode a sequence; add its bytes; send it
rank              take a sequence: its bytes are not ahead any more
"""

from __future__ import annotations

import multiprocessing
import time

from hfdist.data.packing.sequence import PackedSequence

_LOOKS_EACH_SECONDS = 0.005


class BytesAhead:
    """The bytes that each loader process holds ahead of its rank: at most a limit, and one sequence more.

    Each sequence must be sent once it is made: a process that waits with one in hand would wait for ever.

    Args:
        num_workers: the number of loader processes, which must be forked from this one.
        limit: the most bytes of a process at which it makes one more sequence.
    """

    def __init__(self, num_workers: int, limit: int) -> None:
        # Each number has one writer and needs no lock, which a process that is killed could hold for ever.
        context = multiprocessing.get_context("fork")
        self._limit = limit
        self._made = 0
        """Bytes that this process has sent, if it is a loader process."""
        self._taken = context.RawArray("q", num_workers)
        """Bytes that the rank has taken of each loader process, as int64 in shared memory."""
        self._is_closed = context.RawValue("b", 0)
        """Whether the rank takes nothing else, in shared memory."""

    def wait(self, worker: int) -> None:
        """Wait until this process, which is loader process number `worker`, may make a sequence."""
        while self._made - self._taken[worker] >= self._limit and not self._is_closed.value:
            time.sleep(_LOOKS_EACH_SECONDS)

    def add(self, sequence: PackedSequence) -> None:
        """Count a sequence that this loader process sends."""
        self._made += _num_bytes(sequence)

    def take(self, worker: int, sequence: PackedSequence) -> None:
        """Count a sequence that this process, which is the rank, has taken of loader process number `worker`."""
        self._taken[worker] += _num_bytes(sequence)

    def close(self) -> None:
        """Let nobody wait any more: the rank takes nothing else."""
        self._is_closed.value = 1


def _num_bytes(sequence: PackedSequence) -> int:
    """Count the bytes of the tensors of a sequence's images."""
    return sum(values.nbytes for images in (sequence.images or {}).values() for values in images.inputs.values())
