"""Plain safetensors files, written and read in parts at the offsets of their header."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from hfdist.checkpoint.manifest import DamagedError
from hfdist.checkpoint.piece import view_rows
from hfdist.errors import CheckpointError, named_line

DTYPES = {
    "I64": torch.int64,
    "F64": torch.float64,
    "F32": torch.float32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I16": torch.int16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Types in the order in which the library puts tensors into a file: the widest first, for alignment."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format."""

COPY_BYTES = 64 * 2**20
"""Largest staging buffer between a device and a file."""

LONG_BYTES = 4096
"""Runs of a page and more are read one by one: another call costs less than to read what lies between."""

TensorId = tuple[str, str]
"""Parameter name and key."""


class TensorSpec(NamedTuple):
    """A whole named tensor. `dtype` as safetensors spells it."""

    name: str
    key: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    @property
    def id(self) -> TensorId:
        """What identifies it among all tensors of a checkpoint."""
        return (self.name, self.key)

    @property
    def itemsize_bytes(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.dtype].itemsize

    @property
    def total(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Size in a file."""
        return self.total * self.itemsize_bytes


class Entry(NamedTuple):
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
    """Lay out a file of these tensors, by name in the file, as the library does: by type, then by name.

    It is a `CheckpointError` if there are too many for a header that can be read.
    """
    order = list(DTYPES)
    ordered = sorted(tensors.items(), key=lambda item: (order.index(item[1].dtype), item[0]))
    description: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, spec in ordered:
        offsets = [position, position + spec.num_bytes]
        description[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": offsets}
        position = offsets[1]
    text = json.dumps(description, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER_BYTES:
        raise CheckpointError(
            "a file of tensors would have a header that safetensors cannot read",
            found=f"{len(text):,} bytes for {len(tensors):,} tensors",
            allowed=f"{_MAX_HEADER_BYTES:,} bytes",
        )
    header = len(text).to_bytes(8, "little") + text
    begins = {name: len(header) + description[name]["data_offsets"][0] for name, _ in ordered}
    return FilePlan(header=header, begins=begins, num_bytes=len(header) + position)


def create(path: Path, plan: FilePlan, *, is_sparse: bool = False) -> None:
    """Write the header and reserve the space, so that a full disk shows before any rank writes.

    A sparse file has its size and takes no space for what nobody writes.
    """
    with path.open("wb") as file:
        if is_sparse:
            os.truncate(file.fileno(), plan.num_bytes)
        else:
            os.posix_fallocate(file.fileno(), 0, plan.num_bytes)
        file.write(plan.header)


def read_header_length(file: BinaryIO, most_bytes: int) -> int:
    """Read the length of a header, before the library maps a file that may be as long as it says.

    ValueError: it is more than `most_bytes`.
    """
    length = int.from_bytes(file.read(8), "little")
    if length > most_bytes:
        raise ValueError(f"a header of {length} bytes")
    return length


def read_header(path: Path) -> dict[str, Entry]:
    """Read where each tensor lies. A file that is not safetensors, or not whole, is a `DamagedError`."""
    try:
        with path.open("rb") as file:
            length = read_header_length(file, _MAX_HEADER_BYTES)
            # The library checks the header against the size of the file. It does not give the offsets.
            with safe_open(path, framework="np"):
                description = json.loads(file.read(length))
        description.pop("__metadata__", None)
        return {
            name: Entry(path, DTYPES[fields["dtype"]], tuple(fields["shape"]), 8 + length + fields["data_offsets"][0])
            for name, fields in description.items()
        }
    except (SafetensorError, KeyError, ValueError) as error:
        found = named_line(error)
        raise DamagedError("safetensors", "not a whole safetensors file", where=path, found=found) from error


def read_elements(
    descriptor: int, offset: int, dtype: torch.dtype, elements: torch.Tensor, run: int = 0, pitch: int = 0
) -> None:
    """Fill a 1-D tensor from a byte offset of an open file, whose elements are of `dtype`.

    `run` and `pitch` are those of a `Piece`. Short runs are read together with what lies between them.
    """
    if not run:
        for part in elements.split(COPY_BYTES // dtype.itemsize):
            buffer = torch.empty(part.numel() * dtype.itemsize, dtype=torch.uint8)
            _read_into(descriptor, offset, buffer.numpy().data)
            part.copy_(buffer.view(dtype))
            offset += buffer.numel()
        return
    run_bytes, pitch_bytes = run * dtype.itemsize, pitch * dtype.itemsize
    is_long = run_bytes >= LONG_BYTES
    for rows in elements.view(-1, run).split(max(1, COPY_BYTES // (run_bytes if is_long else pitch_bytes))):
        if is_long:
            buffer = torch.empty(len(rows) * run_bytes, dtype=torch.uint8)
            data = buffer.numpy().data
            for row in range(len(rows)):
                part_of_row = data[row * run_bytes : (row + 1) * run_bytes]
                _read_into(descriptor, offset + row * pitch_bytes, part_of_row)
            rows.copy_(buffer.view(dtype).view(-1, run))
        else:
            buffer = torch.empty((len(rows) - 1) * pitch_bytes + run_bytes, dtype=torch.uint8)
            _read_into(descriptor, offset, buffer.numpy().data)
            rows.copy_(view_rows(buffer.view(dtype), run, pitch))
        offset += len(rows) * pitch_bytes


def _read_into(descriptor: int, offset: int, data: memoryview) -> None:
    while data:
        received = os.preadv(descriptor, [data], offset)
        if received == 0:
            raise CheckpointError("a file ended early while it was read", found=f"byte {offset}")
        data, offset = data[received:], offset + received
