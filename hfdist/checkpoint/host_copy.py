"""Copies of live tensors in the host's memory, from which a save goes on while training changes the tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

_ALIGNMENT_BYTES = 64
"""Each copy begins at a multiple of so many bytes: those of a cache line."""

Layout = list[tuple[int, torch.dtype]]
"""Number of bytes and type of each copy, in order."""


class HostCopy:
    """Memory for copies of tensors, which is made once and used for each save: to get new memory is slow."""

    def __init__(self) -> None:
        self._layout: Layout = []
        self._copies: list[torch.Tensor] = []
        """Flat views of one buffer, one for each entry of the layout."""
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None

    def reserve(self, layout: Layout) -> None:
        """Make the memory for copies of this layout before the first save."""
        self._make(layout)
        if self._stream is None:
            for copy in self._copies:
                # Without this the system gives each page when it is first written, while training stands still.
                copy.zero_()

    def _make(self, layout: Layout) -> None:
        """Make the memory for copies of this layout, unless it is there already."""
        if layout == self._layout:
            return
        # The old memory is freed first: both would not always fit.
        self._layout, self._copies = [], []
        # The stream sets the device of this rank, which another thread has not set.
        with torch.cuda.stream(self._stream):
            self._copies = _allocate(layout)
        self._layout = layout

    def take(self, live: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy tensors, over the copies that were taken before.

        Args:
            live: tensors on any device.

        Returns:
            Flat copies on the CPU, of the same types.
        """
        self._make(layout_of(live))
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        # In a stream of its own: the copies wait for the steps so far, and this thread for the copies alone, and not
        # for communication that other streams have under way.
        with torch.cuda.stream(self._stream):
            for copy, elements in zip(self._copies, live, strict=True):
                copy.view(elements.shape).copy_(elements, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
        return self._copies


def layout_of(live: Sequence[torch.Tensor]) -> Layout:
    """Give the layout of copies of these tensors."""
    return [(elements.nbytes, elements.dtype) for elements in live]


def _allocate(layout: Layout) -> list[torch.Tensor]:
    """Make a new buffer, and give a view of it for each entry of a layout."""
    sizes = [math.ceil(num_bytes / _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for num_bytes, _ in layout]
    # Page-locked, so that a device copies at full speed.
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    return [part[:num_bytes].view(dtype) for part, (num_bytes, dtype) in zip(buffer.split(sizes), layout, strict=True)]
