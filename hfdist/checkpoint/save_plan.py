"""What a save writes where: which file holds each tensor, and which rank writes which of its elements.

Each rank finds out who else holds what it holds, and which part of that it writes; no tensor is gathered:

declared by rank 0:  a [0, 6)            a: |--0--|--0 or 1--|--1--|     every segment gets one writer,
declared by rank 1:  a [3, 9)               0     3          6     9     and no element is left without one
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from huggingface_hub import split_state_dict_into_shards_factory
from numpy.typing import NDArray

from hfdist.checkpoint import safetensors_io
from hfdist.checkpoint.columns import WINDOW_BYTES, ColumnTransfer
from hfdist.checkpoint.holders import find_holders
from hfdist.checkpoint.hub_pieces import hub_pieces
from hfdist.checkpoint.optimizer_numbers import Numbers, common_values, merge_numbers, read_numbers
from hfdist.checkpoint.piece import WEIGHT, Piece, is_number, view_rows
from hfdist.checkpoint.regions import Column, Region, Segment, assign_writers
from hfdist.checkpoint.safetensors_io import DTYPE_NAMES, DTYPES, FilePlan, TensorId, TensorSpec
from hfdist.collectives import gather_json, on_all_ranks, rank
from hfdist.errors import CheckpointError
from hfdist.models.names.hub_names import HubNames
from hfdist.models.value_head import is_of_value_head

TRAINING_STATE = "training_state"
STATE_FILE = f"{TRAINING_STATE}/state.json"
OPTIMIZER_STEM = f"{TRAINING_STATE}/optimizer"
INDEX_FILE = "model.safetensors.index.json"
MODEL_STEM = "model"
ADAPTER_STEM = "adapter_model"
"""First part of the name of an adapter's file. PEFT reads one file, whatever its size."""

MAX_FILE_BYTES = 2_000_000_000
"""The limit of one file of the optimizer's state."""

MAX_MODEL_FILE_BYTES = 50_000_000_000
"""The most bytes of one file of weights: the default of `save_pretrained`."""


class WriteItem(NamedTuple):
    """A run of elements that this rank writes, and its place."""

    file: str
    """Relative to the checkpoint."""
    begin: int
    """Byte offset in the file."""
    end: int
    """One past the last byte in the file."""
    id: TensorId
    is_trained: bool
    source: int | None
    """Index of the elements among the sources; None: they are put together from columns."""


class PieceRows(NamedTuple):
    """What this rank gives of one of its pieces: rows of `length` elements every `pitch`."""

    piece: int
    first: int
    """First element in the flattened piece."""
    num_rows: int
    length: int
    pitch: int

    def of(self, piece: Piece) -> torch.Tensor:
        """Give the live elements."""
        stop = self.first + (self.num_rows - 1) * self.pitch + self.length
        elements = piece.view.detach().reshape(-1)[self.first : stop]
        return elements if self.num_rows == 1 else view_rows(elements, self.length, self.pitch)


@dataclass(frozen=True, kw_only=True)
class SavePlan:
    """What a save writes; equal on all ranks but for `items`, `sources` and `transfers`."""

    files: dict[str, FilePlan]
    """What each file holds, by its path relative to the checkpoint."""
    index: dict[str, object] | None
    """Content of the Hub's index, where the weights take several files."""
    items: list[WriteItem]
    """What this rank writes, in order of the files."""
    sources: list[PieceRows]
    """What this rank gives, to itself and to others."""
    transfers: list[ColumnTransfer]
    """The columns that this rank gives or gets."""
    numbers: list[TensorId]
    """All numbers of the optimizer that any rank holds: they are in no file."""
    writers: NDArray[np.bool_]
    """Whether a rank writes into a file; shape [ranks, files]."""

    @property
    def header_bytes(self) -> int:
        """Bytes of the headers of all files."""
        return sum(len(file.header) for file in self.files.values())

    @property
    def num_bytes(self) -> int:
        """Size of all tensor files."""
        return sum(file.num_bytes for file in self.files.values())


class PlannedSave(NamedTuple):
    """A plan with what is saved by it now."""

    plan: SavePlan
    elements: list[torch.Tensor]
    """Live elements of each of the plan's sources."""
    numbers: Numbers
    """Numbers of the optimizer; equal on all ranks."""


