"""The elements that this rank writes: hashed on the way to the disk, from the live tensors or from a copy of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
import xxhash

from hfdist.checkpoint.manifest import Part
from hfdist.checkpoint.save_plan import WriteItem
from hfdist.checkpoint.save_planner import TensorId
from hfdist.errors import NumericsError

PART_BYTES = 256 * 2**20
"""A longer run is hashed in several parts, so that the ranks that verify it later can share the work."""

CHUNK_BYTES = 4 * 2**20
"""Copied from a device, checked, hashed and written while it is in the processor's cache."""

SEND_BYTES = 16 * 2**20
"""Sent to the disk together while the next are hashed and written."""

_ALIGNMENT_BYTES = 64

_Write = tuple[WriteItem, torch.Tensor]
"""A place, and the elements for it."""


class HostCopy:
    """Memory of the host where a save keeps what training is about to change. Made once: new memory is slow."""

    def __init__(self) -> None:
        self._layout: list[tuple[int, torch.dtype]] = []
        """Bytes and type of each copy."""
        self._copies: list[torch.Tensor] = []
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None

    def take(self, live: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy 1-D tensors, in one buffer. The copies before are gone."""
        layout = [(elements.nbytes, elements.dtype) for elements in live]
        if layout != self._layout:
            # Freed first: two would not always fit.
            self._layout, self._copies = [], []
            self._copies = _allot(layout)
            self._layout = layout
        with _beside_training(self._stream):
            for copy, elements in zip(self._copies, live, strict=True):
                copy.copy_(elements, non_blocking=True)
        return self._copies


def _allot(layout: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
    """Views of one new buffer."""
    offsets = [0]
    for num_bytes, _ in layout:
        offsets.append(-(-(offsets[-1] + num_bytes) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)
    # Page-locked, so that a device copies at full speed.
    buffer = torch.empty(offsets[-1], dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    return [
        buffer[offset : offset + num_bytes].view(dtype)
        for offset, (num_bytes, dtype) in zip(offsets, layout, strict=False)
    ]


@contextlib.contextmanager
def _beside_training(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Let a device copy what the steps so far have left, and wait for that alone: not for what communicates beside."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def write_shard(folder: Path, slots: Sequence[WriteItem], elements: Sequence[torch.Tensor]) -> list[Part]:
    """Write elements to their places in files that are laid out, make them survive a power cut, and give their hashes.

    Args:
        folder: of the files.
        slots: in order of the places.
        elements: of each slot, 1-D.

    Raises:
        NumericsError: an element of a trained parameter or of its state is not finite.
        OSError: names the file.
    """
    parts = []
    with contextlib.ExitStack() as stack:
        opened: dict[str, int] = {}
        for run in _runs(zip(slots, elements, strict=True)):
            file = run[0][0].file
            with _named(folder / file):
                if file not in opened:
                    opened[file] = os.open(folder / file, os.O_WRONLY)
                    stack.callback(os.close, opened[file])
                parts.append(_write_run(opened[file], run))
        for file, descriptor in opened.items():
            with _named(folder / file):
                os.fsync(descriptor)
    return parts


def _runs(writes: Iterable[_Write]) -> Iterator[list[_Write]]:
    """Neighbours in a file together, up to the size of a part."""
    run: list[_Write] = []
    for slot, elements in writes:
        is_next = run and (slot.file, slot.begin) == (run[-1][0].file, run[-1][0].end)
        if run and not (is_next and slot.end - run[0][0].begin <= PART_BYTES):
            yield run
            run = []
        run.append((slot, elements))
    if run:
        yield run


def _write_run(descriptor: int, run: Sequence[_Write]) -> Part:
    digest = xxhash.xxh3_128()
    begin = position = sent = run[0][0].begin
    for slot, elements in run:
        for chunk in elements.split(max(1, CHUNK_BYTES // elements.element_size())):
            host = chunk.detach().contiguous().cpu()
            if slot.is_trained and not _is_finite(host):
                raise _not_finite(slot.id)
            data = host.view(torch.uint8).numpy().data
            digest.update(data)
            while data:
                written = os.pwrite(descriptor, data, position)
                data, position = data[written:], position + written
            if position - sent >= SEND_BYTES:
                _send_to_disk(descriptor, sent, position)
                sent = position
    return Part(file=run[0][0].file, begin=begin, num_bytes=position - begin, xxh128=digest.hexdigest())


def _send_to_disk(descriptor: int, begin: int, end: int) -> None:
    """Let the disk begin with what the system would collect until it is asked to wait for all of it."""
    # A hint, which not all systems and file systems take.
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, begin, end - begin, os.POSIX_FADV_DONTNEED)


def _is_finite(values: torch.Tensor) -> bool:
    if not values.is_floating_point() or bool(torch.isfinite(values.sum(dtype=torch.float32))):
        return True
    # A sum is 30 times as fast, and overflows now and then.
    return bool(torch.isfinite(values).all())


def _not_finite(tensor: TensorId) -> NumericsError:
    return NumericsError(
        "a value that is not finite was about to be saved: no checkpoint was written",
        where="/".join(tensor),
        hint="the last checkpoint is good: go on from it with a lower optimizer.lr or train.max_grad_norm",
    )


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Calls with a descriptor do not say in which file they failed."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
