"""The elements that this rank writes: hashed on the way to the disk, from the live tensors or from a copy of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import xxhash

from hfdist.checkpoint.exchange import rank
from hfdist.checkpoint.layout import TensorId
from hfdist.checkpoint.manifest import Part
from hfdist.checkpoint.piece import Piece
from hfdist.checkpoint.plan import Plan
from hfdist.errors import NumericsError

PART_BYTES = 256 * 2**20
"""A longer run is hashed in several parts, so that the ranks that verify it later can share the work."""

CHUNK_BYTES = 4 * 2**20
"""Copied from a device, checked, hashed and written while it is in the processor's cache."""

_ALIGNMENT_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class Write:
    """A run of elements, and its place."""

    id: TensorId
    file: str
    """Relative to the checkpoint."""
    begin: int
    """Byte offset in the file."""
    elements: torch.Tensor
    """1-D."""
    is_trained: bool

    @property
    def end(self) -> int:
        """One past the last byte in the file."""
        return self.begin + self.elements.nbytes


def list_writes(plan: Plan, own: Iterable[Piece]) -> list[Write]:
    """Give the live elements that the plan wants this rank to write, in order of their places."""
    held: dict[TensorId, list[Piece]] = {}
    for piece in own:
        held.setdefault((piece.name, piece.key), []).append(piece)
    writes = []
    for assignment in plan.assignments:
        if assignment.writer == rank():
            spec = assignment.spec
            file, begin = plan.places[spec.id]
            writes.append(
                Write(
                    id=spec.id,
                    file=file,
                    begin=begin + assignment.start * spec.itemsize_bytes,
                    elements=_elements(held[spec.id], assignment.start, assignment.stop),
                    is_trained=spec.name in plan.steps,
                )
            )
    return sorted(writes, key=lambda write: (write.file, write.begin))


def _elements(pieces: list[Piece], start: int, stop: int) -> torch.Tensor:
    piece = next(piece for piece in pieces if piece.start <= start and stop <= piece.stop)
    return piece.view.detach().reshape(-1)[start - piece.start : stop - piece.start]


class HostCopy:
    """Memory of the host where a save keeps what training is about to change. Made once: new memory is slow."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def take(self, writes: list[Write]) -> list[Write]:
        """Copy all elements, and give the same writes with the copies. The copies before are gone."""
        offsets = [0]
        for write in writes:
            offsets.append(-(-(offsets[-1] + write.elements.nbytes) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)
        if self._buffer.numel() != offsets[-1]:
            # Page-locked, so that a device copies at full speed. Freed first: two would not always fit.
            self._buffer = torch.empty(0, dtype=torch.uint8)
            self._buffer = torch.empty(offsets[-1], dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        copies = []
        for write, offset in zip(writes, offsets, strict=False):
            live = write.elements
            copy = self._buffer[offset : offset + live.nbytes].view(live.dtype)
            copy.copy_(live, non_blocking=True)
            copies.append(replace(write, elements=copy))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return copies


def write_share(folder: Path, writes: list[Write]) -> list[Part]:
    """Write elements to their places in files that are laid out, make them survive a power cut, and give their hashes.

    Raises:
        NumericsError: an element of a trained parameter or of its state is not finite.
        OSError: names the file.
    """
    parts = []
    with contextlib.ExitStack() as stack:
        opened: dict[str, int] = {}
        for run in _runs(writes):
            file = run[0].file
            with _named(folder / file):
                if file not in opened:
                    opened[file] = os.open(folder / file, os.O_WRONLY)
                    stack.callback(os.close, opened[file])
                parts.append(_write_run(opened[file], run))
        for file, descriptor in opened.items():
            with _named(folder / file):
                os.fsync(descriptor)
    return parts


def _runs(writes: list[Write]) -> Iterator[list[Write]]:
    """Neighbours in a file together, up to the size of a part."""
    run: list[Write] = []
    for write in writes:
        is_next = run and (write.file, write.begin) == (run[-1].file, run[-1].end)
        if run and not (is_next and write.end - run[0].begin <= PART_BYTES):
            yield run
            run = []
        run.append(write)
    if run:
        yield run


def _write_run(descriptor: int, run: list[Write]) -> Part:
    digest = xxhash.xxh3_128()
    position = run[0].begin
    for write in run:
        for chunk in write.elements.split(max(1, CHUNK_BYTES // write.elements.element_size())):
            host = chunk.detach().contiguous().cpu()
            if write.is_trained and not _is_finite(host):
                raise _not_finite(write.id)
            data = host.view(torch.uint8).numpy().data
            digest.update(data)
            while data:
                written = os.pwrite(descriptor, data, position)
                data, position = data[written:], position + written
    return Part(file=run[0].file, begin=run[0].begin, num_bytes=position - run[0].begin, xxh128=digest.hexdigest())


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
