"""Memory of the host where a save keeps what training is about to change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

_ALIGNMENT_BYTES = 64


class CopySpec(NamedTuple):
    """What the copy of a tensor takes."""

    num_bytes: int
    dtype: torch.dtype

    @classmethod
    def of(cls, live: torch.Tensor) -> CopySpec:
        """Describe the copy of a tensor, without making it."""
        return cls(live.nbytes, live.dtype)


class HostCopy:
    """Copies of tensors in memory that is made once: new memory is slow."""

    def __init__(self) -> None:
        self._specs: Sequence[CopySpec] = []
        self._copies: list[torch.Tensor] = []
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None

    def reserve(self, specs: Sequence[CopySpec]) -> None:
        """Make the memory for copies beforehand."""
        self._make(specs)
        if self._stream is None:
            for copy in self._copies:
                # The system gives a page when it is first written: here, and not while training stands still.
                copy.zero_()

    def _make(self, specs: Sequence[CopySpec]) -> None:
        """Make the memory, unless it is there."""
        if specs == self._specs:
            return
        # Freed first: two would not always fit.
        self._specs, self._copies = [], []
        # The stream makes this rank's device the present one, in another thread too.
        with torch.cuda.stream(self._stream):
            self._copies = _allocate(specs)
        self._specs = specs

    def take(self, live: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy tensors into flat views of one buffer, over the copies that were taken before."""
        self._make([CopySpec.of(elements) for elements in live])
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        # A device copies what the steps so far have left. Only that is awaited: not what communicates beside.
        with torch.cuda.stream(self._stream):
            for copy, elements in zip(self._copies, live, strict=True):
                copy.view(elements.shape).copy_(elements, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
        return self._copies


def _allocate(specs: Sequence[CopySpec]) -> list[torch.Tensor]:
    """Give views of one new buffer."""
    sizes = [-(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for num_bytes, _ in specs]
    # Page-locked, so that a device copies at full speed.
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    return [part[:num_bytes].view(dtype) for part, (num_bytes, dtype) in zip(buffer.split(sizes), specs, strict=True)]
