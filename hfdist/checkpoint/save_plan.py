"""What a save writes where: which file holds each tensor, and which rank writes which of its elements.

The ranks tell each other what they hold, and make the plan from it; no tensor is gathered:

declared by rank 0:  a [0, 6)            a: |--0--|--0 or 1--|--1--|     every segment gets one writer,
declared by rank 1:  a [3, 9)               0     3          6     9     and no element is left without one
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from hfdist.checkpoint import safetensors_io
from hfdist.checkpoint.piece import NUMBER, STEP, WEIGHT, Piece, is_number
from hfdist.checkpoint.safetensors_io import DTYPE_NAMES, FilePlan, TensorId, TensorSpec
from hfdist.collectives import gather_json, on_all_ranks, rank
from hfdist.errors import CheckpointError

TRAINING_STATE = "training_state"
STATE_FILE = f"{TRAINING_STATE}/state.json"
OPTIMIZER_STEM = f"{TRAINING_STATE}/optimizer"
INDEX_FILE = "model.safetensors.index.json"
MODEL_STEM = "model"
ADAPTER_STEM = "adapter_model"
"""For the weights of an adapter alone. PEFT reads one file, whatever its size."""

MAX_FILE_BYTES = 2_000_000_000
"""The limit of one tensor file."""

CHUNK_BYTES = 64 * 2**20
"""If several ranks hold the same elements, each writes runs of at most this size: a huge embedding has many writers."""

_SHOWN = 5
"""How many names an error lists."""

_T = TypeVar("_T")
_Numbers = dict[str, dict[str, float]]
"""Numbers of the optimizer, such as step counts: by key, and then by parameter."""


class Region(NamedTuple):
    """Elements [start, stop) of a flattened tensor."""

    spec: TensorSpec
    start: int
    stop: int

    @classmethod
    def from_json(cls, values: list[Any]) -> Region:
        """Make a region from what another rank sent: JSON has lists in place of named tuples."""
        (name, key, shape, dtype), start, stop = values
        return cls(TensorSpec(name, key, tuple(shape), dtype), start, stop)

    @property
    def num_bytes(self) -> int:
        """Size in a file."""
        return (self.stop - self.start) * self.spec.itemsize_bytes

    def __str__(self) -> str:
        return f"{'/'.join(self.spec.id)}[{self.start}:{self.stop}]"


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
    piece: int
    """The index of this rank's piece that holds the elements."""
    elements: slice
    """Where they are in the flattened piece."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a save writes; equal on all ranks but for `items`."""

    files: dict[str, FilePlan]
    """By path relative to the checkpoint."""
    index: dict[str, Any] | None
    """Content of the Hub's index, where the weights take several files."""
    items: list[WriteItem]
    """What this rank writes, in order of the files."""

    @property
    def num_bytes(self) -> int:
        """Size of all tensor files."""
        return sum(file.num_bytes for file in self.files.values())


def declare(pieces: Iterable[Piece]) -> list[Region]:
    """Describe pieces without their tensors. A type that safetensors does not know is a `CheckpointError`."""
    regions = []
    for piece in pieces:
        dtype = DTYPE_NAMES.get(piece.view.dtype)
        if dtype is None:
            where = f"{piece.name}/{piece.key}"
            raise CheckpointError("a type that a checkpoint cannot hold", where=where, found=piece.view.dtype)
        regions.append(Region(TensorSpec(piece.name, piece.key, tuple(piece.shape), dtype), piece.start, piece.stop))
    return regions