def regions_of(pieces: Iterable[Piece]) -> list[Region]:
    """Describe pieces without their tensors. A type that safetensors does not know is a `CheckpointError`."""
    regions = []
    for piece in pieces:
        dtype = DTYPE_NAMES.get(piece.view.dtype)
        if dtype is None:
            where = f"{piece.name}/{piece.key}"
            raise CheckpointError("a type that a checkpoint cannot hold", where=where, found=piece.view.dtype)
        spec = TensorSpec(piece.name, piece.key, tuple(piece.shape), dtype)
        # Whole rows are one run.
        columns = (piece.run, piece.pitch) if piece.run < piece.pitch else (0, 0)
        regions.append(Region(spec, piece.start, piece.stop, *columns))
    return regions


class Planner:
    """Decides which file each tensor goes into, and which rank writes what, from what all ranks hold.

    The first save makes the plan. Later saves only check that every rank still holds the same. The stem of the files of
    weights is `MODEL_STEM`, or `ADAPTER_STEM` where they are an adapter's. `names` are the tensors of the files; None:
    they are those of the pieces.
    """

    def __init__(self, *, weights_only: bool = False, stem: str = MODEL_STEM, names: HubNames | None = None) -> None:
        self._weights_only = weights_only
        self._stem = stem
        self._names = names
        self._plan: SavePlan | None = None
        self._held: list[Region] = []
        """What this rank held when the plan was made."""

    def plan(self, pieces: Iterable[Piece]) -> PlannedSave:
        """Plan a save of these pieces. A collective.

        The plan is the same object as before where nothing has changed.

        Raises:
            CheckpointError: no rank holds some elements, or ranks contradict each other; all ranks raise it.
        """
        own: list[Piece] = []
        held: list[Region] = []
        numbers: dict[TensorId, float] = {}

        def look() -> list[object]:
            numbered: list[Piece] = []
            for piece in hub_pieces(pieces, self._names):
                if is_number(piece.key):
                    numbered.append(piece)
                elif self._is_of_model(piece.name, piece.key) or not self._weights_only:
                    own.append(piece)
            held.extend(regions_of([*own, *numbered]))
            numbers.update(read_numbers(numbered))
            return [self._plan is not None and self._held == held, common_values(numbers)]

        of_ranks = on_all_ranks(look)
        if self._plan is None or not all(is_as_before for is_as_before, _ in of_ranks):
            self._plan, self._held = self._make(held), held
        elements = [source.of(own[source.piece]) for source in self._plan.sources]
        merged = merge_numbers(self._plan.numbers, numbers, [values for _, values in of_ranks])
        return PlannedSave(self._plan, elements, merged)

    def _is_of_model(self, name: str, key: str) -> bool:
        """Whether it is a tensor of the files of weights: transformers leaves out what a constructor computes."""
        return key == WEIGHT and not is_of_value_head(name) and (self._names is None or name in self._names.shapes)

    def _make(self, held: list[Region]) -> SavePlan:
        specs, segments = find_holders(held)
        numbers = [tensor_id for tensor_id in specs if is_number(tensor_id[1])]
        files, index, places = self._plan_files(spec for spec in specs.values() if not is_number(spec.key))
        trained = {name for name, _ in numbers}
        trained |= set() if self._names is None else self._names.names_of(trained)
        # All ranks have one order, that of the files.
        writes = sorted((_place(segment, places), writer, segment) for writer, segment in assign_writers(segments))
        items, sources, transfers = _split_writes(writes, files, _Sources(held), trained)
        return SavePlan(
            files=files,
            index=index,
            items=items,
            sources=sources,
            transfers=transfers,
            numbers=numbers,
            writers=_find_writers(files, items),
        )

    def _plan_files(
        self, specs: Iterable[TensorSpec]
    ) -> tuple[dict[str, FilePlan], dict[str, object] | None, dict[TensorId, tuple[str, int]]]:
        """Give the files by path, the Hub's index, and the file and byte offset of each tensor."""
        specs = list(specs)
        weights = {spec.name: spec for spec in specs if self._is_of_model(*spec.id)}
        order = sorted(weights) if self._names is None else filter(weights.__contains__, self._names.shapes)
        split = split_state_dict_into_shards_factory(
            {name: weights[name] for name in order},
            get_storage_size=lambda spec: spec.num_bytes,
            filename_pattern=f"{self._stem}{{suffix}}.safetensors",
            max_shard_size=MAX_MODEL_FILE_BYTES if self._stem == MODEL_STEM else sys.maxsize,
        )
        packed = {path: {name: weights[name] for name in names} for path, names in split.filename_to_tensors.items()}
        optimizer = pack_files((spec for spec in specs if not self._is_of_model(*spec.id)), MAX_FILE_BYTES)
        for number, members in enumerate(optimizer, start=1):
            path = f"{OPTIMIZER_STEM}-{number:05d}-of-{len(optimizer):05d}.safetensors"
            packed[path] = {"/".join(spec.id): spec for spec in members}
        files = {path: safetensors_io.plan_file(members) for path, members in packed.items() if members}
        places = {
            spec.id: (path, files[path].begins[name])
            for path, members in packed.items()
            for name, spec in members.items()
        }
        if not split.is_sharded:
            return files, None, places
        total_parameters = {} if self._names is None else {"total_parameters": self._names.num_parameters}
        return files, {"metadata": total_parameters | split.metadata, "weight_map": split.tensor_to_filename}, places


