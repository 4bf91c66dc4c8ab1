"""Plain safetensors files, written and read in parts at the offsets of their header."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hfdist.checkpoint.save_planner import TensorSpec
from hfdist.errors import CheckpointError

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format."""

MAX_DIMENSIONS = 64
"""As many as torch has."""

COPY_BYTES = 64 * 2**20
"""Largest staging buffer between a device and a file."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Where a tensor lies in a file. `begin` counts bytes from the start of the file."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int


@dataclass(frozen=True, kw_only=True)
class FilePlan:
    """A file to be written: its header, and the absolute byte offset of each of its tensors, by name in the file."""

    header: bytes
    begins: Mapping[str, int]
    num_bytes: int


def plan_file(tensors: Mapping[str, TensorSpec]) -> FilePlan:
    """Lay out a file of these tensors, by name in the file: the widest types first, for alignment, then by name."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize_bytes, item[0]))
    description: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, spec in ordered:
        offsets = [position, position + spec.num_bytes]
        description[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": offsets}
        position = offsets[1]
    text = json.dumps(description, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    begins = {name: len(header) + description[name]["data_offsets"][0] for name, _ in ordered}
    return FilePlan(header=header, begins=begins, num_bytes=len(header) + position)


def create(path: Path, plan: FilePlan) -> None:
    """Write the header and reserve the space, so that a full disk shows before any rank writes."""
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, plan.num_bytes)
        file.write(plan.header)


def read_header(path: Path) -> dict[str, Entry]:
    """Read where each tensor of a file lies.

    Raises:
        CheckpointError: not a safetensors file, or one whose offsets do not cover it exactly.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise ValueError("the header is longer than the file, or than the format allows")
            description = json.loads(file.read(length))
        return _parse(path, description, data_begin=8 + length, size=size)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            "not a whole safetensors file",
            where=str(path),
            found=f"{type(error).__name__}: {error}",
            hint="another checkpoint, or checkpoint.resume=auto, which takes the newest that verifies",
        ) from error


def read_elements(descriptor: int, offset: int, dtype: torch.dtype, elements: torch.Tensor) -> None:
    """Fill a 1-D tensor from a byte offset of an open file, whose elements are of `dtype`."""
    for run, position in _runs(elements, offset, dtype.itemsize):
        buffer = torch.empty(run.numel() * dtype.itemsize, dtype=torch.uint8)
        data = buffer.numpy().data
        while data:
            received = os.preadv(descriptor, [data], position)
            if received == 0:
                raise CheckpointError("a file ended early while it was read", found=f"byte {position}")
            data, position = data[received:], position + received
        run.copy_(buffer.view(dtype))


def _runs(elements: torch.Tensor, offset: int, itemsize: int) -> Iterable[tuple[torch.Tensor, int]]:
    length = COPY_BYTES // itemsize
    for start in range(0, elements.numel(), length):
        yield elements[start : start + length], offset + start * itemsize


def _parse(path: Path, description: dict[str, Any], *, data_begin: int, size: int) -> dict[str, Entry]:
    entries = {}
    extents = []
    for name, fields in description.items():
        if name == "__metadata__":
            continue
        dtype = DTYPES[fields["dtype"]]
        shape = tuple(fields["shape"])
        begin, end = fields["data_offsets"]
        if len(shape) > MAX_DIMENSIONS or not all(
            type(number) is int and 0 <= number <= size for number in (*shape, begin, end)
        ):
            # Before they are multiplied: a product of thousands of huge numbers takes minutes.
            raise ValueError(f"{name}: numbers must be whole, not negative, and no larger than the file")
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name}: the shape does not fit the offsets")
        entries[name] = Entry(path=path, dtype=dtype, shape=shape, begin=data_begin + begin)
        extents.append((begin, end))
    position = 0
    for begin, end in sorted(extents):
        if begin != position:
            raise ValueError("the tensors leave a hole or overlap")
        position = end
    if data_begin + position != size:
        raise ValueError(f"the tensors end at byte {data_begin + position}, the file at {size}")
    return entries