class Planner:
    """Decides which file each tensor goes into, and which rank writes what, from what all ranks hold.

    The first save makes the plan. Later saves only check that every rank still holds the same. The stem of the files of
    weights is `MODEL_STEM`, or `ADAPTER_STEM` where they are an adapter's.
    """

    def __init__(self, *, weights_only: bool = False, stem: str = MODEL_STEM) -> None:
        self._weights_only = weights_only
        self._stem = stem
        self._plan: Plan | None = None
        self._held: tuple[list[Region], dict[str, list[str]]] | None = None
        """What this rank held when the plan was made: regions, and by key the parameters that have a number."""
        self._numbered: list[dict[str, list[str]]] = []
        """These parameters, for each rank."""

    def plan(self, pieces: Iterable[Piece]) -> tuple[Plan, list[torch.Tensor], _Numbers]:
        """Give the plan, the live elements of each of its items, and the optimizer's numbers. A collective.

        The plan is the same object as before where nothing has changed. The numbers are equal on all ranks.

        Raises:
            CheckpointError: no rank holds some elements, or ranks contradict each other; all ranks raise it.
        """
        own: list[Piece] = []
        regions: list[Region] = []
        numbers: dict[str, dict[str, torch.Tensor]] = {}

        def look() -> list[Any]:
            for piece in pieces:
                if is_number(piece.key):
                    numbers.setdefault(piece.key, {})[piece.name] = piece.view
                elif piece.key == WEIGHT or not self._weights_only:
                    own.append(piece)
            regions.extend(declare(own))
            return [self._held == (regions, _names(numbers)), _read_numbers(numbers)]

        looked = on_all_ranks(look)
        if self._plan is None or not all(is_as_before for is_as_before, _ in looked):
            self._plan = self._make(regions, _names(numbers))
            self._held = (regions, _names(numbers))
        elements = [own[item.piece].view.detach().reshape(-1)[item.elements] for item in self._plan.items]
        return self._plan, elements, self._merge_numbers([values for _, values in looked])

    def _make(self, own: list[Region], own_numbered: dict[str, list[str]]) -> Plan:
        gathered = gather_json([own, own_numbered])
        declared = [[Region.from_json(values) for values in regions] for regions, _ in gathered]
        self._numbered = [names for _, names in gathered]
        writes = assign_writers(declared)[rank()]
        files, index, places = _plan_files(merge_specs(declared).values(), self._stem)
        held: dict[TensorId, list[int]] = {}
        for number, region in enumerate(own):
            held.setdefault(region.spec.id, []).append(number)
        trained = {name for by_key in self._numbered for names in by_key.values() for name in names}
        items = []
        for write in writes:
            spec, start, stop = write
            number = next(n for n in held[spec.id] if own[n].start <= start and stop <= own[n].stop)
            file, begin = places[spec.id]
            begin += start * spec.itemsize_bytes
            elements = slice(start - own[number].start, stop - own[number].start)
            end = begin + write.num_bytes
            items.append(WriteItem(file, begin, end, spec.id, spec.name in trained, number, elements))
        return Plan(files=files, index=index, items=sorted(items, key=lambda item: item[:2]))

    def _merge_numbers(self, values_by_rank: list[dict[str, list[float]]]) -> _Numbers:
        merged: _Numbers = {}
        for numbered, by_key in zip(self._numbered, values_by_rank, strict=True):
            for key, names in numbered.items():
                of_key, values = merged.setdefault(key, {}), by_key[key]
                for name, value in zip(names, values * len(names) if len(values) == 1 else values, strict=True):
                    if of_key.setdefault(name, value) != value:
                        of_what = "how often a parameter was stepped" if key == STEP else "a number of the optimizer"
                        found = f"{of_key[name]} and {value}"
                        where = name if key == STEP else f"{name}/{key}"
                        raise CheckpointError(f"the ranks disagree about {of_what}", where=where, found=found)
        return {key: dict(sorted(of_key.items())) for key, of_key in sorted(merged.items())}


def numbers_as_json(numbers: _Numbers) -> dict[str, Any]:
    """Give the step counts, and other numbers if the optimizer has some, in the form of `STATE_FILE`."""
    others = {key.removeprefix(NUMBER): of_key for key, of_key in numbers.items() if key != STEP}
    return {"steps": numbers.get(STEP, {})} | ({"numbers": others} if others else {})


def _names(numbers: dict[str, dict[str, torch.Tensor]]) -> dict[str, list[str]]:
    return {key: list(by_name) for key, by_name in numbers.items()}


def _read_numbers(numbers: dict[str, dict[str, torch.Tensor]]) -> dict[str, list[float]]:
    """Read the numbers of each key, in order; if all are equal, as is usual, give only one."""
    read = {}
    for key, by_name in numbers.items():
        # Stacked into one read: on a GPU each read waits for everything that runs there.
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for view in by_name.values():
            by_device.setdefault(view.device, []).append(view.detach().reshape(()))
        lists = {device: iter(torch.stack(views).tolist()) for device, views in by_device.items()}
        values = [next(lists[view.device]) for view in by_name.values()]
        if key == STEP:
            values = [int(value) for value in values]
        read[key] = values[:1] if len(set(values)) == 1 else values
    return read


