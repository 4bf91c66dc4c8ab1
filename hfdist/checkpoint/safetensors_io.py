"""Plain safetensors files, of which ranks write and read parts of tensors, each at its byte offset.

8 bytes: length of the header | header: JSON with type, shape and offsets of each tensor | bytes of the tensors
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

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
"""Size of the largest buffer on the way from a file to a device."""

LONG_BYTES = 4096
"""Runs of at least a page are read one by one: another call costs less than to read the bytes between two runs."""

TensorId = tuple[str, str]
"""Parameter name and key."""


class TensorSpec(NamedTuple):
    """A whole named tensor of a checkpoint."""

    name: str
    """The parameter's name."""
    key: str
    """What the tensor is of the parameter, as in `Piece`: its weight, or a state of the optimizer."""
    shape: tuple[int, ...]
    dtype: str
    """The type as safetensors spells it, such as `BF16`."""

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    @property
    def id(self) -> TensorId:
        """The name and key, which no two tensors of a checkpoint share."""
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
        """Size of the tensor in a file."""
        return self.total * self.itemsize_bytes


class Entry(NamedTuple):
    """Where a tensor lies in a file."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    """Offset of its first byte from the start of the file."""


@dataclass(frozen=True, kw_only=True)
class FilePlan:
    """The layout of a file that is to be written."""

    header: bytes
    """The first bytes of the file: the length of the JSON text, and that text."""
    begins: Mapping[str, int]
    """Offset of each tensor from the start of the file, in bytes, by its name in the file."""
    num_bytes: int
    """Size of the whole file."""


def plan_file(tensors: Mapping[str, TensorSpec]) -> FilePlan:
    """Lay out a file, as the safetensors library does: tensors by type, then by name.

    Args:
        tensors: the tensors, by their names in the file.

    Raises:
        CheckpointError: there are too many tensors for a header that can be read.
    """
    types = list(DTYPES)
    description: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    position = 0
    for name in sorted(tensors, key=lambda name: (types.index(tensors[name].dtype), name)):
        spec, offsets[name] = tensors[name], position
        position += spec.num_bytes
        data_offsets = [offsets[name], position]
        description[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": data_offsets}
    text = json.dumps(description, separators=(",", ":")).encode()
    # Filled up to whole 8 bytes, as the library does, so that tensors are aligned.
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER_BYTES:
        raise CheckpointError(
            "a file of tensors would have a header that safetensors cannot read",
            found=f"{len(text):,} bytes for {len(tensors):,} tensors",
            allowed=f"{_MAX_HEADER_BYTES:,} bytes",
        )
    header = len(text).to_bytes(8, "little") + text
    begins = {name: len(header) + offset for name, offset in offsets.items()}
    return FilePlan(header=header, begins=begins, num_bytes=len(header) + position)


def create(path: Path, plan: FilePlan, *, is_sparse: bool = False) -> None:
    """Make a file with its header and its full size, so that a full disk shows before any rank writes.

    Args:
        path: the file.
        plan: its layout.
        is_sparse: whether only the bytes that somebody writes take space on the disk.
    """
    with path.open("wb") as file:
        if is_sparse:
            os.truncate(file.fileno(), plan.num_bytes)
        else:
            os.posix_fallocate(file.fileno(), 0, plan.num_bytes)
        file.write(plan.header)


def read_header_length(file: BinaryIO, most_bytes: int) -> int:
    """Read the length of a header, before the library takes memory for one that may be as long as the file says.

    Raises:
        ValueError: the length is more than `most_bytes`.
    """
    length = int.from_bytes(file.read(8), "little")
    if length > most_bytes:
        raise ValueError(f"a header of {length} bytes")
    return length


def read_header(path: Path) -> dict[str, Entry]:
    """Read where each tensor of a file lies, by name; DamagedError: the file is not safetensors, or not whole."""
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
    """Fill a 1-D tensor from an open file.

    Args:
        descriptor: the file.
        offset: offset of the first element in the file, in bytes.
        dtype: type of the elements in the file.
        elements: the tensor, of any type and device.
        run: elements of each run in the file; 0: all elements are one run.
        pitch: elements from the start of a run to that of the next.

    Raises:
        CheckpointError: the file ends before the last element.
    """
    if run == 0:
        for part in elements.split(COPY_BYTES // dtype.itemsize):
            buffer = torch.empty(part.numel() * dtype.itemsize, dtype=torch.uint8)
            _read_into(descriptor, offset, buffer.numpy().data)
            part.copy_(buffer.view(dtype))
            offset += buffer.numel()
        return
    run_bytes, pitch_bytes = run * dtype.itemsize, pitch * dtype.itemsize
    has_long_runs = run_bytes >= LONG_BYTES
    row_bytes = run_bytes if has_long_runs else pitch_bytes
    for rows in elements.view(-1, run).split(max(1, COPY_BYTES // row_bytes)):
        if has_long_runs:
            buffer = torch.empty(len(rows) * run_bytes, dtype=torch.uint8)
            data = buffer.numpy().data
            for row in range(len(rows)):
                _read_into(descriptor, offset + row * pitch_bytes, data[row * run_bytes : (row + 1) * run_bytes])
            rows.copy_(buffer.view(dtype).view(-1, run))
        else:
            # Short runs are read together with the bytes between them.
            buffer = torch.empty((len(rows) - 1) * pitch_bytes + run_bytes, dtype=torch.uint8)
            _read_into(descriptor, offset, buffer.numpy().data)
            rows.copy_(view_rows(buffer.view(dtype), run, pitch))
        offset += len(rows) * pitch_bytes


def _read_into(descriptor: int, offset: int, data: memoryview) -> None:
    """Fill memory from an offset of a file; CheckpointError: the file ends early."""
    while data:
        received = os.preadv(descriptor, [data], offset)
        if received == 0:
            raise CheckpointError("a file ended early while it was read", found=f"byte {offset}")
        data, offset = data[received:], offset + received