def _find_writers(files: Iterable[str], items: Iterable[WriteItem]) -> NDArray[np.bool_]:
    """Find which rank writes into which file. A collective: a bit for each file."""
    written = {item.file for item in items}
    bits = np.array([file in written for file in files], dtype=bool)
    of_ranks = [bytes.fromhex(text) for text in gather_json(np.packbits(bits).tobytes().hex())]
    packed = np.stack([np.frombuffer(one, dtype=np.uint8) for one in of_ranks])
    return np.unpackbits(packed, axis=1, count=len(bits)).astype(bool)


def _place(segment: Segment, places: Mapping[TensorId, tuple[str, int]]) -> tuple[str, int]:
    """The file of a segment, and its first byte there."""
    file, begin = places[segment.region.spec.id]
    return file, begin + segment.region.start * segment.region.spec.itemsize_bytes


class _Sources:
    """Finds what this rank gives among what it holds."""

    def __init__(self, own: list[Region]) -> None:
        self._held: dict[TensorId, list[tuple[int, Region]]] = {}
        for number, region in enumerate(own):
            self._held.setdefault(region.spec.id, []).append((number, region))
        self.found: list[PieceRows] = []

    def add(self, segment: Segment, column: Column) -> int:
        """Note that a column of a segment is given, and say under which number."""
        length = column.stop - column.start
        for number, region in self._held[segment.region.spec.id]:
            place = (segment.region.start + column.start, segment.num_rows, length)
            first = region.offset_of(*place, segment.pitch)
            if first is not None:
                self.found.append(PieceRows(number, first, segment.num_rows, length, region.run or segment.pitch))
                return len(self.found) - 1
        raise AssertionError(f"{segment.region} is given by a rank that does not hold it")


def _split_writes(
    writes: Sequence[tuple[tuple[str, int], int, Segment]],
    files: Mapping[str, FilePlan],
    sources: _Sources,
    trained: Collection[str],
) -> tuple[list[WriteItem], list[PieceRows], list[ColumnTransfer]]:
    """Give what this rank writes, gives and transfers; `writes`: the file, first byte and writer of each segment."""
    items: list[WriteItem] = []
    transfers: list[ColumnTransfer] = []
    of_pair: Counter[tuple[int, int]] = Counter()
    before = dict(zip(files, accumulate((file.num_bytes for file in files.values()), initial=0), strict=False))
    for (file, begin), writer, segment in writes:
        spec, is_joined = segment.region.spec, len(segment.columns) > 1
        for column in segment.columns if is_joined else ():
            sender = column.sender(writer)
            if rank() in (sender, writer):
                transfer = ColumnTransfer(
                    number=of_pair[sender, writer],
                    window=(before[file] + begin) // WINDOW_BYTES,
                    sender=sender,
                    writer=writer,
                    rows=len(items),
                    num_rows=segment.num_rows,
                    column=column,
                    pitch=segment.pitch,
                    dtype=DTYPES[spec.dtype],
                    source=sources.add(segment, column) if sender == rank() else None,
                )
                transfers.append(transfer)
                of_pair[sender, writer] += 1
        if writer == rank():
            source = None if is_joined else sources.add(segment, segment.columns[0])
            end = begin + segment.region.num_bytes
            items.append(WriteItem(file, begin, end, spec.id, spec.name in trained, source))
    return items, sources.found, transfers


def pack_files(specs: Iterable[TensorSpec], limit_bytes: int) -> list[list[TensorSpec]]:
    """Pack tensors into files of at most `limit_bytes` each (a larger tensor gets its own file), by name.

    Depends on names and sizes alone, so every layout writes the same files. There is at least one file.
    """
    files: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in sorted(specs, key=lambda spec: spec.id):
        if files[-1] and size + spec.num_bytes > limit_bytes:
            files.append([])
            size = 0
        files[-1].append(spec)
        size += spec.num_bytes
    return files