def _plan_files(
    specs: Iterable[TensorSpec], weights_stem: str
) -> tuple[dict[str, FilePlan], dict[str, Any] | None, dict[TensorId, tuple[str, int]]]:
    """Give the files by path, the Hub's index, and the file and byte offset of each tensor."""
    specs = list(specs)
    files: dict[str, FilePlan] = {}
    places: dict[TensorId, tuple[str, int]] = {}
    weights = pack_files(
        [spec for spec in specs if spec.key == WEIGHT], MAX_FILE_BYTES if weights_stem == MODEL_STEM else sys.maxsize
    )
    optimizer = pack_files([spec for spec in specs if spec.key != WEIGHT], MAX_FILE_BYTES)
    for stem, packed in ((weights_stem, weights), (OPTIMIZER_STEM, optimizer)):
        for number, members in enumerate(packed, start=1):
            if not members:
                continue
            is_all_weights = stem == weights_stem and len(packed) == 1
            part = "" if is_all_weights else f"-{number:05d}-of-{len(packed):05d}"
            path = f"{stem}{part}.safetensors"
            names = {spec.id: spec.name if spec.key == WEIGHT else "/".join(spec.id) for spec in members}
            files[path] = safetensors_io.plan_file({names[spec.id]: spec for spec in members})
            places |= {tensor_id: (path, files[path].begins[name]) for tensor_id, name in names.items()}
    index = None
    if len(weights) > 1:
        by_name = {spec.name: places[spec.id][0] for members in weights for spec in members}
        total = sum(spec.num_bytes for members in weights for spec in members)
        index = {"metadata": {"total_size": total}, "weight_map": by_name}
    return files, index, places


# ---- pure functions of what all ranks declare: no tensors, no files, no processes ----


def merge_specs(declared: Sequence[Iterable[Region]]) -> dict[TensorId, TensorSpec]:
    """Give all tensors that any rank declares, by id.

    It is a `CheckpointError` if ranks disagree about a tensor, or hold a region outside of it.
    """
    specs: dict[TensorId, TensorSpec] = {}
    for own, start, stop in (region for regions in declared for region in regions):
        spec = specs.setdefault(own.id, own)
        where = "/".join(spec.id)
        if spec != own:
            raise CheckpointError("the ranks disagree about a tensor", where=where, found=f"{spec} and {own}")
        if not 0 <= start <= stop <= spec.total:
            what = "a rank holds elements that the tensor does not have"
            raise CheckpointError(what, where=where, found=f"[{start}, {stop}) of {spec.total}")
    return specs


def assign_writers(declared: Sequence[Sequence[Region]]) -> list[list[Region]]:
    """Give every element of every tensor exactly one writer, balanced by bytes; equal on all ranks.

    Arguments and result are by rank. Regions may overlap in any way. Elements that no rank holds are a
    `CheckpointError`.
    """
    segments = list(_segments(declared))
    gaps = [str(region) for region, holders in segments if not holders]
    if gaps:
        what = "no rank holds some elements of the model's state: nothing was saved"
        raise CheckpointError(what, found=shorten(gaps))
    return share_out([(region, region.num_bytes, holders) for region, holders in segments], len(declared))


def share_out(items: Iterable[tuple[_T, int, Sequence[int]]], world_size: int) -> list[list[_T]]:
    """Give each item to one rank, so that all ranks get about the same number of bytes.

    An item comes with its bytes and the ranks that may get it. If the order of the items is equal on all
    ranks, the result is, too.
    """
    shares: list[list[_T]] = [[] for _ in range(world_size)]
    load = [0] * world_size
    # First the items that only one rank may get. Then the others, the largest first, to the rank with the fewest bytes.
    for item, num_bytes, candidates in sorted(items, key=lambda item: (len(item[2]) > 1, -item[1])):
        least = min(candidates, key=lambda rank: (load[rank], rank))
        shares[least].append(item)
        load[least] += num_bytes
    return shares


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


def shorten(names: Sequence[str]) -> str:
    """List the first few names."""
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _segments(declared: Sequence[Sequence[Region]]) -> Iterator[tuple[Region, Sequence[int]]]:
    """Split each tensor wherever a region starts or stops, and give the ranks that hold each segment."""
    specs = merge_specs(declared)
    edges: dict[TensorId, list[tuple[int, int, int]]] = {tensor_id: [] for tensor_id in specs}
    for holder, regions in enumerate(declared):
        for region in regions:
            if region.start < region.stop:
                edges[region.spec.id] += [(region.start, +1, holder), (region.stop, -1, holder)]
    for tensor_id, spec in sorted(specs.items()):
        held: Counter[int] = Counter()
        position = 0
        for element, change, holder in [*sorted(edges[tensor_id]), (spec.total, 0, 0)]:
            if element > position:
                holders = tuple(sorted(+held))
                length = max(1, CHUNK_BYTES // spec.itemsize_bytes) if len(holders) > 1 else element - position
                for start in range(position, element, length):
                    yield Region(spec, start, min(start + length, element)), holders
                position = element
            held[holder] += change
